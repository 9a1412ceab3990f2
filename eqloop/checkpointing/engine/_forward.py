"""Runs a loop forward: the primal, and the forward sweep that saves slots.

Plain JAX on lists of arrays. JAX differentiates none of it but `stored` and `single`:
the derivatives of a loop are made in `_primitive.py`, of these sweeps and of the
reverse sweep.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._lists import Arrays, Flags
from ...progress import tied
from ._constant import constant
from ._layout import Nested, Revolved
from ._loop import Loop, element, opaque, stack_of, store
from ._metered import hops, metered_scan
from ._slots import HOST, new_slots, packed, write
from ._step import Step

# What a rematerialization saves, as `jax.checkpoint` takes it; without one, nothing.
Saveable = Callable[..., Any] | None


class Active(NamedTuple):
    """Which inputs are differentiated, and so which leaves of the carry vary."""

    consts: Flags
    carry: Flags
    xs: Flags


def primal(
    step: Step, loop: Loop, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop and saves nothing. Returns the final carry and `ys`."""

    def body(state: tuple[Any, list[Any]], _: Any) -> tuple[Any, list[Any]]:
        position, carry = state
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry), y

    if loop.meter is not None:
        consts, xs = opaque(consts), opaque(xs)
    state, inputs = (zero(), list(init)), (consts, init, xs)
    number, (_, carry), ys = metered_scan(body, state, [], loop, inputs)
    return tied(number, (carry, ys))


