"""Runs a loop until it stops: the primal, and the forward sweeps that save slots."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ..._lists import Arrays
from ..._positions import is_watched, mark
from ..._varying import axes_of, vary
from ..engine._constant import constant
from ..engine._forward import zero
from ..engine._layout import Nested
from ..engine._slots import new_slots, packed, write
from ..engine._step import Step
from ._layout import UNLIMITED, Online
from ._spread import Spread, full, move_on

# How many steps have been run, and the carry.
_State: TypeAlias = tuple[Any, list[Any]]


def primal(step: Step, max_steps: int, consts: Arrays, init: Arrays) -> list[Any]:
    """Runs the loop and saves nothing. Returns the final carry."""
    if max_steps == UNLIMITED and not is_watched():
        again = lambda carry: carry[0]
        return lax.while_loop(again, _next(step, consts), list(init))
    return _run(step, consts, _start(init), max_steps)[1]


def forward(
    step: Step, layout: Nested | Online, consts: Arrays, init: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs the loop and leaves carries in slots, without their first leaf.

    Returns:
        The final carry, and what is saved: the number of steps that were run, the
        positions of the slots and their rows if they are not known beforehand, and the
        slots.
    """
    if isinstance(layout, Nested):
        return _forward_nested(step, layout, consts, init)
    return _forward_online(step, layout, consts, init)


def _forward_nested(
    step: Step, layout: Nested, consts: Arrays, init: Arrays
) -> tuple[list[Any], list[Any]]:
    # The slots are what a scan stacks: under `vmap` they are no part of a loop whose
    # examples stop at different times, where each step would copy all of them.
    def segment(state: _State, stop: Any) -> tuple[_State, list[Any]]:
        return _run(step, consts, state, stop), packed(state[1][1:])

    stops = constant([*layout.starts[1:], layout.length])
    (count, carry), slots = lax.scan(segment, _start(init), stops)
    return carry, [count, *slots]


def _forward_online(
    step: Step, layout: Online, consts: Arrays, init: Arrays
) -> tuple[list[Any], list[Any]]:
    slots = new_slots(init[1:], layout.slots + 1)
    most = min(layout.slots, layout.max_steps)

    def fill(state: tuple[_State, list[Any]]) -> tuple[_State, list[Any]]:
        (position, carry), slots = state
        slots = write(slots, carry[1:], position)
        mark(position)
        return (position + 1, _next(step, consts)(carry)), slots

    goes_on = lambda whole: _goes_on(whole[0], most)
    state, slots = lax.while_loop(goes_on, fill, (_start(init), slots))
    spread = jax.tree.map(lambda x: vary(x, axes_of(init[0])), full(layout))
    if layout.slots == 1:
        state = _run(step, consts, state, layout.max_steps)
    elif most < layout.max_steps:
        state, spread, slots = _spread_out(step, layout, consts, state, spread, slots)
    count, carry = state
    return carry, [count, spread.starts, spread.rows, *slots]


def _spread_out(
    step: Step,
    layout: Online,
    consts: Arrays,
    state: _State,
    spread: Spread,
    slots: list[Any],
) -> tuple[_State, Spread, list[Any]]:
    """Runs on when all slots are in use."""

    def body(
        whole: tuple[_State, Spread, list[Any]],
    ) -> tuple[_State, Spread, list[Any]]:
        state, spread, slots = whole
        position, carry = state
        row, spread = move_on(layout, spread, position)
        slots = write(slots, carry[1:], row)
        stop = jnp.minimum(spread.stop, layout.max_steps)
        return _run(step, consts, state, stop), spread, slots

    goes_on = lambda whole: _goes_on(whole[0], layout.max_steps)
    return lax.while_loop(goes_on, body, (state, spread, slots))


def _start(init: Arrays) -> _State:
    return vary(zero(), axes_of(init[0])), list(init)


def _run(step: Step, consts: Arrays, state: _State, stop: Any) -> _State:
    """Runs up to a position, or until the carry says stop."""
    move = _next(step, consts)

    def body(state: _State) -> _State:
        mark(state[0])
        return state[0] + 1, move(state[1])

    return lax.while_loop(lambda state: _goes_on(state, stop), body, state)


def _goes_on(state: _State, stop: Any) -> Any:
    position, carry = state
    return carry[0] & (position < stop)


def _next(step: Step, consts: Arrays) -> Callable[[list[Any]], list[Any]]:
    return lambda carry: step(consts, carry, [])[0]
