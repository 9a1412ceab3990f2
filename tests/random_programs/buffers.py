"""Loops whose steps write rows of a buffer at a counter, and read others."""

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import settings
from .grow import Features, Grower
from .programs import Arrays, Program, parts_of, random_types
from .transforms import scan, while_loop
from .values import Type
from .world import World


def _update(rows: Any, i: Any, h: Any) -> Any:
    return lax.dynamic_update_slice_in_dim(rows, h[None], i, 0)


def _unlike_zeros(rows: Any, i: Any, h: Any) -> Any:
    """A row that is read by way of another buffer."""
    other = jnp.zeros_like(rows).at[0].set(rows[i])
    return rows.at[i].set(jnp.sqrt(0.01 + jnp.sum(other**2)) * h)


# What is written to a buffer at a place: some of it, or none if that is out of bounds.
WRITES = {
    "set": lambda rows, i, h: rows.at[i].set(h),
    "add": lambda rows, i, h: rows.at[i].add(h),
    "multiply": lambda rows, i, h: rows.at[i].multiply(h),
    "clip": lambda rows, i, h: rows.at[i].set(h, mode="clip"),
    "update": _update,
    "within_jit": lambda rows, i, h: jax.jit(_update)(rows, i, h),
    "first": lambda rows, i, h: rows.at[i, 0].set(h[0]),
    "at_times": lambda rows, i, h: jnp.where(h[0] > 0, rows.at[i].set(h), rows),
    "same": lambda rows, i, h: rows.at[i].set(jnp.where(h > 0, h, rows[i])),
    "two": lambda rows, i, h: rows.at[i].set(h).at[i + 1].add(h),
    "twice": lambda rows, i, h: rows.at[i].set(h).at[0].add(h),
    "swap": lambda rows, i, h: rows.at[i].set(rows[i + 1]).at[i + 1].set(h),
    "all": lambda rows, i, h: rows.at[:].add(jnp.broadcast_to(h, rows.shape)),
    "moved": lambda rows, i, h: jnp.roll(rows, 1, 0).at[i].set(h),
    "modulo": lambda rows, i, h: rows.at[i % 2].set(h),
    "ring": lambda rows, i, h: rows.at[i % rows.shape[0]].set(h),
    "scaled": lambda rows, i, h: rows.at[2 * i].set(h),
    "line": lambda rows, i, h: jnp.concatenate([h[None], rows[:-1]]),
    "by_another": _unlike_zeros,
}
READS = {
    "none": lambda rows, i: jnp.ones(rows.shape[1:], rows.dtype),
    "sum": lambda rows, i: jnp.sum(rows, 0) / 4,
    "here": lambda rows, i: rows[i],
    "ahead": lambda rows, i: rows[i + 1],
    "behind": lambda rows, i: rows[jnp.maximum(i, 2) - 2],
}
COUNTERS = ("int32", "int32", "uint32", "int8", "uint8")


@dataclasses.dataclass(frozen=True)
class Buffered(Program):
    """A loop, or one that ends, whose steps write to a buffer.

    Attributes:
        parameters: How many parameters the step closes over.
        write: How it writes.
        read: What it reads beforehand.
        counter: The dtype of the counter of rows.
        start: Where that starts, if it is a Python number.
        stride: How far it goes each time.
        offset: How far behind it the row is.
    """

    parameters: int = 0
    write: str = "set"
    read: str = "none"
    counter: str = "int32"
    start: int | None = None
    stride: int = 1
    offset: int = 0

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        ints, (rows,), parameters, init = parts_of(inputs, 2, 1, self.parameters)
        limit, start = ints
        at = (start - 2).astype(self.counter)
        if self.start is not None:
            at = jnp.asarray(self.start) if world.is_written_out else self.start

        def step(carry: Any) -> Any:
            count, at, rows, *others = carry
            i = at - self.offset if self.offset >= 0 else at + -self.offset
            read = READS[self.read](rows, i)
            *others, h = world.run(self.bodies[0], [*parameters, *others, read])
            rows = WRITES[self.write](rows, i, h)
            after = at + self.stride if self.stride >= 0 else at - -self.stride
            return [count + 1, after, rows, *others]

        init = [jnp.zeros((), jnp.int32), at, rows, *init]
        if self.transform.name.endswith("Scan"):
            body = lambda carry, _: (step(carry), None)
            return scan(self.transform, world.is_written_out, body)(init, None)[0]
        cond = lambda carry: carry[0] < limit
        return while_loop(self.transform, world.is_written_out, cond, step)(init)


LOOPS = ("BoundedWhileLoop", "CheckpointedWhileLoop", "ScanWhile")


def buffered(
    rng: random.Random, width: int, features: Features, length: int
) -> Program:
    features = dataclasses.replace(features, effects=())
    parameters = random_types(rng, width, features.kinds, rng.randint(0, 1))
    carry = [Type("f"), *random_types(rng, width, features.kinds, rng.randint(0, 1))]
    row, rows = Type("f", (width,)), Type("f", (rng.randint(1, 7), width))
    grower = Grower(rng, width, features, [*parameters, *carry, row])
    body = grower.body([*carry, row], rng.randint(1, 5))
    is_known = rng.random() < 0.5
    if rng.random() < 0.5:
        transform = settings.scan(rng, min(length, 7), ("Scan", "CheckpointedScan"))
    else:
        transform = settings.while_loop(rng, LOOPS, 7)
    return Buffered(
        (Type("i"), Type("i"), rows, *parameters, *carry),
        (body,),
        transform,
        parameters=len(parameters),
        write=rng.choice(list(WRITES)),
        read=rng.choice(["none", "none", *READS]),
        counter=rng.choice(COUNTERS),
        start=rng.choice([0, 0, 1, -2]) if is_known else None,
        stride=rng.choice([1, 1, 1, 2, -1]),
        offset=rng.choice([0, 0, 1, -2]),
    )
