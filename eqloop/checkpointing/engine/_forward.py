"""Runs a loop forward, in one of three ways.

- `primal` stores nothing. It is for loops whose way back, if there is one, needs no
  carries.
- `stored` is for JAX to differentiate: it stores the residuals.
- `BySegments` stops at each carry that is to be stored, for slots to hold it
  (`slots/_slots.py`). It runs from each of them to the next one:

      store h0, run 4 steps | store h4, run 4 steps | store h8, run 2 steps

  Within a segment only the step is run, so a carry is written once for each segment. A
  loop over single steps would have to write one, or select whether to, at every step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    Flags,
    as_arrays,
    axes_of,
    nbytes,
    over_examples,
    split,
    symbolic_sizes,
    vary,
    waiting,
    zero_array,
)
from ..._programs import constant, laid_out_call, shared
from ..._types import Index, PyTree, Value
from ...progress import run_with_bar
from ..steps._loop import Loop, element, opaque, store, zero
from ..steps._step import Step, StepResult
from ._kept_rows import scan

_most = over_examples(jnp.max)

# Cotangents of so few bytes need not wait.
_WORTH_WAITING = 512

# A policy, as `jax.checkpoint` takes it. With `None` there is no `jax.checkpoint`, and
# a block stores all of its residuals.
Saveable = Callable[..., Any] | None


class Active(NamedTuple):
    """Which inputs of a loop are differentiated.

    A leaf of the carry counts if it has a tangent at any step, even if its initial
    value has none.
    """

    consts: Flags
    carry: Flags
    xs: Flags


def primal(
    step: Step, loop: Loop, consts: Arrays, init: Arrays, xs: Arrays
) -> "Reached":
    """Runs the loop and stores nothing.

    The step indexes into `xs` instead of scanning them, so they stay where they are.
    """
    steps, leaves = loop.stored
    if leaves:
        # In two parts: what is stored of the last steps is not computed before these.
        stop = loop.length - steps
        segments = BySegments(step, loop, (0,), stop, False, consts, xs).opaque()
        run = lambda segment, group, reached: segments.run(reached, segment, group)
        return segments.finished(segments.each(run, segments.start(init)))

    def body(
        read: tuple[Arrays, ...], state: tuple[Value, list[Value]], _: Value
    ) -> PyTree:
        (consts, xs), (position, carry) = read, state
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry), y

    state = (zero(), list(init))
    (position, carry), ys = scan(body, (consts, xs), state, [], loop)
    return Reached(None, position, carry, ys)


def stored(
    step: Callable[[Arrays, Arrays, Arrays], tuple[list[Value], list[Value]]],
    loop: Loop,
    policy: Saveable,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> StepResult:
    """Runs the loop for JAX to differentiate. Returns the final carry and `ys`."""
    # A function may close over arrays of NumPy, and of these JAX would store copies.
    consts, xs = as_arrays((consts, xs))
    evaluate, (consts, own) = under_policy(step, policy), shared(consts, loop.sums)
    # An axis that is in front already is not moved: outside of `jit` that would copy.
    moved = [
        jnp.moveaxis(x, axis, 0) if axis else x
        for x, axis in zip(xs, loop.x_axes, strict=True)
    ]

    # The `xs` are scanned, along their first axis. If the step indexed into them, as in
    # `primal`, JAX would add a cotangent as large as all of `xs` at every step.
    def body(
        read: tuple[Arrays, ...], state: tuple[None, list[Value]], x: list[Value]
    ) -> PyTree:
        (consts,), (_, carry) = read, state
        carry, y = evaluate(own(consts), carry, x)
        return (None, carry), y

    def run_scan(*flat: Value) -> list[Value]:
        consts, init, moved = split(flat, *counts)
        state = (None, init)
        (_, carry), ys = scan(body, (consts,), state, moved, loop, True)
        return [*carry, *ys]

    counts = len(consts), len(init)
    return split(laid_out_call(run_scan, *consts, *init, *moved), len(init))


def under_policy(
    step: Callable[..., PyTree], policy: Saveable
) -> Callable[..., PyTree]:
    """The step, with residuals that the policy allows when JAX differentiates it."""
    return step if policy is None else jax.checkpoint(step, policy=policy)


def iterate(
    move: Callable[[PyTree], PyTree],
    state: PyTree,
    left: Callable[[PyTree], Index],
    unroll: int,
) -> PyTree:
    """A `while_loop` that makes up to `unroll` moves per iteration.

    `left` says how many moves are left to make from a state.
    """

    def repeat(count: int, state: PyTree) -> PyTree:
        for _ in range(count):
            state = move(state)
        return state

    # One loop for groups of moves, then one for those left over. With `unroll=1` there
    # is a single loop.
    for count in sorted({1, unroll}, reverse=True):
        state = lax.while_loop(
            lambda state, count=count: left(state) >= count,
            functools.partial(repeat, count),
            state,
        )
    return state


class Reached(NamedTuple):
    """The state of a loop between two steps.

    Attributes:
        number: What the last report to the bar returned; `None` without a bar.
        position: The position of the next step.
        carry: The carry before that step.
        ys: The outputs so far, as whole arrays.
        saved: The rows of what the steps so far have saved; `None` if they save
            nothing.
    """

    number: Value
    position: Index
    carry: list[Value]
    ys: list[Value]
    saved: PyTree = None


def at_end(ct_carry: Arrays, count: Value) -> list[Value]:
    """Cotangents of the last carry, computed after the loop has run, and not sooner.

    `count` is how many steps it has run: one number, or one for each example.
    """
    # The cotangents of a loss are computed then. But zeros, and the ones of a sum, XLA
    # would make before the loop runs: they would take memory that depends on the loss,
    # and no plan knows that.
    types = list(map(jax.typeof, ct_carry))
    # No budget is for sizes that are not known.
    if symbolic_sizes(types) or nbytes(types) < _WORTH_WAITING:
        return list(ct_carry)
    return [waiting(ct, _most(count)) for ct in ct_carry]


class Group(NamedTuple):
    """Consecutive segments that one loop of the program runs.

    If there are too many groups, one loop with a dynamic trip count runs all segments.
    That compiles faster, but a GPU waits for the host at each of its steps.

    Attributes:
        first: The number of the first segment.
        size: How many segments there are.
        stride: How many steps each of them has; `None` if this is looked up in a table,
            since they are not equally long.
        stores: Whether any of their steps is among the last ones, see `Loop.stored`.
    """

    first: int
    size: int
    stride: int | None
    stores: bool


@dataclasses.dataclass(frozen=True)
class BySegments:
    """A loop in segments, which begin at the `starts` of an order.

    Attributes:
        step: The step.
        loop: The loop.
        starts: The positions at which segments start, whose carries are stored.
        stop: Where the last segment ends. No carry is stored from there on: `finished`
            runs what is left.
        keeps_last: Whether the carry at `stop` is stored as well.
        consts: The consts of the step.
        xs: The `xs` of the loop.
        needs_spare: Whether the order needs one more row than starts.
        most_groups: How many groups have loops with static trip counts, see `Group`.
        saved_rows: How many rows there are for what steps save, see `Step.saved`.
        save: From these rows, a carry and the row of the step before it, to the rows
            with what that step has saved; `None` if nothing is saved.
    """

    step: Step
    loop: Loop
    starts: tuple[int, ...]
    stop: int
    keeps_last: bool
    consts: Arrays
    xs: Arrays
    needs_spare: bool = False
    most_groups: int = 2
    saved_rows: int = 0
    save: Callable[[PyTree, Arrays, Index], PyTree] | None = None

    def opaque(self) -> "BySegments":
        """These segments for nested loops, see `opaque` in `_loop.py`."""
        return dataclasses.replace(self, consts=opaque(self.consts), xs=opaque(self.xs))

    @property
    def groups(self) -> list[Group]:
        """All segments, in groups. The program has the step once for each group."""
        ends = (*self.starts[1:], self.stop)
        sizes = [end - start for start, end in zip(self.starts, ends, strict=True)]
        stores = [self._stores(end) for end in ends]
        # Earlier steps do not have to compute what is stored of the last ones.
        kinds = list(zip(sizes, stores, strict=True))
        alike = [list(equal) for _, equal in itertools.groupby(kinds)]
        if len(alike) > self.most_groups:
            by_size = itertools.groupby(kinds, key=lambda kind: kind[0])
            alike = [list(equal) for _, equal in by_size]
        # A bar cuts segments where it reports, and a loop may stop within one. Then no
        # trip count is static in any case.
        has_bar = self.loop.meter.here.is_shown
        if has_bar or self.loop.stops or len(alike) > self.most_groups:
            return [Group(0, len(sizes), None, stores[-1])]
        groups, first = list[Group](), 0
        for equal in alike:
            stride, stores_any = equal[-1]
            groups.append(Group(first, len(equal), stride, stores_any))
            first += len(equal)
        return groups

    def _stores(self, stop: int) -> bool:
        """Whether any step before a position is one of which more is stored."""
        steps, _ = self.loop.stored
        return stop > self.loop.length - steps

    @property
    def are_static(self) -> bool:
        """Whether all loops have static trip counts."""
        return all(group.stride is not None for group in self.groups)

    def start(self, init: Arrays, rows: PyTree = None) -> Reached:
        """The state before the first step, with rows for what steps save."""
        loop = self.loop
        ys = list(map(zero_array, loop.stacked_types(self.step.y_types)))
        number = loop.meter.here.open([*self.consts, *init, *self.xs])
        reached = Reached(number, zero(), list(init), ys, rows)
        if not loop.stops:
            return reached
        # Within `shard_map`, each device may run another number of steps. Then all that
        # the loop carries differs between devices, and must have such a type.
        return jax.tree.map(lambda x: vary(x, axes_of(init[0])), reached)

    def each(
        self, body: Callable[[PyTree, Group, PyTree], PyTree], state: PyTree
    ) -> PyTree:
        """Calls `body(segment, group, state)`, which returns a state, for each segment.

        The state is a tuple whose first entry is a `Reached`.
        """
        # If the loop stops early, the segments after that have no steps, and their
        # carry is the last one.
        if self.loop.stops:
            axes = axes_of(state[0].carry[0])
            state = jax.tree.map(lambda x: vary(x, axes), state)
        for group in self.groups:
            # Bound as a default, as a lambda sees the last value of a loop variable.
            run = lambda i, state, of=group: body(of.first + i, of, state)
            state = lax.fori_loop(0, group.size, run, state)
        return state

    def run(self, reached: Reached, segment: Index, group: Group) -> Reached:
        """Runs a segment of a group, from where the one before it ended."""
        if group.stride is None:
            ends = constant([*self.starts[1:], self.stop])
            return self._run_to(reached, element(ends, segment), group.stores)
        return self._run(reached, group.stride, group.stores)

    def run_to(self, reached: Reached, stop: Index) -> Reached:
        """Runs steps up to a position within the segments, or until the loop ends."""
        return self._run_to(reached, stop, self._stores(self.stop))

    def finished(self, reached: Reached) -> Reached:
        """Runs the steps behind the last segment, if there are any."""
        length = self.loop.length
        if self.stop == length:
            return reached
        if self.loop.meter.here.is_shown:
            return self._run_to(reached, length, self._stores(length))
        return self._run(reached, length - self.stop, self._stores(length))

    def _run(self, reached: Reached, count: int, stores: bool) -> Reached:
        if count == 1:
            return self._move(reached, stores)
        unroll = min(self.loop.unroll, max(count, 1))
        body = lambda _, reached: self._move(reached, stores)
        return lax.fori_loop(0, count, body, reached, unroll=unroll)

    def _run_to(self, reached: Reached, stop: Index, stores: bool) -> Reached:
        # `run_with_bar` expects the position first in the state, and the carry second.
        number, *state = reached
        run = lambda state, stop: self._moves(Reached(number, *state), stop, stores)[1:]
        gauge, last_y = self.loop.meter.here, self._last_y
        number, state = run_with_bar(gauge, number, tuple(state), stop, run, last_y)
        return Reached(number, *state)

    def _moves(self, reached: Reached, stop: Index, stores: bool) -> Reached:
        move = functools.partial(self._move, stores=stores)
        if self.loop.stops:
            goes_on = lambda reached: reached.carry[0] & (reached.position < stop)
            return lax.while_loop(goes_on, move, reached)
        left = lambda reached: stop - reached.position
        return iterate(move, reached, left, self.loop.unroll)

    def _move(self, reached: Reached, stores: bool) -> Reached:
        number, position, carry, ys, saved = reached
        carry, y = self.step(self.consts, carry, self.loop.x(self.xs, position))
        steps, leaves = self.loop.stored
        (rows, ys), (new, y) = split(ys, leaves), split(y, leaves)
        if stores:
            # If segments with earlier steps are in the same loop, these all write to
            # the first row, which the first of the last steps then writes again. A
            # branch around the write would copy the buffers.
            row = jnp.maximum(position - (self.loop.length - steps), 0)
            rows = [store(b, leaf, row) for b, leaf in zip(rows, new, strict=True)]
        ys = [*rows, *self._with(ys, y, position)]
        if self.save is not None:
            # Under `vmap`, the examples that still run are at the same position, and
            # those that have stopped before save in vain.
            row = jnp.minimum(_most(position), self.saved_rows - 1)
            saved = self.save(saved, carry, row)
        return Reached(number, position + 1, carry, ys, saved)

    def _with(self, ys: Arrays, y: Arrays, position: Index) -> list[Value]:
        """`ys` with the outputs of the step at a position, if they are kept."""
        if not self.loop.rows:
            return list(ys)
        row, is_kept = self.loop.row(self.loop.index(position))
        # `True` itself if all rows are kept. Otherwise a step that is not kept writes
        # what the row has already: a write in a branch would copy all of `ys`.
        if is_kept is not True:
            before = [element(b, row) for b in ys]
            y = [jnp.where(is_kept, *pair) for pair in zip(y, before, strict=True)]
        return [store(b, leaf, row) for b, leaf in zip(ys, y, strict=True)]

    def _last_y(self, state: tuple[Value, list[Value], PyTree, PyTree]) -> list[Value]:
        position, _, ys, _ = state
        _, ys = split(ys, self.loop.stored[1])
        row, _ = self.loop.row(self.loop.index(position - 1))
        return [element(b, row) for b in ys] if self.loop.rows else []
