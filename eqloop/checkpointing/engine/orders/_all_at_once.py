"""The primal stores all residuals: JAX's own derivative of a scan."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ...._arrays import Arrays, Flags, pick, put, split
from ...._calls import format_bytes
from ...._types import PyTree, Value
from ....progress import step_with_bar, tied
from ...rewrites._in_place import run_in_place
from ...steps._loop import Loop, zero
from ...steps._step import Step
from .._costs import StepCost
from .._forward import Active, Saveable, at_end, stored
from .._pace import RESIDUALS, Pace, Piece
from .._sweep import AbstractReversal
from ._levels import Nest
from ._nested import Nested
from ._order import AbstractOrder, AbstractSlotOrder, Event


@dataclasses.dataclass(frozen=True)
class AllAtOnce(AbstractOrder):
    """The whole loop is one block, whose residuals the primal stores as it runs."""

    steps: int

    @property
    def length(self) -> int:
        return self.steps

    @property
    def block(self) -> int:
        return self.steps

    @property
    def block_sizes(self) -> Sequence[int]:
        return ()

    @property
    def slots(self) -> int:
        return 0

    @property
    def adjacent(self) -> int:
        return 0

    @property
    def evaluations(self) -> int:
        """The primal evaluates each step once, and no step is run again."""
        return self.steps

    @property
    def stores_residuals(self) -> bool:
        return True

    def by_carries(self) -> AbstractSlotOrder:
        # Every carry is stored, and each step is reversed by itself.
        return Nested((Nest((self.steps,)),))

    def as_part(self) -> AbstractSlotOrder:
        # One block, whose residuals are stored when it is run again.
        return Nested((Nest((1,), self.steps),))

    def stored_bytes(
        self, cost: StepCost, reversal: AbstractReversal, first: bool
    ) -> int:
        # `first` does not matter: there are neither slots nor blocks here.
        return cost.everything

    def pieces(self, reversal: AbstractReversal) -> frozenset[Piece]:
        return frozenset((RESIDUALS,))

    def duration(self, pace: Pace, reversal: AbstractReversal) -> float:
        return self.steps * pace.everything

    def event_bytes(self, cost: StepCost, event: Event) -> int:
        return cost.everything * event.residuals // self.steps

    def described(self, cost: StepCost) -> list[tuple[str, str]]:
        if not cost.everything:
            return [("stored", "nothing: the way back reads no residuals")]
        each = format_bytes(cost.everything // max(self.steps, 1))
        return [("stored", f"residuals, {each} a step")]


def store_residuals(
    step: Step,
    loop: Loop,
    policy: Saveable,
    active: Active,
    y_active: Flags,
    inputs: PyTree,
) -> tuple[Value, Value]:
    """Runs the loop forward by JAX's own `vjp`: its outputs, and its residuals."""
    # A bar of the way back is moved by a number in the carry whose cotangent rule
    # reports. `extra` is empty without a bar.
    reporting, extra = step_with_bar(loop.meter.back, step, loop.length)

    def counting(consts: Arrays, carry: Arrays, x: Arrays) -> PyTree:
        *carry, count = carry
        carry, y = reporting(consts, carry, x)
        return [*carry, count + 1], y

    def run(number: list[Value], *marked: PyTree) -> tuple[Value, Value]:
        consts, init, xs = map(put, inputs, active, marked)
        # A bar shows the leaves in front.
        init = [*init, *number, *extra[1:], zero()]
        (*carry, count), ys = stored(counting, loop, policy, consts, init, xs)
        carry, number, _ = split(carry, step.num_carry, len(number))
        # All outputs leave as `aux`, too, but `pull` takes cotangents only of these.
        moving = (number, pick(carry, active.carry), pick(ys, y_active))
        return moving, (carry, ys, (number, count))

    # `run` closes over inactive inputs, so JAX makes no cotangents for them.
    marked = map(pick, inputs, active)
    _, pull, (carry, ys, ends) = jax.vjp(run, extra[:1], *marked, has_aux=True)
    # `pull` is a PyTree: its leaves are the arrays that JAX has stored.
    return (carry, ys), (pull, *ends)


def pull_residuals(
    step: Step, loop: Loop, residuals: PyTree, ct_carry: Arrays, ct_ys: Arrays
) -> PyTree:
    """The cotangents of active inputs, from what `store_residuals` stored."""
    pull, after, count = residuals
    ct_carry = at_end(ct_carry, count)
    number = loop.meter.back.open([*after, *ct_carry, *ct_ys], jnp.float32)
    ends = jax.tree.leaves(number), ct_carry, ct_ys
    call = lambda pull, ends: pull(ends)
    number, *cts = run_in_place(step.jaxpr, call, pull, ends)
    return tied(number[0] if number else None, cts)
