"""The forward sweep of a gradient: what it stores, and the loop that stores it.

A reverse sweep needs carries, which slots hold. It may need more, and then another loop
runs in place of the original, which has that in its carry or among its outputs:

- lists of rows in place of buffers (`steps/_row_lists.py`). They are leaves of the
  carry, as a loop writes to these in place, and are then stored as leaves of the last
  carry;
- the residuals of the last steps. These are taken back first, and then the room of what
  is stored of them is free for the others. Nothing of them is run again
  (`_step_parts.py`). The step returns its residuals as the first of its outputs, and
  the loop keeps rows of these for its last steps alone (`Loop.stored`).

There are maps for what goes in and comes out of it. To the rest of the program the loop
stays what it was: it is batched, and its outputs are left out, as the user wrote it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax import lax

from ..._arrays import Arrays, Flags, pick, put, split
from ..._programs import makes_refs
from ..._types import PyTree, Value
from ..steps._loop import zero
from ..steps._row_lists import RowList, listing
from ..steps._step import Step, StepResult, make_step
from ._backward_step import BackwardStep
from ._forward import Active
from ._layout import AbstractLayout, Needs, Saves, Stored
from ._leaves import StoredLeaves
from ._listing import is_listing, listed
from ._problem import Problem
from ._step_parts import KnownResiduals, StepParts, step_with_residuals
from ._transformed import again, gradient_back, needs_of_gradient, without_stored
from .slots._slots import DeviceSlots

# The final carry, `ys`, and what is stored.
Outputs: TypeAlias = tuple[list[Value], list[Value], Stored]
# What a loop stores, if anything.
MaybeSaves: TypeAlias = Saves[AbstractLayout] | None

# Residuals are stored in the form of slots on the device.
_SLOTS = DeviceSlots()


def saves_of_gradient(
    problem: Problem, shared: MaybeSaves, active: Active, y_active: Flags
) -> tuple[Saves[AbstractLayout], Saves[AbstractLayout]]:
    """Which carries the forward sweep of a gradient stores: its own, and all of them.

    If it stores some for another way back, `shared`, the two share a layout.
    """
    if shared is not None:
        layout = shared.layout
    else:
        bare = without_stored(problem)
        layout = bare.layout(active)
        # JAX's own derivative of a scan has rows of all steps, or of none. And a
        # reference that a step makes cannot be handed from the way there to the way
        # back.
        is_apart = layout.steps_with_residuals and makes_refs(problem.step.jaxpr)
        if bare is not problem or is_apart:
            layout = layout.by_carries()
    layout = listed(layout, active, problem.undifferentiated)
    if layout.stores_residuals:
        return (nothing := Saves(layout, Needs((), ()))), nothing
    problem = problem.under(layout)
    wanted = with_rows(problem, y_active)
    own = needs_of_gradient(problem, active, wanted, layout)
    every = own if shared is None else own.with_those_of(shared.needs)
    fitted = layout.for_needs(problem.step, every)
    if fitted is not layout:
        # What is noted is found by its identity.
        fitted = listed(fitted, active, problem.undifferentiated)
    # Both find the same in slots. A leaf that is stored once may be a list for the one,
    # and for the other it is as it is: part of what a loop stores that has lists.
    own = own._replace(held=every.held)
    return Saves(fitted, own), Saves(fitted, every)


@dataclasses.dataclass(frozen=True)
class StoredLists:
    """The `lists` that a loop stores of some leaves, all of them `final` in `needs`."""

    lists: tuple[tuple[int, RowList], ...]
    needs: Needs
    lead: int

    @property
    def of_lists(self) -> Flags:
        """Which leaves are stored as lists."""
        leaves = dict(self.lists)
        return tuple(leaf in leaves for leaf in range(len(self.needs.final)))

    @property
    def others(self) -> Flags:
        """The other leaves of the last carry that are stored."""
        pairs = zip(self.needs.final, self.of_lists, strict=True)
        return tuple(stored and not listed for stored, listed in pairs)

    def of(self, problem: Problem[Any]) -> Problem[Any]:
        """The loop in place of another one."""
        starts = (*problem.loop.padded_starts(problem.step.num_carry), 0)
        loop = dataclasses.replace(problem.loop, starts=starts, carry_paths=())
        step = listing(problem.step, self.lists, self.lead)
        return dataclasses.replace(problem, step=step, loop=loop)

    def saves(self, saves: MaybeSaves) -> MaybeSaves:
        """What it stores in place of the original."""
        held = (*self.needs.held, *[False] * (1 + len(self.lists)))
        final = (*self.others, False, *[True] * len(self.lists))
        return saves and dataclasses.replace(saves, needs=Needs(held, final))

    def inputs(self, inputs: PyTree) -> PyTree:
        """Its consts, initial carry and `xs`, from those of the original."""
        consts, init, xs = inputs
        lists = (own.started(init[self.lead + leaf]) for leaf, own in self.lists)
        return consts, [*init, zero(), *lists], xs

    def outputs(self, carry: Arrays, ys: Arrays, stored: Stored) -> Outputs:
        """The outputs of the original, from its own."""
        own, _ = split(carry, len(carry) - 1 - len(self.lists))
        last, rows = split(stored.last, sum(self.others))
        final = put(
            put([None] * len(self.others), self.others, last), self.of_lists, rows
        )
        return own, list(ys), stored._replace(last=pick(final, self.needs.final))


def lists_of(
    problem: Problem, saves: MaybeSaves, shared: MaybeSaves = None
) -> StoredLists | None:
    """The lists that a loop stores, if it stores any.

    What it stores for another way back, `shared`, are leaves as they are.
    """
    # Where plans are listed, a loop has no leaves but its own, see `residuals_of`.
    if saves is None or is_listing():
        return None
    known = StoredLeaves.of(saves.needs, again(problem), problem.loop_back)
    as_they_are = shared.needs.final if shared else [False] * len(saves.needs.final)
    lists = tuple(pair for pair in known.lists if not as_they_are[pair[0]])
    return StoredLists(lists, saves.needs, problem.lead) if lists else None


@dataclasses.dataclass(frozen=True)
class StoredResiduals:
    """The residuals of the last `steps` of a loop, for its backward step `back`."""

    back: BackwardStep
    steps: int

    @property
    def parts(self) -> StepParts:
        """The backward step in two programs."""
        return step_with_residuals(self.back)[1]

    @property
    def leaves(self) -> int:
        """How many arrays that is."""
        return len(self.parts.kept_types)

    def of(self, problem: Problem[Any]) -> Problem[Any]:
        """The loop in place of another one, of the same inputs."""
        # If the loop is itself the forward sweep of a gradient, it has some already, of
        # as many steps.
        leaves = self.leaves + problem.loop.stored[1]
        loop = dataclasses.replace(problem.loop, stored=(self.steps, leaves))
        step = _returning_residuals(self.back)
        return dataclasses.replace(problem, step=step, loop=loop)

    def outputs(self, carry: Arrays, ys: Arrays, stored: Stored) -> Outputs:
        """The outputs of the original, from its own."""
        rows, own = split(ys, self.leaves)
        return list(carry), own, stored._replace(rows=rows)

    def known(self, rows: Arrays, length: int, consts: Arrays) -> KnownResiduals:
        """The residuals in some rows, which a loop of this length has stored.

        Behind the consts of the step there may be others.
        """
        consts = consts[: self.back.step.num_consts]
        first, fixed = length - self.steps, self.parts.fixed(consts)
        return KnownResiduals(rows, first, self.back, self.parts, _SLOTS, fixed)


def residuals_of(
    layout: AbstractLayout, problem: Problem, active: Active, y_active: Flags
) -> StoredResiduals | None:
    """The residuals that the primal stores of its last steps, if the layout asks."""
    # Where plans are listed, a loop has no leaves but its own: its plan is looked up by
    # them. That program is never run.
    if is_listing() or not (steps := layout.steps_with_residuals):
        return None
    back = gradient_back(problem, active, with_rows(problem, y_active))
    # With the bars of loops in the step: it is not run again.
    step = problem.reversed_step(problem.step)
    return StoredResiduals(dataclasses.replace(back, step=step), steps)


@functools.lru_cache(maxsize=128)
def _returning_residuals(back: BackwardStep) -> Step:
    step, parts = step_with_residuals(back)

    def move(consts: list[Value], carry: list[Value], x: list[Value]) -> StepResult:
        after, y = step(consts, carry, x)
        kept, y = split(y, len(parts.kept_types))
        return after, [*_SLOTS.packed(lax.stop_gradient(kept)), *y]

    made = make_step(move, step.const_types, step.carry_types, step.x_types)
    return dataclasses.replace(made, inverse=step.inverse, saved=step.saved)


def run_storing(
    run: Callable[..., Outputs],
    problem: Problem,
    saves: MaybeSaves,
    inputs: PyTree,
    residuals: StoredResiduals | None = None,
    shared: MaybeSaves = None,
) -> Outputs:
    """Runs a loop that stores carries, lists of rows, and residuals of its last steps.

    `shared` is what of that is for another way back.
    """
    if residuals is not None:
        loop = residuals.of(problem), saves, inputs
        return residuals.outputs(*run_storing(run, *loop, shared=shared))
    if (lists := lists_of(problem, saves, shared)) is None:
        return run(problem, saves, inputs)
    loop = lists.of(problem), lists.saves(saves), lists.inputs(inputs)
    return lists.outputs(*run(*loop))


def with_rows(problem: Problem[Any], ys: Sequence[bool]) -> Flags:
    """The marked leaves of `y`, or none if the loop keeps no rows of `ys`."""
    return tuple(mark and problem.loop.rows > 0 for mark in ys)
