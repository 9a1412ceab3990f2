"""Residuals of the last steps, which the primal has stored."""

import dataclasses

from ..._arrays import Arrays, pick, put
from ..._types import Index
from ._backward_step import BlockEnds, BlockResult, Pull
from ._loop import element
from ._step_parts import StepParts
from .slots._slots import AbstractSlots


@dataclasses.dataclass(frozen=True)
class KnownResiduals:
    """The residuals of the last steps, which the primal has stored.

    Attributes:
        rows: The arrays; each row is for one step.
        first: The position of the step whose row is the first.
        back: The backward step whose residuals they are.
        parts: The same in two programs.
        slots: In which form they are stored.
        fixed: The residuals that are the same for all steps.
    """

    rows: Arrays
    first: int
    back: Pull
    parts: StepParts
    slots: AbstractSlots
    fixed: Arrays

    def take(
        self, consts: Arrays, x: Arrays, ends: BlockEnds, position: Index, now: Pull
    ) -> BlockResult:
        """Takes cotangents past the step at a position.

        Args:
            consts: The consts of the step.
            x: Its `x`.
            ends: The cotangents after the step, and its `z`.
            position: The position.
            now: The backward step of the sweep. The primal had to store the residuals
                for all cotangents that might arrive: here are those that did.
        """
        carried, z = ends
        dtypes = [aval.dtype for aval in self.parts.kept_types]
        rows = [element(row, position - self.first) for row in self.rows]
        kept = self.slots.unpacked(rows, dtypes)
        residuals = self.parts.residuals(consts, x, kept, self.fixed)
        of, whole = now.active, self.back.active
        of_carry, of_y = pick(of.carry, whole.carry), pick(now.wanted, self.back.wanted)
        among = lambda flags, values: put([None] * len(flags), flags, values)
        ends = among(of_carry, carried), among(of_y, z)
        sums, before, xs = self.parts.take(residuals, ends)
        return BlockResult(
            pick(sums, pick(of.consts, whole.consts)),
            pick(before, of_carry),
            pick(xs, pick(of.xs, whole.xs)),
        )
