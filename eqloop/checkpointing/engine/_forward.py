"""Runs a loop forward, or some of its steps.

Plain JAX on lists of arrays. JAX differentiates none of it but `stored` and `single`:
the derivatives of a loop are made in `_primitive.py`, of the sweep that leaves carries
in slots (`_slots.py`) and of the reverse sweep (`_sweep.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._partition import Arrays, Flags
from ._kept_rows import scan
from ._loop import Loop, stack_of
from ._step import Step

# What a rematerialization saves, as `jax.checkpoint` takes it; without one, nothing.
Saveable = Callable[..., Any] | None


# Where positions count from if they are those of the whole loop.
FROM_START = None


class Active(NamedTuple):
    """Which inputs are differentiated, and so which leaves of the carry vary."""

    consts: Flags
    carry: Flags
    xs: Flags


def primal(
    step: Step, loop: Loop, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop and saves nothing. Returns the final carry and `ys`."""

    def body(read: Any, state: tuple[Any, list[Any]], _: Any) -> Any:
        (consts, xs), (position, carry) = read, state
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry), y

    state = (zero(), list(init))
    (_, carry), ys = scan(body, (consts, xs), state, [], loop)
    return carry, ys


def stored(
    step: Callable[[Arrays, Arrays, Arrays], tuple[list[Any], list[Any]]],
    loop: Loop,
    policy: Saveable,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Any], list[Any]]:
    """Runs the loop so that JAX's own derivative of it stores the residuals.

    The axes of `xs` are moved to the front, since a scan that indexes into its `xs`
    itself would be given a cotangent of all of them at every step.
    """
    evaluate = step if policy is None else jax.checkpoint(step, policy=policy)
    # An axis that is in front already is not moved: outside of `jit` that would copy.
    moved = [
        jnp.moveaxis(x, axis, 0) if axis else x
        for x, axis in zip(xs, loop.x_axes, strict=True)
    ]

    def body(read: Any, state: tuple[None, list[Any]], x: list[Any]) -> Any:
        (consts,), (_, carry) = read, state
        carry, y = evaluate(consts, carry, x)
        return (None, carry), y

    state = (None, list(init))
    (_, carry), ys = scan(body, (consts,), state, moved, loop, True)
    return carry, ys


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
    """Runs steps for their carries alone; positions count from the `first` one."""

    step: Step
    loop: Loop
    consts: Arrays
    xs: Arrays
    first: Any = FROM_START

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
        return self.step(self.consts, carry, self._x(position))[0]

    def before(self, carry: Arrays, position: Any) -> list[Any]:
        """The carry before the step at a position, from the one after it."""
        return self.step.before(self.consts, carry, self._x(position))

    def _x(self, position: Any) -> list[Any]:
        return self.loop.x(self.xs, shifted(position, self.first))


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


def shifted(position: Any, first: Any) -> Any:
    """A position in a loop that counts from the first one of a part of it."""
    return position if first is FROM_START else first + position


def zero() -> Any:
    """Where a traced counter starts."""
    return jnp.zeros((), jnp.int32)
