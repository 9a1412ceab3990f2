"""Whole functions: loops of ours and of JAX's in a row, and code between them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..random_programs.programs import Arrays, Program, parts_of
from ..random_programs.transforms import Transform, wrapped
from ..random_programs.world import World


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of a chain: a loop, or code that is run once.

    Attributes:
        transform: The loop; `straight` for the other.
        xs: Which of the rows that there are it goes along.
        wrapper: What is around it, if anything is.
    """

    transform: Transform
    xs: tuple[int, ...] = ()
    wrapper: Transform | None = None

    def __call__(self, step: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
        """The carry after it, and its rows."""
        run = lambda *args: self._run(step, args[: len(carry)], args[len(carry) :])
        if self.wrapper is not None:
            run = wrapped(self.wrapper, False, run)
        return run(*carry, *xs)

    def _run(self, step: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
        transform, length = self.transform, self.transform.length
        carry, xs = list(carry), list(xs)
        if transform.name == "straight":
            return step(carry, [])
        if transform.name == "lax.scan":
            reverse = transform.get("reverse", False)
            return lax.scan(step, carry, xs, length, reverse)
        if not transform.name.endswith("while_loop") and "While" not in transform.name:
            return transform.made(step)(carry, xs, length=length)
        goes_on = lambda state: state[0] < length
        after = lambda state: [state[0] + 1, *step(state[1:], [])[0]]
        state = [jnp.zeros((), jnp.int32), *carry]
        if transform.name == "lax.while_loop":
            return lax.while_loop(goes_on, after, state)[1:], []
        return transform.made(goes_on, after)(state)[1:], []


@dataclasses.dataclass(frozen=True)
class Chain(Program):
    """Parts in a row, which share parameters and hand on a carry.

    Attributes:
        stages: The parts, with a body for each.
        parameters: How many inputs come first, which all bodies read.
        carry: How many of those behind them are the carry. The others are rows.
    """

    stages: tuple[Stage, ...] = ()
    parameters: int = 0
    carry: int = 0

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        parameters, carry, rows = parts_of(inputs, self.parameters, self.carry)
        for body, stage in zip(self.bodies, self.stages, strict=True):

            def step(carry: Any, x: Any, body: Any = body) -> tuple[Any, Any]:
                out = world.run(body, [*parameters, *carry, *x])
                return out[: self.carry], out[self.carry :]

            carry, ys = stage(step, carry, [rows[i] for i in stage.xs])
            rows = [*rows, *ys]
        return list(carry)

    def by(self, change: Callable[[Transform], Transform]) -> "Chain":
        """The same with other loops."""
        of = lambda stage: dataclasses.replace(stage, transform=change(stage.transform))
        return dataclasses.replace(self, stages=tuple(map(of, self.stages)))


def by_scan(transform: Transform) -> Transform:
    """The loop of JAX's that does the same, and has a reverse mode."""
    name = "straight" if transform.name == "straight" else "lax.scan"
    settings = tuple(pair for pair in transform.settings if pair[0] == "reverse")
    return dataclasses.replace(transform, name=name, settings=settings)


def foreign(transform: Transform) -> Transform:
    """The loop of JAX's that does the same."""
    if "While" in transform.name:
        return dataclasses.replace(transform, name="lax.while_loop", settings=())
    return by_scan(transform)
