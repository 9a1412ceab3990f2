"""Loops and branches within a step: how each is run.

The setting of each is a transform and how many of its arguments are what; the last of
the arguments are closed over by the functions within.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from .bodies import Op
from .transforms import Transform, branched, mapped, scan, while_loop, wrapped


@dataclasses.dataclass(frozen=True)
class Within:
    """What a loop or a branch within a step is given.

    Attributes:
        transform: Which one.
        carry: How many of the arguments are its carry, or its operands.
        xs: How many of those after them are mapped over.
    """

    transform: Transform
    carry: int = 0
    xs: int = 0

    def __str__(self) -> str:
        return f"{self.transform}, carry={self.carry}, xs={self.xs}"

    def split(self, values: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """The carry, the `xs`, and what is closed over."""
        end = self.carry + self.xs
        return [*values[: self.carry]], [*values[self.carry : end]], [*values[end:]]


def _scan(op: Op, world: Any, *values: Any) -> list[Any]:
    carry, xs, closed = op.setting.split(values)

    def step(carry: Any, x: Any) -> Any:
        out = world.run(op.bodies[0], [*carry, *x, *closed])
        return out[: len(carry)], out[len(carry) :]

    loop = scan(op.setting.transform, world.is_written_out, step)
    carry, ys = loop(carry, xs)
    return [*carry, *ys]


def _fori_loop(op: Op, world: Any, *values: Any) -> list[Any]:
    carry, _, closed = op.setting.split(values)
    body = lambda _, carry: world.run(op.bodies[0], [*carry, *closed])
    return lax.fori_loop(0, op.setting.transform.length, body, carry)


def _while(op: Op, world: Any, limit: Any, *values: Any) -> list[Any]:
    carry, _, closed = op.setting.split(values)
    if op.setting.transform.name == "lax.fori_loop" and not world.is_written_out:
        once = lambda _, carry: world.run(op.bodies[0], [*carry, *closed])
        return lax.fori_loop(0, limit % 5, once, carry)
    cond = lambda carry: carry[0] < limit % 5
    body = lambda c: [c[0] + 1, *world.run(op.bodies[0], [*c[1:], *closed])]
    loop = while_loop(op.setting.transform, world.is_written_out, cond, body)
    return loop([jnp.zeros((), jnp.int32), *carry])[1:]


def _map(op: Op, world: Any, *values: Any) -> list[Any]:
    _, xs, closed = op.setting.split(values)
    f = lambda *xs: world.run(op.bodies[0], [*xs, *closed])
    return mapped(op.setting.transform, world.is_written_out, f)(*xs)


def _branch(op: Op, world: Any, which: Any, *values: Any) -> list[Any]:
    operands, _, closed = op.setting.split(values)
    branches = [
        lambda *xs, body=body: world.run(body, [*xs, *closed]) for body in op.bodies
    ]
    return branched(op.setting.transform, world.is_written_out, branches)(
        which, *operands
    )


def _wrapper(op: Op, world: Any, *values: Any) -> list[Any]:
    operands, _, closed = op.setting.split(values)
    f = lambda *xs: world.run(op.bodies[0], [*xs, *closed])
    return wrapped(op.setting.transform, world.is_written_out, f)(*operands)


CONTROL: dict[str, Callable[..., list[Any]]] = {
    "scan": _scan,
    "fori_loop": _fori_loop,
    "while": _while,
    "map": _map,
    "branch": _branch,
    "wrapper": _wrapper,
}
