"""What XLA makes inside the loops of a gradient: nothing that is as long as the loop.

It would be made anew at every iteration: time would grow with the square of the length,
and memory with the length.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing.engine.slots._slots import DeviceSlots

from ...compiling import temp_bytes
from ...marks import slow

pytestmark = pytest.mark.sampled

LENGTH, WIDTH = 1003, 7

SCHEDULES = [
    el.Chunked(1),
    el.Chunked(4),
    slow(el.Recursive(6)),
    el.Recursive(6, batch=6),
    el.Binomial(9),
    el.Binomial(5, block=3),
    el.Offload(el.Chunked(4)),
    slow(el.Offload(el.Binomial(9))),
]

# What hands arrays on, or writes a part of one in place.
_IN_PLACE = ("parameter", "get-tuple-element", "tuple", "while", "call", "bitcast")


def made_within_loops(text: str, length: int) -> list[str]:
    """The instructions inside of loops whose result has an axis of that length."""
    fused = set(re.findall(r"calls=%([\w.\-]+)", text))
    found = []
    for body in re.split(r"\n\n", text):
        name = re.match(r"\s*(ENTRY )?%([\w.\-]+)", body)
        if name is None or name[1] or name[2] in fused:
            continue
        for line in body.splitlines()[1:]:
            made = re.match(
                r"\s*(?:ROOT )?%(\S+) = \w+\[([\d,]*)\]\S* ([\w\-]+)\(", line
            )
            if made is None or str(length) not in made[2].split(","):
                continue
            is_update = "dynamic-update-slice" in made[1] or "dynamic_update" in made[1]
            if made[3] not in _IN_PLACE and not is_update:
                found.append(line.strip())
    return found


def step(table: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    h, count = carry
    h = jnp.tanh(table[count] * h + x)
    return (h, count + 1), h * h


def gradient(schedule: Any, **settings: Any) -> Any:
    """Of a mean of outputs, with `xs` and a const that are a number, repeated."""

    def loss(h: Any, number: Any) -> Any:
        table, xs = (jnp.full((LENGTH, WIDTH), 0.5) for _ in range(2))
        scan = el.Scan(
            lambda carry, x: step(table, carry, number * x),
            schedule=schedule,
            **settings,
        )
        (h, _), ys = scan((h, jnp.int32(0)), xs)
        return jnp.sum(h) + jnp.mean(ys)

    return jax.grad(loss)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_what_is_repeated_is_not_repeated_in_every_segment(schedule):
    args = jnp.ones(WIDTH), jnp.asarray(0.1)
    program = jax.jit(gradient(schedule)).lower(*args).compile()
    assert made_within_loops(program.as_text(), LENGTH) == []


def test_a_mean_of_a_block_of_outputs():
    # Not an empty search: this is what it is to find.
    def outer(i: Any, total: Any) -> Any:
        ones = jnp.full((LENGTH,), total)
        inner = lambda j, total: total + jnp.sin(ones[j] * total)
        return jax.lax.fori_loop(0, i, inner, total)

    program = jax.jit(lambda x: jax.lax.fori_loop(0, 9, outer, x)).lower(1.0).compile()
    assert made_within_loops(program.as_text(), LENGTH)


HALF = [jnp.bfloat16, jnp.float16]


def half_gradient(schedule: Any, batch: bool) -> Any:
    def loss(w: Any, h: Any, xs: Any, cts: Any) -> Any:
        def run(h: Any, xs: Any) -> Any:
            f = lambda h, x: (lambda h: (h, h))(jnp.tanh(w * h + x))
            return el.Scan(f, schedule=schedule)(h, xs)

        h, ys = jax.vmap(run, out_axes=(0, 1))(h, xs) if batch else run(h, xs)
        return jnp.sum(h.astype(jnp.float32)) + jnp.sum((ys * cts).astype(jnp.float32))

    return jax.grad(loss, (0, 1, 2))


# Each dtype with one of the two schedules, and every week all of them.
@pytest.mark.parametrize("batch", [slow(False), True])
@pytest.mark.parametrize(
    ("dtype", "schedule"),
    [
        (HALF[0], el.Binomial(9)),
        (HALF[1], el.Recursive(6)),
        slow(HALF[0], el.Recursive(6)),
        slow(HALF[1], el.Binomial(9)),
    ],
)
def test_half_precision_takes_about_half(dtype, schedule, batch):
    def taken(dtype: Any) -> int:
        many = (3,) if batch else ()
        types = [
            jax.ShapeDtypeStruct(shape, dtype)
            for shape in (
                (64,),
                (*many, 64),
                (*many, 400, 64),
                (400, *many, 64),
            )
        ]
        return temp_bytes(half_gradient(schedule, batch), *types)

    # Slots and values in half of the room; XLA may compute some of them in float32.
    assert taken(dtype) <= 0.75 * taken(jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_slots_keep_every_bit(dtype):
    bits = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    every = jnp.arange(2 ** (8 * bits.itemsize), dtype=jnp.uint32).astype(bits)
    carry = [jax.lax.bitcast_convert_type(every, dtype), jnp.arange(3), True]
    empty = DeviceSlots().filled([jnp.zeros_like(c) for c in carry], 4)
    found, *rest = empty.write(carry, 2).read(2)
    assert found.dtype == dtype
    assert jnp.array_equal(jax.lax.bitcast_convert_type(found, bits), every)
    assert jnp.array_equal(rest[0], carry[1])
    assert bool(rest[1])
