"""Loops that write rows of a buffer write nothing else."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

import eqloop as el
from eqloop import _compat
from eqloop.checkpointing.rewrites._in_place import run_in_place
from eqloop.checkpointing.steps._loop import element, store

from .hlo import compiled, optimised, temporary
from .registry import canary

WIDTH = 1024
ROW = 4 * WIDTH


def types(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@canary("jax #40101", is_timed=True)
def small_writes_take_no_longer_in_large_buffers() -> Iterator[str]:
    """Slots, `ys` and cotangents of `xs` are buffers that a loop writes row by row.

    That is `store` and `put_part` in `steps/_loop.py`. In jaxlib 0.11.1, a row of less
    than about 480 bytes had XLA rewrite all of the buffer, on the CPU, in a small loop.
    The optimised program is the same as that of other versions: only time tells.
    """
    steps, rows = 20_000, 200_000
    buffer = jnp.zeros(rows)
    copying = _seconds(compiled(lambda x: x + 1, buffer), buffer)
    for width in (1, 60, 100):

        def loop(buffer: jax.Array, width: int = width) -> jax.Array:
            row = lambda i: jnp.full((width,), 1.0) * i.astype(jnp.float32)
            body = lambda i, b: lax.dynamic_update_slice(b, row(i), (i,))
            return lax.fori_loop(0, steps, body, buffer)

        taken = _seconds(compiled(loop, buffer), buffer)
        if taken > steps / 100 * copying:
            times = f"as long as {taken / copying:.0f} copies of the buffer"
            yield f"{steps} writes of {4 * width} bytes take {times}"


def _seconds(f: Callable[..., Any], *args: Any) -> float:
    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        return time.perf_counter() - start

    return min(once() for _ in range(5))


# Of 64 steps: some have 16 slots, and all fill others that are smaller in their loops.
SCHEDULES = [
    el.StoreAll(),
    el.Recursive(4),
    el.Chunked(4),
    el.Binomial(16),
    el.Offload(el.Chunked(4)),
    el.Cast(el.Chunked(4), jnp.bfloat16),
]


@canary("xla, jax #17845")
def sweeps_write_rows_in_place() -> Iterator[str]:
    """No iteration of a gradient computes as much as all slots, or all of `xs`.

    The time of a step would grow with the length of the loop. `steps/_loop.py` relies
    on it for slices, `opaque` there hides a repeated number that XLA would else repeat
    in each iteration, and `orders/` and `slots/` make loops in loops of it.
    """

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.sin(carry) * x
        return carry, carry + x

    for schedule in SCHEDULES:

        def loss(init: jax.Array, xs: jax.Array, schedule: Any = schedule) -> jax.Array:
            carry, ys = el.Scan(step, schedule=schedule)(init, xs)
            return carry.sum() + ys.mean()

        program = optimised(jax.grad(loss, (0, 1)), types(WIDTH), types(64, WIDTH))
        for line in program.whole(8 * ROW):
            yield f"{schedule}: {line}"


@canary("jax #31284")
def loops_read_and_write_rows_in_place() -> Iterator[str]:
    """Steps read and write rows of a buffer in the carry, also at computed places.

    Users' steps do, the orders of while loops do (`whiles/_online.py`), and so does
    the way back of either (`rewrites/_in_place.py`). In JAX 0.7.1, XLA copied the
    buffer in each iteration of such a loop.
    """

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, xs = carry
        i = jr.randint(jr.key(step), (), 0, 2)
        return step + 1, xs.at[step].set(2 * jnp.tanh(xs[i]))

    length = 1000
    goes_on = lambda carry: carry[0] < length
    plain = lambda xs: lax.while_loop(goes_on, body, (jnp.int32(0), xs))[1]
    bounded = el.BoundedWhileLoop(goes_on, body, max_steps=length)
    online = el.CheckpointedWhileLoop(goes_on, body, checkpoints=4)
    programs: dict[str, Callable[..., Any]] = {"plain": plain}
    for loop in (bounded, online):
        loss = lambda xs, loop=loop: loop((jnp.int32(0), xs))[1].sum()
        programs[type(loop).__name__] = loss
    for name, run in programs.items():
        for line in optimised(run, types(length)).whole(4 * length):
            yield f"{name}: {line}"


@canary("xla #20440")
def reads_go_before_writes() -> Iterator[str]:
    """The reversal of `rows.at[i].set(row)` reads a row and then writes it, in place.

    See `rewrites/_in_place.py`: a barrier has the write wait for the read, and a `cond`
    does where XLA drops barriers (`drops_barriers` in `_compat.py`).
    """
    rows, size = types(64, WIDTH), 64 * ROW

    def with_barrier(rows: jax.Array) -> Any:
        def body(i: jax.Array, state: Any) -> Any:
            rows, total = state
            rows, row = lax.optimization_barrier((rows, element(rows, i)))
            return store(rows, jnp.zeros_like(row), i), total + jnp.sin(row)

        return lax.fori_loop(0, 64, body, (rows, jnp.zeros(WIDTH)))

    says = _compat.drops_barriers()
    if bool(lines := optimised(with_barrier, rows).whole(size)) != says:
        yield f"`drops_barriers()` is {says}: {lines or 'the write waits'}"

    write = lambda rows, i: rows.at[i].set(jnp.sin(rows[i - 1]))
    program = jax.make_jaxpr(write)(rows, 1)

    def reversal(rows: jax.Array, cts: jax.Array) -> jax.Array:
        def pull(rows: jax.Array, i: jax.Array, cts: jax.Array) -> jax.Array:
            return jax.vjp(lambda rows: write(rows, i), rows)[1](cts)[0]

        back = lambda i, cts: run_in_place(program, pull, rows, i, cts)
        return lax.fori_loop(1, 64, back, cts)

    yield from optimised(reversal, rows, rows).whole(size)


SMALL = [
    jnp.bfloat16,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.float8_e8m0fnu,
    jnp.int8,
]


@canary("xla")
def small_floats_are_widened_as_is_said() -> Iterator[str]:
    """Buffers of small floats are read and written by rows, as others are.

    On the CPU, XLA converts some of them as a whole: all in advance where a loop reads
    rows, and in each iteration where one writes them. `is_widened` in `_compat.py` says
    which, `_unwidened` in `steps/_loop.py` prevents the first, and `stored_dtype` in
    `slots/` the second.
    """
    for dtype in SMALL:
        rows = types(64, WIDTH, dtype=dtype)
        size = 64 * WIDTH * jnp.dtype(dtype).itemsize

        def reading(rows: jax.Array, read: Any = _plain_element) -> jax.Array:
            add = lambda i, total: total + read(rows, i).astype(jnp.float32)
            return lax.fori_loop(0, 64, add, jnp.zeros(WIDTH))

        def writing(rows: jax.Array, dtype: Any = dtype) -> jax.Array:
            row = lambda i: jnp.full((WIDTH,), i, jnp.int32).astype(dtype)
            return lax.fori_loop(0, 64, lambda i, b: store(b, row(i), i), rows)

        found = (
            temporary(reading, rows) >= size,
            bool(optimised(writing, rows).whole(size)),
        )
        says = _compat.is_widened(jnp.dtype(dtype))
        if found != (says, says):
            yield f"`is_widened({jnp.dtype(dtype)})` is {says}; read, written: {found}"
        if temporary(functools.partial(reading, read=element), rows) >= size:
            yield f"{jnp.dtype(dtype)}: all is converted to read a row"


def _plain_element(rows: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(
        rows, i, keepdims=False, allow_negative_indices=False
    )


@canary("jax #40150")
def many_small_leaves_cost_no_more_each() -> Iterator[str]:
    """What a loop does is in proportion to the leaves of its carry, however many.

    XLA starts each operation of a loop by itself, on the CPU: what counts is how many
    there are. A carry of 60 numbers has 60 slots, reads and cotangents.
    """

    def step(carry: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], None]:
        return [jnp.sin(c) * x for c in (*carry[1:], carry[0])], None

    counts = {}
    for leaves in (15, 60):

        def loss(init: list[jax.Array], xs: jax.Array) -> jax.Array:
            carry, _ = el.Scan(step, schedule=el.Chunked(4))(init, xs)
            return jnp.stack(carry).sum()

        program = optimised(jax.grad(loss), [types()] * leaves, types(16))
        counts[leaves] = len(program.in_loops())
    if counts[60] > 4.5 * counts[15]:
        yield f"operations in loops, by leaves: {counts}"
