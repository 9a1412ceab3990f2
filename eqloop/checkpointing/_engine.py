"""Runs a layout: the primal, the forward sweep that saves slots, the reverse sweep.

Plain JAX on lists of arrays. Nothing in this file is differentiated by JAX but single
blocks: the derivatives of a whole loop are made of these three functions, in
`_primitive.py`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from . import _binomial
from ._layout import Nested, Revolved
from ._levels import Nest
from ._loop import Loop, element, part, put_part, stack_of, store
from ._step import Arrays, Flags, Step

Policy = Callable[..., Any] | None


def primal(
    step: Step, loop: Loop, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop and saves nothing. Returns the final carry and `ys`."""

    def body(state: tuple[Any, list[Any]], _: None) -> tuple[Any, list[Any]]:
        position, carry = state
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry), y

    (_, carry), ys = _scan(body, (_zero(), list(init)), loop)
    return carry, ys


def stored(
    step: Step, loop: Loop, policy: Policy, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop so that JAX's own derivative of it stores the residuals.

    The axes of `xs` are moved to the front, since a scan that indexes into its `xs`
    itself would be given a cotangent of all of them at every step.
    """
    evaluate = step if policy is None else jax.checkpoint(step, policy=policy)
    moved = [jnp.moveaxis(x, axis, 0) for x, axis in zip(xs, loop.x_axes, strict=True)]
    return lax.scan(
        lambda carry, x: evaluate(consts, carry, x),
        list(init),
        moved,
        length=loop.length,
        reverse=loop.reverse,
        unroll=loop.unroll,
    )


def single(
    step: Step, loop: Loop, policy: Policy, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """A loop of one step, without the loop."""
    x = [lax.squeeze(x, [axis]) for x, axis in zip(xs, loop.x_axes, strict=True)]
    evaluate = step if policy is None else jax.checkpoint(step, policy=policy)
    carry, y = evaluate(consts, init, x)
    return carry, [leaf[None] for leaf in y]


@dataclasses.dataclass(frozen=True)
class Walk:
    """Runs steps for their carries alone."""

    step: Step
    loop: Loop
    consts: Arrays
    xs: Arrays

    def advance(self, carry: Arrays, start: Any, count: int) -> list[Any]:
        """The carry `count` steps after `start`; the count is static."""
        if count == 1:
            return self.next(carry, start)
        body = lambda i, carry: self.next(carry, start + i)
        unroll = min(self.loop.unroll, count)
        return lax.fori_loop(0, count, body, list(carry), unroll=unroll)

    def advance_to(self, carry: Arrays, start: Any, stop: Any) -> list[Any]:
        """The carry at the position `stop`; both positions are dynamic."""

        def move(state: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            position, carry = state
            return position + 1, self.next(carry, position)

        state = (start, list(carry))
        for stride in sorted({1, self.loop.unroll}, reverse=True):
            state = lax.while_loop(
                lambda state: state[0] + stride <= stop,
                lambda state: _repeat(move, stride, state),
                state,
            )
        return state[1]

    def next(self, carry: Arrays, position: Any) -> list[Any]:
        """The carry after the step at a position."""
        return self.step(self.consts, carry, self.loop.x(self.xs, position))[0]


def forward(
    step: Step,
    loop: Loop,
    layout: Nested | Revolved,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the loop and leaves carries in slots. Returns the carry, `ys`, the slots."""
    slots = [stack_of(c, layout.primal_slots + 1) for c in init]
    if isinstance(layout, Revolved) and not step.y_types:
        walk = Walk(step, loop, consts, xs)
        return _forward_by_segments(walk, layout, list(init), slots)
    row_of = _row_of(layout)

    def body(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], list[Any]]:
        position, carry, slots = state
        row = row_of(position)
        slots = [store(s, c, row) for s, c in zip(slots, carry, strict=True)]
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry, slots), y

    (_, carry, slots), ys = _scan(body, (_zero(), list(init), slots), loop)
    return carry, ys, slots


