"""A `lax.scan` that stacks the outputs of some steps, and does not compute the others.

All trip counts are static. The kept steps (`Y`) lie at equal distances, so the loop
falls into equal segments, and one scan over segments stacks their outputs:

    . . [Y . .] [Y . .] [Y . .] .        if the last one is followed by enough steps
    . . Y [. . Y] [. . Y]                if not: the first one is run by itself

The dots before the first and after the last segment are run without outputs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    axes_of,
    is_symbolic,
    stack_of,
    stack_type,
    vary,
    zero_array,
)
from ..._compat import refuse_scan3
from ..._types import Index, PyTree, Value
from ...progress import scan_with_bar
from ..steps._loop import Loop, opaque, store, zero

# A step as `lax.scan` takes it: `(state, x) -> (state, y)`, for lists `x` and `y`.
ScanBody = Callable[[PyTree, list[Value]], tuple[PyTree, list[Value]]]


def scan(
    body: Callable[..., tuple[PyTree, list[Value]]],
    read: tuple[Arrays, ...],
    state: PyTree,
    xs: Arrays,
    loop: Loop,
    is_differentiated: bool = False,
) -> tuple[PyTree, list[Value]]:
    """Runs a loop, and its bar: the last state, and the rows that are kept.

    `body` is `(read, state, x) -> (state, y)`; `state[1]` is the carry.
    """
    # `xs` are scanned along their first axis, whatever `loop.x_axes` are. Segments cut
    # them up, which copies them, so a body that is not differentiated should index
    # instead. A loop that JAX differentiates is not run in blocks for its bar:
    # cotangents would be added up in another order, and differ in their last bits.
    if not loop.meter.here.is_shown:
        return _scan(functools.partial(body, read), state, xs, loop)
    # The bar is shown when all that the loop reads is computed, so that its time is the
    # time of the loop.
    after = [x for group in (*read, state[1], xs) for x in group]
    if not is_differentiated:
        # The bar makes it a loop in a loop, see `opaque`.
        read = tuple(map(opaque, read))
    run = functools.partial(body, read)
    return scan_with_bar(_scan, run, state, xs, loop, after, not is_differentiated)


def _scan(
    body: ScanBody, state: PyTree, xs: Arrays, loop: Loop
) -> tuple[PyTree, list[Value]]:
    """`scan` for a body `(state, x) -> (state, y)`, and without a bar."""
    # 1. How many steps are run is not known: no segments.
    if loop.stops:
        return _scan_while(body, state, loop)
    # 2. Every step is kept: that is what `lax.scan` does.
    if loop.kept is None:
        return _lax_scan(body, state, xs, loop.length, loop)
    if xs and loop.kept.step < 0:
        # One `lax.scan` reads `xs` and stacks `ys` in the same direction. So the rows
        # are stacked in the order of `xs`, and flipped.
        ascending = dataclasses.replace(loop, kept=loop.kept[::-1])
        state, ys = _scan(body, state, xs, ascending)
        return state, [jnp.flip(y, 0) for y in ys]
    # 3. Segments. A scan that stacked all rows, to select some afterwards, would hold
    # all of them; and one with a branch for whether to write would copy them at each
    # step.
    before, between, after = loop.gaps
    steps = _Steps(body, xs, loop)
    state = steps.skip(state, steps.part(0, before), before)
    # Segments of one length are one scan, which is compiled once. So each needs
    # `between` steps after its kept one, the last segment too.
    if after >= between:
        state, ys = steps.segments(state, before, between)
        after -= between
    else:
        state, ys = steps.first_and_segments(state, before, between)
    state = steps.skip(state, steps.part(loop.length - after, after), after)
    return state, ys


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Runs the steps of a loop, with or without their outputs."""

    body: ScanBody
    xs: Arrays
    loop: Loop

    def part(self, position: int, count: int) -> list[Value]:
        """The part of `xs` for `count` steps from a position on."""
        start = self.loop.block_start(position, count)
        return [lax.slice_in_dim(x, start, start + count) for x in self.xs]

    def skip(self, state: PyTree, xs: Arrays, count: int) -> PyTree:
        if not count:
            return state
        # Nothing reads the outputs of these steps. What a step computes only for them
        # is dead code within the scan.
        body = lambda state, x: (self.body(state, x)[0], None)
        return _lax_scan(body, state, xs, count, self.loop)[0]

    def segments(
        self, state: PyTree, position: int, between: int
    ) -> tuple[PyTree, list[Value]]:
        """All rows, by segments of a kept step and the steps up to the next one."""

        def segment(state: PyTree, xs: Arrays) -> tuple[Value, list[Value]]:
            # A scan stacks one row for each iteration. So an iteration is a whole
            # segment, with its one kept step.
            first, rest = self._cut(xs, 1)
            state, y = self._one(state, first)
            return self.skip(state, rest, between), y

        rows, size = self.loop.rows, between + 1
        xs = self._blocks(position, rows, size)
        return _lax_scan(segment, state, xs, rows, self.loop, size)

    def first_and_segments(
        self, state: PyTree, position: int, between: int
    ) -> tuple[PyTree, list[Value]]:
        """All rows: the first one, then segments whose last step is kept."""
        # The first row is known before the scan starts, so the others are written
        # behind it in a buffer: to put the row in front of what a scan has stacked
        # would copy.
        rows, size = self.loop.rows, between + 1
        state, y = self._one(state, self.part(position, 1))

        def segment(carry: PyTree, xs: Arrays) -> tuple[Value, None]:
            count, state, ys = carry
            rest, last = self._cut(xs, between)
            state, y = self._one(self.skip(state, rest, between), last)
            row = rows - 1 - count if self.loop.descends else count
            ys = [store(b, leaf, row) for b, leaf in zip(ys, y, strict=True)]
            return (count + 1, state, ys), None

        # The first kept step has filled the row where it belongs, and all others, which
        # are written again.
        carry = (1, state, [stack_of(leaf, rows) for leaf in y])
        xs = self._blocks(position + 1, rows - 1, size)
        (_, state, ys), _ = _lax_scan(segment, carry, xs, rows - 1, self.loop, size)
        return state, ys

    def _one(self, state: PyTree, xs: Arrays) -> tuple[PyTree, list[Value]]:
        return self.body(state, [lax.squeeze(x, [0]) for x in xs])

    def _blocks(self, position: int, count: int, size: int) -> list[Value]:
        part = self.part(position, count * size)
        return [lax.reshape(x, (count, size, *x.shape[1:])) for x in part]

    def _cut(self, xs: Arrays, count: int) -> tuple[list[Value], list[Value]]:
        """The `xs` of a segment's first `count` steps, and those of the others.

        The first in the order of execution, which come last in `xs` under `reverse`.
        """
        size = self.loop.gaps[1] + 1
        # Under `reverse`, the steps that run first have the elements at the end.
        at = size - count if self.loop.reverse else count
        low = [lax.slice_in_dim(x, 0, at) for x in xs]
        high = [lax.slice_in_dim(x, at, size) for x in xs]
        return (high, low) if self.loop.reverse else (low, high)


