"""Runs steps until their carry says stop, or up to some position."""

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

import jax
from jax import lax

from ..._arrays import Arrays, axes_of, vary
from ..._programs import mark
from ..._types import Index, Value
from ..engine._forward import Active
from ..engine._problem import Problem
from ..engine._sweep import Sweep
from ..rewrites._later_steps import Steps, later_step, steps_to_run
from ..rewrites._short_loops import without_short_loops
from ..steps._loop import zero
from ..steps._step import NoWayBackError, Step

# The most that a counter of 32 bits can hold; no loop is as long.
UNLIMITED = 2**31 - 1

# How many steps have been run, and the carry.
State: TypeAlias = tuple[Any, list[Any]]


@dataclasses.dataclass(frozen=True)
class ForwardOnly:
    """The layout of a loop without reverse mode, whose steps are not limited.

    Attributes:
        name: What the error calls the loop.
        advice: What it says one should do.
    """

    max_steps: int = UNLIMITED
    name: str = "WhileLoop"
    advice: str = (
        "Use `el.BoundedWhileLoop(cond, body, max_steps=...)` if there is a bound "
        "on the number of steps, `el.CheckpointedWhileLoop(cond, body)` if there "
        "is none"
    )

    runner = None

    def _decide(self, problem: Problem[Any], active: Active) -> NoReturn:
        raise NoWayBackError(
            f"{self.name} cannot be differentiated in reverse mode (`jax.grad`, "
            f"`jax.vjp`), as that needs memory for a number of steps that is unknown. "
            f"{self.advice}, or forward mode (`jax.jvp`, `jax.jacfwd`)."
        )


def first_state(init: Arrays) -> State:
    """The state before the first step."""
    return vary(zero(), axes_of(init[0])), list(init)


def run_until(step: Step, consts: Arrays, state: State, stop: Index) -> State:
    """Runs steps up to a position, or until the carry says stop."""
    move = next_carry(step, consts)

    def body(state: State) -> State:
        mark(state[0])
        return state[0] + 1, move(state[1])

    return lax.while_loop(lambda state: goes_on(state, stop), body, state)


def goes_on(state: State, stop: Index) -> jax.Array:
    """Whether another step is run before a position."""
    # The step has put the user's condition into this leaf. So a loop that is run in
    # segments evaluates it no more often than one that is not.
    position, carry = state
    return carry[0] & (position < stop)


def next_carry(step: Step, consts: Arrays) -> Callable[[list[Value]], list[Value]]:
    """The step as a function from carry to carry."""
    return lambda carry: step(consts, carry, [])[0]


def begun(steps: Steps, consts: Arrays, init: Arrays) -> State:
    """The state before the first of the later steps, of which more may be known."""
    state = first_state(init)
    if steps.later is steps.first:
        return state
    return run_until(steps.first, consts, state, 1)


def sweeps_past(sweep: Sweep) -> tuple[Sweep, Sweep]:
    """The way back past the first step, and past every other one; see `Steps`."""
    steps, back = steps_to_run(sweep.step), sweep.back
    back = back.with_steps(without_short_loops)
    first = dataclasses.replace(sweep, step=steps.first, back=back)
    back_later = back.with_steps(later_step)
    if steps.later is steps.first and back_later == back:
        return first, first
    return first, dataclasses.replace(sweep, step=steps.later, back=back_later)
