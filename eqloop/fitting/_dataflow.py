"""Who computes each value of a program, who reads it, and what it depends on."""

import functools
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from .._compat import form_of
from .._programs import aval_of, evaluated, literal_value
from ..checkpointing import AxisMap, axis_maps

# Values of so many entries are computed here, to see what they are.
_MOST_ENTRIES = 1 << 20


class Dataflow:
    """A program in which nothing is called, and how its values depend on each other.

    Attributes:
        eqns: Its operations, which are known by their numbers.
        outs: The variables that it returns.
        makers: The operation that computes each value, and which of its results it is.
        readers: The operations that read each value, and as which of their operands.
        before: The operations that each depends on, as bits, and itself. The lowest bit
            is for all inputs.
        behind: Those that depend on each.
        maps: The axes along which operations are maps, by their identity.
    """

    def __init__(self, program: jex.ClosedJaxpr):
        self.eqns = program.jaxpr.eqns
        self.outs = {x for x in program.jaxpr.outvars if isinstance(x, jex.Var)}
        self.makers = dict[Any, tuple[int, int]]()
        self.readers = dict[Any, list[tuple[int, int]]]()
        self.before = list[int]()
        for i, eqn in enumerate(self.eqns):
            mask = 2 << i
            for n, x in enumerate(eqn.invars):
                if isinstance(x, jex.Var):
                    self.readers.setdefault(x, []).append((i, n))
                    maker = self.maker(x)
                    mask |= 1 if maker is None else self.before[maker[0]]
            self.before.append(mask)
            self.makers |= {x: (i, n) for n, x in enumerate(eqn.outvars)}
        self.behind = [0] * len(self.eqns)
        for i, eqn in reversed([*enumerate(self.eqns)]):
            for reader, _ in (r for x in eqn.outvars for r in self.readers.get(x, [])):
                self.behind[i] |= 2 << reader | self.behind[reader]
        self.maps = dict[int, tuple[jex.JaxprEqn, list[AxisMap]]]()
        self._constants = dict[Any, np.ndarray | None]()

    def maker(self, x: Any) -> tuple[int, int] | None:
        """The operation that computes a value, and which of its results that is."""
        return self.makers.get(x) if isinstance(x, jex.Var) else None

    def depends(self, x: Any) -> bool:
        """Whether a computed value depends on an input of the program."""
        return bool(self.before[self.makers[x][0]] & 1)

    @functools.cached_property
    def dimension_of(self) -> Callable[[Any, int], object]:
        """The dimension of an axis of a value: that of all axes that belong to it."""
        # Axes of which an operation is one map are joined, in a disjoint-set forest.
        parent = dict[tuple[Any, int], tuple[Any, int]]()

        def root(x: Any, axis: int) -> tuple[Any, int]:
            one = x, axis
            while parent.setdefault(one, one) != one:
                parent[one] = one = parent[parent[one]]
            return one

        for eqn in self.eqns:
            both = [*eqn.invars, *eqn.outvars]
            for one in self.maps.setdefault(id(eqn), (eqn, axis_maps(eqn)))[1]:
                pairs = zip(both, (*one.ins, *one.outs), strict=True)
                is_axis = lambda x, i: i is not None and isinstance(x, jex.Var)
                axes = [root(x, i or 0) for x, i in pairs if is_axis(x, i)]
                for a, b in itertools.pairwise(axes):
                    parent[root(*a)] = root(*b)
        return root

    def known_column(self, x: Any, column: int) -> np.ndarray | None:
        """A column of an array of indices, if it depends on no input."""
        maker = self.maker(x)
        eqn = None if maker is None else self.eqns[maker[0]]
        if (
            eqn is not None
            and form_of(eqn) == "concatenate"
            and eqn.params["dimension"]
        ):
            for part in eqn.invars:
                if column < (width := aval_of(part).shape[1]):
                    return self.known_column(part, column)
                column -= width
        value = self._constant(x)
        return None if value is None else value[:, column]

    def _constant(self, x: Any) -> np.ndarray | None:
        if isinstance(x, jex.Literal):
            return literal_value(x)
        if x not in self._constants:
            self._constants[x] = None
            maker = self.maker(x)
            if maker is None or self.depends(x) or aval_of(x).size > _MOST_ENTRIES:
                return None
            eqn = self.eqns[maker[0]]
            given = list(map(self._constant, eqn.invars))
            if not eqn.effects and all(value is not None for value in given):
                with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
                    outs = map(np.asarray, evaluated(eqn, given))
                    self._constants |= zip(eqn.outvars, outs, strict=True)
        return self._constants[x]


def in_order(needs: Sequence[set[int]], keys: Sequence[int]) -> list[int]:
    """An order in which each comes after those that it needs, by these keys else."""
    after, missing = [list[int]() for _ in needs], list(map(len, needs))
    for k, each in enumerate(needs):
        for j in each:
            after[j].append(k)
    ready = [(keys[k], k) for k, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = list[int]()
    while ready:
        order.append(heapq.heappop(ready)[1])
        for j in after[order[-1]]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, (keys[j], j))
    return order