def stored(
    step: Step, loop: Loop, policy: Saveable, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop so that JAX's own derivative of it stores the residuals.

    The axes of `xs` are moved to the front, since a scan that indexes into its `xs`
    itself would be given a cotangent of all of them at every step.
    """
    inputs = (consts, init, xs)
    carry, ys, *_ = stored_with_bars(step, loop, policy, None, *inputs)
    return carry, ys


def stored_with_bars(
    step: Step,
    loop: Loop,
    policy: Saveable,
    number: Any,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Any], list[Any], Any, Any]:
    """The same for a loop that has a meter, with the bar of the backward sweep.

    Args:
        step: The step.
        loop: The loop.
        policy: Which residuals of a step may be stored.
        number: A number whose cotangent is that of the bar; it goes in and comes out.
        consts: What the step gets each time.
        init: The initial carry.
        xs: What the step gets one element at a time of.

    Returns:
        The final carry, the outputs, that number, and the number of the loop's own bar.
    """
    evaluate = step if policy is None else jax.checkpoint(step, policy=policy)
    # An axis that is in front already is not moved: outside of `jit` that would copy.
    moved = [
        jnp.moveaxis(x, axis, 0) if axis else x
        for x, axis in zip(xs, loop.x_axes, strict=True)
    ]

    def body(state: tuple[Any, list[Any]], x: list[Any]) -> Any:
        number, carry = state
        carry, y = evaluate(consts, carry, x)
        return (number, carry), y

    def before(state: tuple[Any, list[Any]], position: Any) -> Any:
        number, carry = state
        if loop.meter is not None and number is not None:
            number = loop.meter.back.watch(number, loop.length - position, 1)
        return number, carry

    state, inputs = (number, list(init)), (consts, init, xs)
    here, (number, carry), ys = metered_scan(body, state, moved, loop, inputs, before)
    return carry, ys, number, here


def single(
    step: Step, loop: Loop, policy: Saveable, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """A loop of one step, without the loop."""
    x = [lax.squeeze(x, [axis]) for x, axis in zip(xs, loop.x_axes, strict=True)]
    evaluate = step if policy is None else jax.checkpoint(step, policy=policy)
    carry, y = evaluate(consts, init, x)
    return carry, [stack_of(leaf, 1) for leaf in y]


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

        left = lambda state: stop - state[0]
        return iterate(move, (start, list(carry)), left, self.loop.unroll)[1]

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
    by_segments = isinstance(layout, Revolved) and not step.y_types
    if layout.on_host or by_segments or loop.meter is not None:
        consts, xs = opaque(consts), opaque(xs)
    if layout.on_host:
        return _forward_to_host(step, loop, layout, consts, init, xs)
    slots = new_slots(init, layout.primal_slots + 1)
    if isinstance(layout, Revolved) and by_segments:
        walk = Walk(step, loop, consts, xs)
        return _forward_by_segments(walk, layout, list(init), slots)
    row_of = _row_of(layout)

    def body(state: tuple[Any, ...], _: Any) -> tuple[tuple[Any, ...], list[Any]]:
        position, carry, slots = state
        row = row_of(position)
        slots = write(slots, carry, row)
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry, slots), y

    state, inputs = (zero(), list(init), slots), (consts, init, xs)
    number, (_, carry, slots), ys = metered_scan(body, state, [], loop, inputs)
    return tied(number, (carry, ys, slots))


def _forward_by_segments(
    walk: Walk, layout: Revolved, init: list[Any], slots: list[Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    """The same where there are no `ys`: between two slots nothing but the step is run.

    The rows of `_row_of` are not cheap to find for so irregular a layout.
    """
    starts = constant([*layout.starts, layout.length])

    def body(row: Any, state: tuple[Any, list[Any], list[Any]]) -> Any:
        number, carry, slots = state
        slots = write(slots, carry, row)
        start, stop = element(starts, row), element(starts, row + 1)
        run = lambda state, stop: (stop, walk.advance_to(state[1], state[0], stop))
        number, (_, carry) = hops(gauge, number, (start, carry), stop, run)
        return number, carry, slots

    gauge = walk.loop.gauge
    after = [*walk.consts, *init, *walk.xs]
    state = (gauge and gauge.open(after), init, slots)
    state = lax.fori_loop(0, layout.primal_slots, body, state)
    _, carry, slots = state
    return carry, [], slots


def _forward_to_host(
    step: Step,
    loop: Loop,
    layout: Nested | Revolved,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Any], list[Any], list[Any]]:
    """The same for slots on the host: nothing is sent there but what is kept.

    The slots are what a scan stacks, for that is how XLA knows to make them there.
    """

    def move(state: tuple[Any, list[Any], list[Any]]) -> Any:
        position, carry, ys = state
        carry, y = step(consts, carry, loop.x(xs, position))
        return position + 1, carry, _keep(loop, ys, y, position)

    def run(state: Any, stop: Any) -> Any:
        return iterate(move, state, lambda state: stop - state[0], loop.unroll)

    def last_y(state: tuple[Any, list[Any], list[Any]]) -> list[Any]:
        row, _ = loop.row(loop.index(state[0] - 1))
        return [element(b, row) for b in state[2]] if loop.rows else []

    def segment(told: tuple[Any, Any], stop: Any) -> tuple[Any, list[Any]]:
        number, state = told
        kept = [jax.device_put(leaf, HOST) for leaf in packed(state[1], True)]
        return hops(gauge, number, state, stop, run, last_y), kept

    ys = [stack_of(jnp.zeros(y.shape, y.dtype), loop.rows) for y in step.y_types]
    # The last row is for the carries that find no free slot.
    stops = constant([*layout.starts[1:], layout.length, layout.length])
    gauge = loop.gauge
    number = gauge and gauge.open([*consts, *init, *xs])
    told = (number, (zero(), list(init), ys))
    (_, (_, carry, ys)), slots = lax.scan(segment, told, stops)
    return carry, ys, slots


def _keep(loop: Loop, ys: Arrays, y: Arrays, position: Any) -> list[Any]:
    """`ys` with the outputs of the step at a position, if they are kept."""
    if not loop.rows:
        return list(ys)
    row, is_kept = loop.row(loop.index(position))
    if is_kept is not True:
        before = [element(b, row) for b in ys]
        y = [jnp.where(is_kept, *pair) for pair in zip(y, before, strict=True)]
    return [store(b, leaf, row) for b, leaf in zip(ys, y, strict=True)]


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
        starts = constant([*layout.starts, *padding])

        def row_at(position: Any) -> Any:
            row = zero()
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


def iterate(
    move: Callable[[Any], Any], state: Any, left: Callable[[Any], Any], unroll: int
) -> Any:
    """Moves as often as is left to do, up to `unroll` times an iteration."""

    def repeat(count: int, state: Any) -> Any:
        for _ in range(count):
            state = move(state)
        return state

    for count in sorted({1, unroll}, reverse=True):
        state = lax.while_loop(
            lambda state, count=count: left(state) >= count,
            functools.partial(repeat, count),
            state,
        )
    return state


def zero() -> Any:
    """Where a traced counter starts."""
    return jnp.zeros((), jnp.int32)
