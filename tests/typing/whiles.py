"""While loops: what `body` returns is what the loop returns."""

from typing import NamedTuple, assert_type

from jax import Array

import eqloop as el


class State(NamedTuple):
    x: Array
    error: Array


def unsettled(state: State) -> Array:
    return state.error > 1e-3


def settle(state: State) -> State:
    return State(state.x / 2, state.error / 2)


def loops(init: State) -> None:
    """An editor shows `final: State`."""
    final = el.WhileLoop(unsettled, settle)(init)
    assert_type(final, State)
    assert_type(el.WhileLoop(unsettled, settle), el.WhileLoop[State])
    assert_type(el.BoundedWhileLoop(unsettled, settle, max_steps=9)(init), State)
    loop = el.CheckpointedWhileLoop(unsettled, settle, checkpoints=8, progress=True)
    assert_type(loop(init), State)
    assert_type(el.WhileLoop(lambda x: x.sum() < 3, double)(init.x), Array)


def double(x: Array) -> Array:
    return 2 * x


def wrong(init: State) -> None:
    """Each of these is underlined."""
    el.WhileLoop(settle)  # pyright: ignore[reportCallIssue]
    el.WhileLoop(unsettled, 3)  # pyright: ignore[reportArgumentType]
    el.WhileLoop(unsettled, double)  # pyright: ignore[reportArgumentType]
    el.WhileLoop(unsettled, unsettled)  # pyright: ignore[reportArgumentType]
    el.BoundedWhileLoop(unsettled, settle)  # pyright: ignore[reportCallIssue]
    el.BoundedWhileLoop(unsettled, settle, max_steps="9")  # pyright: ignore[reportArgumentType]
    el.WhileLoop(unsettled, settle)(init, 3)  # pyright: ignore[reportCallIssue]