def _scan_while(
    body: ScanBody, state: PyTree, loop: Loop
) -> tuple[PyTree, list[Value]]:
    """Runs steps for as long as the first leaf of the carry says so.

    The rows of `ys` for steps that are not run are zeros.
    """
    # Each device may stop at its own time, see `BySegments.start`.
    axes = axes_of(state[1][0])
    state = jax.tree.map(lambda x: vary(x, axes), state)
    # A `while_loop` stacks nothing, so the rows need buffers beforehand, and their
    # types.
    y_types = jax.make_jaxpr(lambda state: body(state, [])[1])(state).out_avals
    ys = [zero_array(stack_type(aval, loop.length)) for aval in y_types]

    def goes_on(whole: tuple[Index, PyTree, list[Value]]) -> jax.Array:
        position, state, _ = whole
        return state[1][0] & (position < loop.length)

    def move(
        whole: tuple[Index, PyTree, list[Value]],
    ) -> tuple[Index, PyTree, list[Value]]:
        position, state, ys = whole
        state, y = body(state, [])
        index = loop.index(position)
        ys = [store(b, leaf, index) for b, leaf in zip(ys, y, strict=True)]
        return position + 1, state, ys

    whole = vary(zero(), axes), state, ys
    _, state, ys = lax.while_loop(goes_on, move, whole)
    return state, ys


def _lax_scan(
    body: Callable[..., tuple[PyTree, PyTree]],
    state: PyTree,
    xs: Arrays,
    length: int,
    loop: Loop,
    size: int = 1,
) -> tuple[PyTree, PyTree]:
    """`lax.scan` in the direction of a loop; each iteration is `size` steps of it."""
    refuse_scan3()
    unroll = max(loop.unroll // size, 1)
    settings: dict[str, Any] = dict(reverse=loop.descends, unroll=unroll)
    if not is_symbolic(length):
        return lax.scan(body, state, xs, length, **settings)
    # `lax.scan` accepts a symbolic length only as the length of its `xs`.
    steps = jnp.arange(length, dtype=jnp.int32)
    body_of_step = lambda state, at: body(state, at[1])
    return lax.scan(body_of_step, state, (steps, xs), **settings)
