"""A function with one budget, as a primitive: it is planned where it is differentiated.

Its tangents, and the function under `vmap`, are functions with the same budget.
"""

from collections.abc import Hashable, Sequence
from typing import Self

import jax
import jax.extend.core as jex

from .._arrays import Flags, instantiated, pick, put
from .._device import DeviceLike, planning_for_call
from .._programs import (
    Doubled,
    Formula,
    Rewrite,
    Static,
    batched,
    pushed,
    reached,
    run,
    settled,
)
from .._types import BatchAxis, PyTree, Value
from ..progress import Again, BarChange
from ._decision import Cut, Limit, decided
from ._options import Way


class FittedCall(Formula):
    """`inputs -> outputs`, both lists of arrays."""

    program: jex.ClosedJaxpr
    limit: Limit
    device: DeviceLike | None
    ways: tuple[Way, ...] | None

    def __init__(
        self,
        program: jex.ClosedJaxpr,
        limit: Limit,
        device: DeviceLike | None,
        ways: tuple[Way, ...] | None,
    ):
        self.in_avals, self.out_aval = tuple(program.in_avals), list(program.out_avals)
        self.params = dict(program=program, limit=limit, device=device, ways=ways)
        self.effects = program.effects
        super().__init__()

    def expand(self, *inputs: Value) -> list[Value]:
        return run(self.program, *inputs)

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.program]

    def rewritten(self, rewrite: Rewrite) -> Self:
        return self.with_params(program=rewrite(self.program))

    def with_bars(self, change: BarChange) -> Self:
        return self.rewritten(change)

    def doubled(self, moves: Flags) -> Doubled:
        gives = tuple(self.moves_out(moves))
        program = pushed(self.program, (moves,), (gives,))
        return Doubled.of(self._of(program, None), (moves,), (gives,))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        return self.rewritten(lambda program: settled(program, moves, reverse))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        marks = tuple(map(bool, moves_in))
        return list(reached(self.program, marks, is_derivative=True))

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        if axis_name is not None:  # a batch has all outputs batched
            return super().reached_out(marks, axis_name)
        return list(reached(self.program, tuple(marks)))

    def sweep_forward(
        self, perturbed: PyTree, *inputs: Value
    ) -> tuple[PyTree, PyTree, PyTree]:
        marks = self._marks(perturbed)
        moves_out = self.moves_out(marks)
        cut, ways = self._decided(marks)

        def moving(*moving: Value) -> tuple[list[Value], list[Value]]:
            outs = cut.run(ways, put(inputs, marks, moving), marks)
            return pick(outs, moves_out), outs

        _, pull, outs = jax.vjp(moving, *pick(inputs, marks), has_aux=True)
        residuals, structure = jax.tree.flatten(pull)
        return outs, (Static((marks, structure)), residuals), moves_out

    def _decided(self, marks: Flags) -> tuple[Cut, tuple[Way, ...]]:
        """The parts of the function, and the way to run each."""
        if self.ways is None:
            with planning_for_call(self.device):
                decision = decided(self.program, marks, self.limit)
            return decision.cut, decision.ways
        cut = Cut.of(self.program)
        if not cut.takes(self.ways):
            raise ValueError(
                f"Fit: this plan is for another function, or for inputs of other "
                f"sizes: it has {len(self.ways)} parts, and this function "
                f"{len(cut.parts)}. Make a plan for these inputs, by `plan`."
            )
        return cut, self.ways

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> tuple[PyTree, PyTree]:
        known, residuals = residuals
        marks, structure = known.value
        pull = jax.tree.unflatten(structure, residuals)
        wanted = pick(self.flat_out(cts), self.moves_out(marks))
        cts = put(self.zero_cts(), marks, pull(instantiated(wanted)))
        return tuple(cts), None

    def pull_logs(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> tuple[PyTree, PyTree]:
        again = self.with_bars(Again())
        _, residuals, _ = again.sweep_forward(perturbed, *inputs)
        return again.sweep_back(residuals, cts)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        out_dims = (0,) * len(self.out_avals_flat)
        program = batched(self.program, axis_data, tuple(dims), out_dims)
        # What was decided for an example holds for a batch, if that has the same parts.
        is_alike = self.ways is not None and Cut.of(program).takes(self.ways)
        ways = self.ways if is_alike else None
        return self._of(program, ways), args, list(out_dims)

    def _of(
        self, program: jex.ClosedJaxpr, ways: tuple[Way, ...] | None
    ) -> "FittedCall":
        return FittedCall(program, self.limit, self.device, ways)
