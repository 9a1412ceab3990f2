"""What a step may keep of its values, and what that saves.

With a policy, a step that is reversed computes again whatever the policy does not keep.
To keep a value saves computing it, and all that nothing but this value needs: what it
saves depends on what else is kept. So sets of values are compared, each by walking back
through the step from what its reversal reads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeAlias

import jax.core
import jax.extend.core as jex

from ..._arrays import nbytes
from ..._compat import form_of, form_params
from ..._device import remembered_per_device
from ..._programs import inlined
from ..._types import Value
from ..engine._costs import StepCost
from ..engine._forward import Active
from ..engine._kept_names import can_be_kept, inner_call, with_named_dots
from ..engine._problem import Problem
from ._cost import gradient_parts, step_cost
from ._work import equation_work, rates

Kept: TypeAlias = tuple[str, ...] | None

# Up to so many values, all of their sets are tried. Of more values there are too many
# sets, and only those near to good ones are tried.
_MOST_TRIED = 10
# No more sets than this are compared under all orders.
_MOST_SETS = 48


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation of a step: the values that it reads and computes.

    Attributes:
        reads: The values that it reads.
        gives: The values that it computes.
        work: The time it takes.
        name: The name that it gives to a value, if it does.
        size: The bytes of what it computes.
    """

    reads: tuple[Hashable, ...]
    gives: tuple[Hashable, ...]
    work: float
    name: str | None
    size: int


@dataclasses.dataclass(frozen=True)
class KeptValues:
    """What the reversal of a step reads, and from what that is computed.

    Attributes:
        operations: Those of the step, in their order.
        read: The values that are read by the reversal.
    """

    operations: tuple[Operation, ...]
    read: frozenset[Hashable]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the values that can be kept, in the order of the step."""
        names = (operation.name for operation in self.operations)
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def cost(self, kept: Iterable[str]) -> tuple[int, float]:
        """The bytes kept of a step, and the time to compute its other values again."""
        kept, needed = set(kept), set(self.read)
        size, work = 0, 0.0
        # Backwards, so whoever reads a value has been seen before the operation that
        # gives it. `needed` are the values that the reversal reads, or reads to compute
        # others again.
        for operation in reversed(self.operations):
            if needed.isdisjoint(operation.gives):
                continue
            if operation.name in kept:
                size += operation.size
            else:
                work += operation.work
                needed.update(operation.reads)
        return size, work

    def best(self) -> list[tuple[tuple[str, ...], int, float]]:
        """The sets that no other beats both in bytes and in time, the smallest first.

        Each is its names, its bytes, and the time to compute the other values again.
        """
        sets = self._all() if len(self.names) <= _MOST_TRIED else self._near()
        found: list[tuple[tuple[str, ...], int, float]] = []
        # In the order of their bytes, so a set is beaten unless it takes less time than
        # the last one that was found.
        for size, work, kept in sorted((*self.cost(k), k) for k in sets):
            if not found or work < found[-1][2]:
                found.append((kept, size, work))
        return found

    def _all(self) -> Iterator[tuple[str, ...]]:
        for count in range(len(self.names) + 1):
            yield from itertools.combinations(self.names, count)

    def _near(self) -> Iterator[tuple[str, ...]]:
        """Sets from everything to nothing, each without what saves least per byte.

        The other way, values that only pay together would never be added one by one.
        """
        kept = self.names
        yield kept
        while kept:
            size, work = self.cost(kept)

            def loss(
                one: tuple[str, ...], size: int = size, work: float = work
            ) -> float:
                # What one value saves depends on which others are kept.
                new_size, new_work = self.cost(one)
                return (new_work - work) / max(size - new_size, 1)

            kept = min(itertools.combinations(kept, len(kept) - 1), key=loss)
            yield kept


@remembered_per_device(maxsize=128)
def kept_values(problem: Problem, active: Active) -> KeptValues:
    """What a step may keep, of a loop without a policy."""
    step = problem.step.rewritten(with_named_dots)
    named = dataclasses.replace(problem, step=step)
    # The part of the gradient that comes before the cotangents: its outputs are what
    # the reversal reads. A call is no operation, as a policy keeps values within it.
    ahead = gradient_parts(named, active).ahead
    program = inlined(ahead, lambda eqn: inner_call(eqn) is not None).jaxpr
    operations = (
        Operation(
            _variables(eqn.invars),
            tuple(eqn.outvars),
            equation_work(eqn, rates()),
            _name_given(eqn),
            nbytes([var.aval for var in eqn.outvars]),
        )
        for eqn in program.eqns
    )
    return KeptValues(tuple(operations), frozenset(_variables(program.outvars)))


@remembered_per_device(maxsize=128)
def costs_by_kept(
    problem: Problem, active: Active
) -> tuple[tuple[tuple[str, ...], StepCost], ...]:
    """What a step costs that keeps some of its values, for every set worth a try.

    The first of them is nothing.
    """
    sets = _evenly_chosen(kept_values(problem, active).best())
    nothing, _, again = sets[0]
    # One set is traced, and the others are told from it by what they add and spare.
    bare = step_cost(problem.keeping(nothing), active)
    found = []
    for kept, size, work in sets:
        cost = dataclasses.replace(
            bare,
            residuals=bare.residuals + size,
            everything=bare.everything + problem.loop.length * size,
            reversal=bare.reversal - again + work,
        )
        found.append((kept, cost))
    return tuple(found)


def _evenly_chosen(sets: list[Value]) -> list[Value]:
    last = len(sets) - 1
    at = sorted({round(i * last / (_MOST_SETS - 1)) for i in range(_MOST_SETS)})
    return [sets[i] for i in at]


def _name_given(eqn: jex.JaxprEqn) -> str | None:
    names = form_of(eqn) == "name" and can_be_kept(eqn)
    return form_params(eqn)["name"] if names else None


def _variables(atoms: Iterable[jax.core.Atom]) -> tuple[jax.core.Atom, ...]:
    return tuple(atom for atom in atoms if not isinstance(atom, jex.Literal))
