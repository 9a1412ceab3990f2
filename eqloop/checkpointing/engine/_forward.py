"""Runs a loop forward without storing carries.

This is plain JAX on lists of arrays. `primal` is for loops whose way back, if there is
one, needs no carries. `stored` is for JAX to differentiate: it stores the residuals.
A planned gradient runs two other loops: a forward sweep, which leaves carries in slots
(`_by_segments.py`, `slots/_slots.py`), and a reverse sweep (`_sweep.py`).
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

# A policy, as `jax.checkpoint` takes it. With `None` there is no `jax.checkpoint`, and
# a block stores all of its residuals.
Saveable = Callable[..., Any] | None


class Active(NamedTuple):
    """Which inputs of a loop are differentiated.

    A leaf of the carry counts if it has a tangent at any step, even if its initial
    value has none.
    """

    consts: Flags
    carry: Flags
    xs: Flags


def primal(
    step: Step, loop: Loop, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Value], list[Value]]:
    """Runs the loop and stores nothing. Returns the final carry and `ys`.

    The step indexes into `xs` instead of scanning them, so they stay where they are.
    """

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
    """Runs the loop for JAX to differentiate.

    The `xs` are scanned, along their first axis. If the step indexed into them, as in
    `primal`, JAX would add a cotangent as large as all of `xs` at every step.
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
    """The step, with residuals that the policy allows when JAX differentiates it."""
    return step if policy is None else jax.checkpoint(step, policy=policy)


def iterate(
    move: Callable[[PyTree], PyTree],
    state: PyTree,
    left: Callable[[PyTree], Index],
    unroll: int,
) -> PyTree:
    """A `while_loop` that makes up to `unroll` moves per iteration.

    Args:
        move: From a state to the next one.
        state: The first state.
        left: How many moves are left to make from a state.
        unroll: How many moves are made per iteration while so many are left.
    """

    def repeat(count: int, state: PyTree) -> PyTree:
        for _ in range(count):
            state = move(state)
        return state

    # One loop for groups of moves, then one for those left over. With `unroll=1` there
    # is a single loop.
    for count in sorted({1, unroll}, reverse=True):
        state = lax.while_loop(
            lambda state, count=count: left(state) >= count,
            functools.partial(repeat, count),
            state,
        )
    return state
