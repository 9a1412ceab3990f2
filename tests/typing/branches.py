"""Branches: what they return is what the choice between them returns."""

from typing import assert_type

from jax import Array

import eqloop as el


def up(x: Array) -> tuple[Array, str]:
    return x + 1, "x"


def down(x: Array) -> tuple[Array, str]:
    return x - 1, "x"


def branches(x: Array) -> None:
    """An editor shows `(y, name): tuple[Array, str]`."""
    y, name = el.Cond(up, down)(x > 0, x)
    assert_type(y, Array)
    assert_type(name, str)
    assert_type(el.Cond(up, down), el.Cond[tuple[Array, str]])
    assert_type(el.Switch([up, down])(1, x), tuple[Array, str])
    choice = el.IfElse((up, down), check_conditions=False)
    assert_type(choice([x > 0, True], x), tuple[Array, str])


def wrong(x: Array) -> None:
    """Each of these is underlined."""
    el.Cond(up)  # pyright: ignore[reportCallIssue]
    el.Cond(up, 3)  # pyright: ignore[reportArgumentType]
    el.Cond(up, down)()  # pyright: ignore[reportCallIssue]
    el.Switch(up, down)  # pyright: ignore[reportCallIssue]
    el.Switch([up, 3])  # pyright: ignore[reportArgumentType]
    el.IfElse([up, down], False)  # pyright: ignore[reportCallIssue]
