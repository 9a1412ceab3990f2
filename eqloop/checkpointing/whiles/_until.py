"""Runs steps until the carry says stop, or up to some position."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import partial_eval

from ..._array_types import axes_of, vary
from ..._loop_markers import is_watched, mark
from ..._partition import Arrays
from ..._types import Index, Value
from ..engine._forward import zero
from ..engine._step import Step
from ._while_order import UNLIMITED

# How many steps have been run, and the carry.
State: TypeAlias = tuple[Any, list[Any]]


def run_plain(step: Step, max_steps: int, consts: Arrays, init: Arrays) -> list[Value]:
    """Runs the loop and saves nothing. Returns the final carry."""
    if max_steps == UNLIMITED and not is_watched():
        again = lambda carry: carry[0]
        return lax.while_loop(again, next_carry(step, consts), list(init))
    return run_until(step, consts, first_state(init), max_steps)[1]


def first_state(init: Arrays) -> State:
    """Before the first step."""
    return vary(zero(), axes_of(init[0])), list(init)


def run_until(step: Step, consts: Arrays, state: State, stop: Index) -> State:
    """Runs up to a position, or until the carry says stop."""
    move = next_carry(step, consts)

    def body(state: State) -> State:
        mark(state[0])
        return state[0] + 1, move(state[1])

    return lax.while_loop(lambda state: goes_on(state, stop), body, state)


def goes_on(state: State, stop: Index) -> jax.Array:
    """Whether another step is run before a position."""
    position, carry = state
    return carry[0] & (position < stop)


def next_carry(step: Step, consts: Arrays) -> Callable[[list[Value]], list[Value]]:
    """The step as a function from carry to carry."""
    return lambda carry: step(consts, carry, [])[0]


@functools.lru_cache(maxsize=128)
def unconditional(step: Step) -> Step:
    """The step without the first leaf of its carry, and without what it is made by."""
    kept = [True] * len(step.jaxpr.in_avals)
    kept[step.num_consts] = False
    jaxpr, _ = partial_eval.dce_jaxpr(
        step.jaxpr.jaxpr,
        [False] + [True] * (len(step.jaxpr.out_avals) - 1),
        instantiate=kept,
    )
    closed = jex.ClosedJaxpr(jaxpr, step.jaxpr.consts)
    return Step(closed, step.num_consts, step.num_carry - 1)
