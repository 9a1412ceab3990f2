"""A formula that computes tangents beside another one, and what its tangents are of.

In forward mode a formula makes an equation for the tangents and one for the primal. JAX
has to be able to separate them: in `jax.checkpoint`, and in a `scan` or a `cond` that
is linearized, it evaluates the primal in one program and transposes the tangents in
another. A single equation could be divided (`_partial_eval.py`), but not every rule of
JAX would do so where only the primal is needed.

If the two equations stay in one program, the loop would run twice: that of the tangents
computes the primal as well, and XLA does not see that one loop contains the other. So
the equation of the tangents, which comes first, leaves the primal in a `Leftover`. Only
these two equations share it: there is no global cache.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax import lax

from .._arrays import Flags, bits, instantiated, interleave, pick, put, zero_cotangent
from .._compat import identity
from .._types import BatchAxis, PyTree, Value
from ._calculus import Groups, behind, joined
from ._equations import HoldsPrograms


@dataclasses.dataclass(frozen=True)
class Doubled:
    """A formula that computes the outputs of another one along with their tangents.

    Its inputs are those of the original and their tangents, in some order. So are its
    outputs.

    Attributes:
        formula: The doubled formula.
        uses: The inputs of the original that it takes.
        takes: The inputs of the original whose tangents it takes. There may be more
            than have one: a leaf of a carry may only get its tangent at a later step,
            and then starts from zeros.
        ins: Which inputs of the doubled formula are tangents.
        gives: The outputs of the original whose tangents it returns.
        outs: Which outputs of the doubled formula are tangents.
    """

    formula: Any
    uses: Flags
    takes: Flags
    ins: Flags
    gives: Flags
    outs: Flags

    @classmethod
    def of(cls, formula: Any, nonzeros: Groups, gives: Groups) -> Self:
        """For a formula with the tangents behind each group of inputs and of outputs.

        `nonzeros` and `gives` mark the original's inputs and outputs with tangents.
        """
        takes = joined(nonzeros)
        uses = (True,) * len(takes)
        ins, outs = behind(nonzeros), behind(gives)
        return cls(formula, uses, takes, ins, joined(gives), outs)

    def arrange(self, primals: Sequence[Value], tangents: Sequence[Value]) -> PyTree:
        """The inputs of the formula, from flat inputs and tangents of the original."""
        tangents = instantiated(pick(tangents, self.takes))
        flat = interleave(self.ins, pick(primals, self.uses), tangents)
        return self.formula.in_tree.unflatten(flat)

    def primals(self, flat: Sequence[Value]) -> list[Value]:
        """From entries for the formula's inputs to entries for those of the original.

        The entry is `None` for an input that the formula does not take.
        """
        of_primals = pick(flat, [not is_tangent for is_tangent in self.ins])
        return put([None] * len(self.uses), self.uses, of_primals)


@dataclasses.dataclass(frozen=True)
class TangentSource:
    """The formula whose tangents a `Selected` computes.

    Attributes:
        formula: The formula that was differentiated.
        primal: The settled formula, which computes the primal.
        doubled: The formula that computes both.
        leftover: Where to leave the primal, if an equation follows that computes it.
        is_transposed: Whether the reverse mode of `formula` is the transpose of these
            tangents. It is not if tangents are batched but their primals are not: then
            `formula` is one example, and the tangents are those of many.
    """

    formula: Any = dataclasses.field(repr=False)
    primal: Any = dataclasses.field(repr=False)
    doubled: Doubled = dataclasses.field(repr=False)
    leftover: "Leftover | None" = dataclasses.field(repr=False, compare=False)
    is_transposed: bool = True

    def may_pull(self, marks: Sequence[bool]) -> bool:
        """Whether only tangents are marked, so that `pull` can transpose them."""
        return self.is_transposed and not any(
            mark and not is_tangent
            for mark, is_tangent in zip(marks, self.doubled.ins, strict=True)
        )

    def pull(self, inputs: Sequence[Value], cts: Sequence[Value]) -> list[Value]:
        """The cotangents of all tangents that the doubled formula takes."""
        # The reverse mode of the doubled formula would be right, too, but slower: it
        # runs the tangents along with the primal, and a transpose does not depend on
        # them.
        formula, doubled = self.formula, self.doubled
        zeros = [zero_cotangent(aval) for aval in formula.out_avals_flat]
        in_cts = formula.pull(
            formula.in_tree.unflatten(doubled.takes),
            formula.in_tree.unflatten(doubled.primals(inputs)),
            formula.out_tree.unflatten(put(zeros, doubled.gives, cts)),
        )
        return pick(formula.flat_in(in_cts), doubled.takes)

    def with_formulas(self, change: Callable[[Any], Any]) -> Self:
        """This source with other formulas of the same meaning."""
        doubled = dataclasses.replace(
            self.doubled, formula=change(self.doubled.formula)
        )
        both = change(self.formula), change(self.primal)
        return dataclasses.replace(
            self, formula=both[0], primal=both[1], doubled=doubled
        )

    def leave(self, inputs: Sequence[Value], outs: Sequence[Value]) -> None:
        """Leaves the primal outputs for the equation of the primal."""
        if self.leftover is None or not all(self.doubled.uses):
            return
        # Under `vmap`, the doubled formula may batch outputs that the primal does not.
        outs = pick(outs, [not is_tangent for is_tangent in self.doubled.outs])
        types = [(aval.shape, aval.dtype) for aval in self.primal.out_avals_flat]
        if types == [(out.shape, out.dtype) for out in outs]:
            outputs = self.primal.out_tree.unflatten(outs)
            self.leftover.leave(self.primal, self.doubled.primals(inputs), outputs)

    def batched(
        self, axis_data: BatchAxis, inputs: Sequence[Value], dims: Sequence[int | None]
    ) -> "TangentSource | None":
        """This source under `vmap`; `None` if the doubled formula leaves out inputs."""
        doubled = self.doubled
        if not all(doubled.uses):
            return None
        at = doubled.primals(dims)
        is_transposed = pick(at, doubled.takes) == pick(dims, doubled.ins)
        same = dataclasses.replace(self, is_transposed=False)
        if all(dim is None for dim in at):
            return same
        changed, primal = (
            formula.batched(
                axis_data,
                formula.in_tree.unflatten(doubled.primals(inputs)),
                formula.in_tree.unflatten(at),
            )[0]
            for formula in (self.formula, self.primal)
        )
        return dataclasses.replace(
            self,
            formula=changed,
            primal=primal,
            is_transposed=is_transposed and self.is_transposed,
        )


# How the two equations of forward mode share their work.


@dataclasses.dataclass(frozen=True)
class _Known:
    formula: HoldsPrograms
    inputs: list[Callable[[], object]]
    trace: Any
    outputs: list[Callable[[], object]]
    tree: Any


class Leftover:
    """The place where the equation of the tangents leaves outputs for the primal's.

    Without `jit`, both equations are evaluated while the formula is differentiated, and
    after that nothing may be left. Under `jit`, they are expanded when the program is
    lowered: later, maybe more than once, and in several threads at the same time. Then
    each takes what its own trace has left. If another one has replaced that, it
    computes the primal again. No lock is needed for this, as an entry is replaced as a
    whole and never changed.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._is_differentiating = True

    def leave(
        self, formula: HoldsPrograms, inputs: Sequence[Value], outputs: PyTree
    ) -> None:
        """Keeps the outputs of a formula for when it is expanded for these inputs."""
        leaves, tree = jax.tree.flatten(outputs)
        inputs = list(map(identity, inputs))
        if self._is_differentiating:
            refer, kept = _hold, list(map(_hold, leaves))
        elif tracers := list(filter(_is_tracer, leaves)):
            # The program that holds this outlives the trace, so it must not keep the
            # tracers alive. The equations that read them do, while the trace lasts.
            lax.optimization_barrier(tracers)
            refer = _refer_to
            kept = [_refer_to(x) if _is_tracer(x) else _hold(x) for x in leaves]
        else:
            return  # nobody would free these arrays, should no primal follow
        self._known = _Known(
            formula, list(map(refer, inputs)), _trace_state(), kept, tree
        )

    def take(self, formula: HoldsPrograms, inputs: Sequence[Value]) -> PyTree | None:
        """The outputs that were left for these inputs, if any; they serve once."""
        # Taken out first: what is in `known` does not change any more.
        known, self._known = self._known, None
        if known is None or known.trace != _trace_state() or known.formula != formula:
            return None
        kept, mine = [refer() for refer in known.inputs], list(map(identity, inputs))
        if len(mine) != len(kept) or not all(map(_is_same_input, mine, kept)):
            return None
        return known.tree.unflatten([output() for output in known.outputs])

    def close(self) -> None:
        """Forgets what was left, as the formula has been differentiated."""
        self._known, self._is_differentiating = None, False


def _refer_to(x: object) -> Callable[[], object]:
    if _is_number(x):
        return _hold(x)  # nothing else may keep it alive, and it takes no room
    try:
        return weakref.ref(x)
    except TypeError:  # a variable of a program that is being lowered
        return _hold(x)


def _is_same_input(mine: Value, kept: Value) -> bool:
    """Whether two inputs are the same object.

    Numbers are compared by their bits, as JAX makes a new array each time it reads one.
    """
    if not (_is_number(mine) and _is_number(kept)):
        return mine is kept
    return bits(mine) == bits(kept)


def _is_tracer(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


def _hold(x: object) -> Callable[[], object]:
    return lambda: x


def _is_number(x: object) -> bool:
    return isinstance(x, np.ndarray) and not x.ndim


def _trace_state() -> object:
    return jex.get_opaque_trace_state(convention="eqloop")
