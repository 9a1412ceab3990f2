"""A formula that computes tangents beside another one, and what its tangents are of."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

from .._arrays import Flags, instantiated, interleave, pick, put, zero_cotangent
from .._types import BatchAxis, PyTree, Value
from ._calculus import Groups, behind, joined
from ._leftover import Leftover


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
    leftover: Leftover | None = dataclasses.field(repr=False, compare=False)
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