def _forward_by_segments(
    walk: Walk, layout: Revolved, init: list[Any], slots: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The same where there are no `ys`: between two slots nothing but the step is run.

    The rows of `_row_of` are not cheap to find for so irregular a layout.
    """
    starts = jnp.asarray([*layout.starts, layout.length], jnp.int32)

    def body(row: Any, state: tuple[list[Any], list[Any]]) -> Any:
        carry, slots = state
        slots = [store(s, c, row) for s, c in zip(slots, carry, strict=True)]
        start, stop = element(starts, row), element(starts, row + 1)
        return walk.advance_to(carry, start, stop), slots

    carry, slots = lax.fori_loop(0, layout.primal_slots, body, (init, slots))
    return carry, [], slots


def _row_of(layout: Nested | Revolved) -> Callable[[Any], Any]:
    """Which row of the slots the carry at a position is written to.

    Carries that are not kept are written, too: to a row that is written again before
    it is read, or to one more row. That is cheaper than a branch, for which a GPU waits
    for the host; and a row that is a function of the position alone, and not of what
    was written before, adds nothing to the state of the loop.
    """
    if isinstance(layout, Revolved):
        # As many starts as there are before the position, by bisection.
        bits = layout.primal_slots.bit_length()
        padding = [layout.length] * (2**bits - layout.primal_slots)
        starts = jnp.asarray([*layout.starts, *padding], jnp.int32)

        def row_at(position: Any) -> Any:
            row = _zero()
            for bit in reversed(range(bits)):
                further = row + 2**bit
                row = jnp.where(element(starts, further - 1) < position, further, row)
            return row

        return row_at

    def row_in_nests(position: Any) -> Any:
        row, first_row, start = layout.primal_slots, 0, 0
        for nest in layout.nests:
            offset = position - start
            starts_here = (offset >= 0) & (offset % nest.stride == 0)
            row = jnp.where(starts_here, first_row + offset // nest.stride, row)
            first_row, start = first_row + nest.levels[0], start + nest.length
        return row

    return row_in_nests


class Active(NamedTuple):
    """Which inputs are differentiated, and so which leaves of the carry vary."""

    consts: Flags
    carry: Flags
    xs: Flags


@dataclasses.dataclass
class Cotangents:
    """The cotangents that a reverse sweep carries along: active leaves only."""

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


jax.tree_util.register_dataclass(
    Cotangents, data_fields=["consts", "carry", "xs"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A reverse sweep: all that stays the same while it runs.

    Attributes:
        active: Which inputs are differentiated.
        ct_ys: The cotangents of `ys`, `None` for those that are zero.
    """

    step: Step
    loop: Loop
    policy: Policy
    active: Active
    consts: Arrays
    xs: Arrays
    ct_ys: Sequence[Any | None]

    @property
    def walk(self) -> Walk:
        return Walk(self.step, self.loop, self.consts, self.xs)

    def run(
        self, layout: Nested | Revolved, slots: Arrays, ct_carry: Arrays
    ) -> Cotangents:
        """Takes the cotangents of the outputs back to those of the inputs.

        Args:
            layout: How the loop was cut.
            slots: The carries that `forward` saved.
            ct_carry: The cotangents of the active leaves of the final carry.
        """
        cts = Cotangents(
            [jnp.zeros_like(c) for c in pick(self.consts, self.active.consts)],
            list(ct_carry),
            [jnp.zeros_like(x) for x in pick(self.xs, self.active.xs)],
        )
        if isinstance(layout, Revolved):
            return _reverse_revolved(self, layout, slots, cts)
        return _reverse_nests(self, layout.nests, slots, cts)

    def pull(
        self, carry: Arrays, start: Any, count: int, cts: Cotangents
    ) -> Cotangents:
        """Reverses a block of `count` steps, given the carry before it."""
        xs = self.loop.block(self.xs, start, count)
        at = self.loop.block_start(start, count)
        ct_ys = [part(ct, at, count) for ct in self.ct_ys if ct is not None]
        _, pull = jax.vjp(
            self._block(carry, xs, count),
            pick(self.consts, self.active.consts),
            pick(carry, self.active.carry),
            pick(xs, self.active.xs),
        )
        ct_consts, ct_carry, ct_xs = pull((cts.carry, ct_ys))
        axes = pick(self.loop.x_axes, self.active.xs)
        return Cotangents(
            [a + b for a, b in zip(cts.consts, ct_consts, strict=True)],
            ct_carry,
            [
                put_part(whole, ct, at, axis)
                for whole, ct, axis in zip(cts.xs, ct_xs, axes, strict=True)
            ],
        )

    def _block(self, carry: Arrays, xs: Arrays, count: int) -> Callable[..., Any]:
        """A block as a function of the active inputs, to its active outputs."""
        active, loop = self.active, self.loop.part(count)
        wanted = [ct is not None for ct in self.ct_ys]
        run = stored if count > 1 else single

        def block(*marked: Arrays) -> tuple[list[Any], list[Any]]:
            inputs = [
                put(leaves, flags, new)
                for leaves, flags, new in zip(
                    (self.consts, carry, xs),
                    (active.consts, active.carry, active.xs),
                    marked,
                    strict=True,
                )
            ]
            last, ys = run(self.step, loop, self.policy, *inputs)
            return pick(last, active.carry), pick(ys, wanted)

        return block


def _reverse_nests(
    sweep: Sweep, nests: Sequence[Nest], slots: Arrays, cts: Cotangents
) -> Cotangents:
    position = sum(nest.length for nest in nests)
    row = sum(nest.levels[0] for nest in nests)
    for nest in reversed(nests):
        position, row = position - nest.length, row - nest.levels[0]
        cts = _reverse_level(sweep, nest, position, slots, row, cts)
    return cts


def _reverse_level(
    sweep: Sweep, nest: Nest, start: Any, slots: Arrays, row: int, cts: Cotangents
) -> Cotangents:
    """Reverses a nest whose outermost carries lie in `slots` from a row on."""
    count, *inner = nest.levels

    def body(i: Any, cts: Cotangents) -> Cotangents:
        segment = count - 1 - i
        position = start + segment * nest.stride
        carry = [element(s, row + segment) for s in slots]
        if not inner:
            return sweep.pull(carry, position, nest.block, cts)
        within = Nest(tuple(inner), nest.block)
        filled = _fill(sweep, carry, position, within)
        return _reverse_level(sweep, within, position, filled, 0, cts)

    unroll = 1 if inner else min(sweep.loop.unroll, count)
    return lax.fori_loop(0, count, body, cts, unroll=unroll)


def _fill(sweep: Sweep, carry: Arrays, start: Any, nest: Nest) -> list[Any]:
    """The carries at the start of each outermost segment of a nest."""

    def body(i: Any, state: tuple[list[Any], list[Any]]):
        carry, slots = state
        carry = sweep.walk.advance(carry, start + i * nest.stride, nest.stride)
        return carry, [store(s, c, i + 1) for s, c in zip(slots, carry, strict=True)]

    count = nest.levels[0]
    slots = [stack_of(c, count) for c in carry]
    unroll = max(min(sweep.loop.unroll, count - 1), 1) if nest.stride == 1 else 1
    return lax.fori_loop(0, count - 1, body, (list(carry), slots), unroll=unroll)[1]


class _Stack(NamedTuple):
    """The slots in use while a chain of blocks is reversed, a segment to each slot.

    Attributes:
        top: The last slot in use.
        start: The block at which its segment starts.
        rank: The rank of its segment, which says how it is split (`_binomial`).
        table: Start and rank of the segments of the slots before.
        slots: The carries. One more row takes those that find no free slot.
    """

    top: Any
    start: Any
    rank: Any
    table: Any
    slots: list[Any]


def _reverse_revolved(
    sweep: Sweep, layout: Revolved, slots: Arrays, cts: Cotangents
) -> Cotangents:
    """Reverses a chain of blocks, last to first, with a stack of slots in place."""
    chain = _Chain(sweep, layout)
    # The first block may be shorter. It is the last to be reversed, by itself.
    first = int(layout.missing > 0)

    def reverse_run(state: tuple[Any, _Stack, Cotangents]) -> Any:
        block, stack, cts = state
        stack = chain.split(stack, block)
        stack, row, low = chain.fill(stack, block)
        cts = chain.pull_run(stack.slots, row, block, jnp.maximum(low, first), cts)
        return low - 1, chain.drop(stack, low), cts

    state = (jnp.asarray(layout.blocks - 1, jnp.int32), chain.stack(slots), cts)
    _, stack, cts = lax.while_loop(lambda state: state[0] >= first, reverse_run, state)
    if first:
        carry = [element(s, 0) for s in stack.slots]
        cts = sweep.pull(carry, _zero(), layout.block - layout.missing, cts)
    return cts


class _Chain:
    """How the stack of slots moves along a chain of blocks."""

    def __init__(self, sweep: Sweep, layout: Revolved):
        self.sweep = sweep
        self.layout = layout
        self.last = layout.primal_slots - 1
        ranks = max(rank for _, rank in layout.segments) + 1
        limit = layout.blocks + 1
        # reach[k, r + 1] is the longest chain of k slots at rank r, cut to fit.
        reach = [
            [min(_binomial.reach(k, r), limit) for r in range(-1, ranks)]
            for k in range(layout.primal_slots + 1)
        ]
        # With a single slot nothing is ever split, and the table would be long.
        self.reach = jnp.asarray(reach if self.last else [[0]], jnp.int32)

    def position(self, block: Any) -> Any:
        """The position at which a block starts."""
        start = block * self.layout.block - self.layout.missing
        return jnp.maximum(start, 0) if self.layout.missing else start

    def stack(self, slots: Arrays) -> _Stack:
        """As the primal leaves it, with all slots in use."""
        ranks = [rank for _, rank in self.layout.segments]
        rows = list(zip(self.layout.block_starts, ranks, strict=True))
        top, start, rank = (
            jnp.asarray(number, jnp.int32) for number in (self.last, *rows[-1])
        )
        return _Stack(top, start, rank, jnp.asarray(rows, jnp.int32), list(slots))

    def split(self, stack: _Stack, block: Any) -> _Stack:
        """Stores the carries that start new segments before the block.

        Ends with a segment that is reversed with one advance over each of its blocks,
        or without a free slot.
        """

        def unfinished(stack: _Stack) -> Any:
            return (
                (stack.start < block) & (stack.rank > 1) & (stack.top < self.last)
            )

        def move(stack: _Stack) -> _Stack:
            top, start, rank, table, slots = stack
            free = self.last - top
            length = block + 1 - start
            near = self._reach_below(free + 1, rank)
            stop = start + jnp.minimum(near, length - self._reach_below(free, rank))
            carry = [element(s, top) for s in slots]
            begin, end = self.position(start), self.position(stop)
            carry = self.sweep.walk.advance_to(carry, begin, end)
            table = store(table, jnp.stack([start, rank - 1]), top)
            slots = [store(s, c, top + 1) for s, c in zip(slots, carry, strict=True)]
            return _Stack(top + 1, stop, rank, table, slots)

        return lax.while_loop(unfinished, move, stack)

    def fill(self, stack: _Stack, block: Any) -> tuple[_Stack, Any, Any]:
        """Advances to the block and stores all carries on the way, if slots are free.

        If none is, they all go to the row beyond the last slot. So does the carry of
        the block itself when those before it have taken the slots.

        Returns:
            The slots, the row of the block's carry, and the first block whose carry
            lies there as well, with those in between in the rows in between.
        """
        has_free = stack.top < self.last
        stride = jnp.where(has_free, 1, 0)

        def move(state: tuple[Any, list[Any], list[Any]]) -> Any:
            at, carry, slots = state
            row = stack.top + 1 + stride * (at - stack.start)
            carry = self._next(carry, at)
            return at + 1, carry, [store(s, c, row) for s, c in zip(slots, carry)]

        carry = [element(s, stack.top) for s in stack.slots]
        state = (stack.start, carry, stack.slots)
        *_, slots = lax.while_loop(lambda state: state[0] < block, move, state)
        count = block - stack.start
        row = stack.top + jnp.where(has_free, count, jnp.minimum(count, 1))
        low = jnp.where(has_free, stack.start, block)
        return stack._replace(slots=slots), row, low

    def pull_run(
        self, slots: Arrays, row: Any, block: Any, low: Any, cts: Cotangents
    ) -> Cotangents:
        """Reverses the blocks from one down to another; their carries lie in a row."""

        def pull(state: tuple[Any, Any, Cotangents]) -> tuple[Any, Any, Cotangents]:
            row, block, cts = state
            carry = [element(s, row) for s in slots]
            position = block * self.layout.block - self.layout.missing
            cts = self.sweep.pull(carry, position, self.layout.block, cts)
            return row - 1, block - 1, cts

        state = (row, block, cts)
        for stride in sorted({1, self.sweep.loop.unroll}, reverse=True):
            state = lax.while_loop(
                lambda state: state[1] - stride >= low - 1,
                lambda state: _repeat(pull, stride, state),
                state,
            )
        return state[-1]

    def drop(self, stack: _Stack, low: Any) -> _Stack:
        """Frees the slot whose segment has been reversed, if it has been wholly."""
        done = stack.start == low
        top = jnp.maximum(stack.top - done, 0)
        start, rank = element(stack.table, top)
        start = jnp.where(done, start, stack.start)
        rank = jnp.where(done, rank, stack.rank)
        return _Stack(top, start, rank, stack.table, stack.slots)

    def _next(self, carry: Arrays, block: Any) -> list[Any]:
        """The carry after a block."""
        start = self.position(block)
        if self.layout.missing:
            return self.sweep.walk.advance_to(carry, start, self.position(block + 1))
        return self.sweep.walk.advance(carry, start, self.layout.block)

    def _reach_below(self, slots: Any, rank: Any) -> Any:
        """The longest chain that is reversed at the rank below."""
        return lax.dynamic_slice(
            self.reach, (slots, rank), (1, 1), allow_negative_indices=False
        )[0, 0]


def pick(leaves: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The leaves that are marked."""
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def put(leaves: Sequence[Any], flags: Sequence[bool], marked: Arrays) -> list[Any]:
    """The leaves, with the marked ones replaced."""
    new = iter(marked)
    return [
        next(new) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
    ]


def _repeat(f: Callable[[Any], Any], count: int, state: Any) -> Any:
    for _ in range(count):
        state = f(state)
    return state


def _zero() -> Any:
    return jnp.zeros((), jnp.int32)


def _scan(body: Callable[..., Any], state: Any, loop: Loop) -> Any:
    return lax.scan(
        body, state, None, loop.length, reverse=loop.reverse, unroll=loop.unroll
    )
