"""Runs a loop forward and saves nothing of it.

Plain JAX on lists of arrays. `stored` is what JAX differentiates if all residuals are
to be stored; it differentiates nothing else here. A gradient that is planned runs two
other loops: a forward sweep, which also leaves carries in slots (`_by_segments.py` and
`_slots.py`), and a reverse sweep (`_sweep.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags
from ..._types import Index, PyTree, Value
from ._kept_rows import scan
from ._loop import Loop, zero
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
) -> tuple[list[Value], list[Value]]:
    """Runs the loop and saves nothing. Returns the final carry and `ys`."""

    def body(
        read: tuple[Arrays, ...], state: tuple[Value, list[Value]], _: Value
    ) -> PyTree:
        (consts, xs), (position, carry) = read, state
        carry, y = step(consts, carry, loop.x(xs, position))
        return (position + 1, carry), y

    state = (zero(), list(init))
    (_, carry), ys = scan(body, (consts, xs), state, [], loop)
    return carry, ys


def stored(
    step: Callable[[Arrays, Arrays, Arrays], tuple[list[Value], list[Value]]],
    loop: Loop,
    policy: Saveable,
    consts: Arrays,
    init: Arrays,
    xs: Arrays,
) -> tuple[list[Value], list[Value]]:
    """Runs the loop so that JAX's own derivative of it stores the residuals.

    The axes of `xs` are moved to the front, since a scan that indexes into its `xs`
    itself would be given a cotangent of all of them at every step.
    """
    evaluate = under_policy(step, policy)
    # An axis that is in front already is not moved: outside of `jit` that would copy.
    moved = [
        jnp.moveaxis(x, axis, 0) if axis else x
        for x, axis in zip(xs, loop.x_axes, strict=True)
    ]

    def body(
        read: tuple[Arrays, ...], state: tuple[None, list[Value]], x: list[Value]
    ) -> PyTree:
        (consts,), (_, carry) = read, state
        carry, y = evaluate(consts, carry, x)
        return (None, carry), y

    state = (None, list(init))
    (_, carry), ys = scan(body, (consts,), state, moved, loop, True)
    return carry, ys


def under_policy(
    step: Callable[..., PyTree], policy: Saveable
) -> Callable[..., PyTree]:
    """The step, which saves what a policy says when JAX differentiates it."""
    return step if policy is None else jax.checkpoint(step, policy=policy)


def iterate(
    move: Callable[[PyTree], PyTree],
    state: PyTree,
    left: Callable[[PyTree], Index],
    unroll: int,
) -> PyTree:
    """Moves as often as is left to do, up to `unroll` times an iteration."""

    def repeat(count: int, state: PyTree) -> PyTree:
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
