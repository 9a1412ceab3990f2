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

    (_, carry), ys = _scan(body, (_zero(), list(init)), loop.length, loop)
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


def forward(
    step: Step,
    loop: Loop,
    layout: Nested | Revolved,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the loop and leaves carries in slots. Returns the carry, `ys`, the slots."""
    first, row_of = _rows(layout)

    def body(state: tuple[Any, ...], _: None) -> tuple[tuple[Any, ...], list[Any]]:
        position, memory, carry, slots = state
        row, memory = row_of(position, memory)
        slots = [store(s, c, row) for s, c in zip(slots, carry, strict=True)]
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, memory, carry, slots), y

    slots = [stack_of(c, layout.primal_slots + 1) for c in init]
    state = (_zero(), first, list(init), slots)
    (_, _, carry, slots), ys = _scan(body, state, loop.length, loop)
    return carry, ys, slots


def _rows(layout: Nested | Revolved) -> tuple[Any, Callable[[Any, Any], Any]]:
    """Which row of the slots the carry at a position goes to.

    One more row takes the carries that are not kept. To write one is much cheaper than
    a branch, which on a GPU waits for the host.

    Returns:
        The first memory, and a function of position and memory to row and memory.
    """
    unused = layout.primal_slots
    if isinstance(layout, Revolved):
        starts = jnp.asarray(layout.starts, jnp.int32)

        def row_of(position: Any, slot: Any) -> tuple[Any, Any]:
            hit = position == element(starts, slot)
            last = len(layout.starts) - 1
            return jnp.where(hit, slot, unused), jnp.minimum(slot + hit, last)

        return _zero(), row_of

    def row_in_nests(position: Any, memory: None) -> tuple[Any, None]:
        row, first_row, start = unused, 0, 0
        for nest in layout.nests:
            offset = position - start
            mine = (offset >= 0) & (offset % nest.stride == 0)
            row = jnp.where(mine, first_row + offset // nest.stride, row)
            first_row, start = first_row + nest.levels[0], start + nest.length
        # Before its end, a nest would claim what belongs to the next one.
        return row, memory

    return None, row_in_nests


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

    def advance(self, carry: Arrays, start: Any, count: int) -> list[Any]:
        """The carry `count` steps after `start`; the count is static."""
        if count == 1:
            return self._next(carry, start)
        body = lambda i, carry: self._next(carry, start + i)
        unroll = min(self.loop.unroll, count)
        return lax.fori_loop(0, count, body, list(carry), unroll=unroll)

    def advance_to(self, carry: Arrays, start: Any, stop: Any) -> list[Any]:
        """The carry at the position `stop`; both positions are dynamic."""
        state = (start, list(carry))
        for stride in sorted({1, self.loop.unroll}, reverse=True):
            state = lax.while_loop(
                lambda state: state[0] + stride <= stop,
                lambda state: (
                    state[0] + stride,
                    self._unrolled(state[1], state[0], stride),
                ),
                state,
            )
        return state[1]

    def _unrolled(self, carry: Arrays, start: Any, count: int) -> list[Any]:
        for i in range(count):
            carry = self._next(carry, start + i)
        return list(carry)

    def _next(self, carry: Arrays, position: Any) -> list[Any]:
        return self.step(self.consts, carry, self.loop.x(self.xs, position))[0]

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
        carry = sweep.advance(carry, start + i * nest.stride, nest.stride)
        return carry, [store(s, c, i + 1) for s, c in zip(slots, carry, strict=True)]

    count = nest.levels[0]
    slots = [stack_of(c, count) for c in carry]
    unroll = max(min(sweep.loop.unroll, count - 1), 1) if nest.stride == 1 else 1
    return lax.fori_loop(0, count - 1, body, (list(carry), slots), unroll=unroll)[1]


def _block_start(layout: Revolved) -> Callable[[Any], Any]:
    """The position of a block; the first block is the one that may be shorter."""
    return lambda block: jnp.maximum(block * layout.block - layout.missing, 0)


def _reverse_revolved(
    sweep: Sweep, layout: Revolved, slots: Arrays, cts: Cotangents
) -> Cotangents:
    """Reverses a chain of blocks with a stack of slots, in place.

    Each slot on the stack starts a segment that reaches to the next one, or to the
    block that is reversed now; its rank says how the segment is split (`_binomial`).
    """
    stack = _Stack(layout)
    start = _block_start(layout)

    def body(i: Any, state: Any, last_block: int) -> Any:
        top, blocks, ranks, slots, cts = state
        block = layout.blocks - 1 - i
        carry = [element(s, top) for s in slots]
        walk = (element(blocks, top), carry, top, blocks, ranks, slots)
        walk = lax.while_loop(
            lambda walk: walk[0] < block,
            lambda walk: stack.move(sweep, walk, block),
            walk,
        )
        _, carry, top, blocks, ranks, slots = walk
        cts = sweep.pull(carry, start(block), last_block, cts)
        top = jnp.where(element(blocks, top) == block, top - 1, top)
        return jnp.maximum(top, 0), blocks, ranks, slots, cts

    state = (*stack.initial(), list(slots), cts)
    short = layout.missing > 0
    full = lambda i, state: body(i, state, layout.block)
    unroll = min(sweep.loop.unroll, layout.blocks)
    state = lax.fori_loop(0, layout.blocks - short, full, state, unroll=unroll)
    if short:
        state = body(layout.blocks - 1, state, layout.block - layout.missing)
    return state[-1]


class _Stack:
    """The slots in use: the block that each starts at, and the rank of its segment."""

    def __init__(self, layout: Revolved):
        self.layout = layout
        self.slots = layout.primal_slots
        ranks = max(rank for _, rank in layout.segments) + 1
        limit = layout.blocks + 1
        # reach[k, r + 1] is the longest chain of k slots at rank r, cut to fit.
        self.reach = jnp.asarray(
            [
                [min(_binomial.reach(k, r), limit) for r in range(-1, ranks)]
                for k in range(self.slots + 1)
            ]
            if self.slots > 1
            else [[0]],
            jnp.int32,
        )

    def initial(self) -> tuple[Any, Any, Any]:
        """The stack as the primal left it, all slots in use."""
        blocks = jnp.asarray(self.layout.block_starts, jnp.int32)
        ranks = jnp.asarray([rank for _, rank in self.layout.segments], jnp.int32)
        return jnp.asarray(self.slots - 1, jnp.int32), blocks, ranks

    def _reach(self, slots: Any, rank: Any) -> Any:
        """The longest chain at the rank below."""
        return lax.dynamic_slice(self.reach, (slots, rank), (1, 1))[0, 0]

    def move(self, sweep: Sweep, walk: Any, block: Any) -> Any:
        """Advances to where the next carry is stored, or to the block itself."""
        at, carry, top, blocks, ranks, slots = walk
        free = self.slots - 1 - top
        rank = element(ranks, top)
        length = block + 1 - at
        # The split of `_binomial`; with no slot free there is nothing to store.
        split = jnp.minimum(
            self._reach(free + 1, rank), length - self._reach(free, rank)
        )
        stop = at + jnp.where(free > 0, split, length - 1)
        start = _block_start(self.layout)
        carry = sweep.advance_to(carry, start(at), start(stop))
        ranks = store(ranks, jnp.where(free > 0, rank - 1, rank), top)
        row = top + 1  # the last row, which is never read, when no slot is free
        slots = [store(s, c, row) for s, c in zip(slots, carry, strict=True)]
        top = jnp.where(free > 0, row, top)
        ranks = store(ranks, jnp.where(free > 0, rank, element(ranks, top)), top)
        blocks = store(blocks, jnp.where(free > 0, stop, element(blocks, top)), top)
        return stop, carry, top, blocks, ranks, slots


def pick(leaves: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The leaves that are marked."""
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def put(leaves: Sequence[Any], flags: Sequence[bool], marked: Arrays) -> list[Any]:
    """The leaves, with the marked ones replaced."""
    new = iter(marked)
    return [
        next(new) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
    ]


def _zero() -> Any:
    return jnp.zeros((), jnp.int32)


def _scan(body: Callable[..., Any], state: Any, length: int, loop: Loop) -> Any:
    return lax.scan(
        body, state, None, length, reverse=loop.reverse, unroll=loop.unroll
    )
