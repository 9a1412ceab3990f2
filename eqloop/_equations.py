"""Changes equations of a program, wherever in it they are."""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex


def map_equations(program: Any, change: Callable[[Any], Any]) -> Any:
    """A program with its equations changed, the inner programs of equations first.

    Rules that a program only holds as a Python function, as for a `jax.custom_vjp`,
    stay what they are.

    Args:
        program: A `Jaxpr` or a `ClosedJaxpr`.
        change: From an equation to the one to have in its place.

    Returns:
        The program with these; the very same object if they all are the same.
    """
    if not isinstance(program, jex.Jaxpr):
        inner = map_equations(program.jaxpr, change)
        return program if inner is program.jaxpr else program.replace(jaxpr=inner)
    eqns = [change(_map_params(eqn, change)) for eqn in program.eqns]
    if all(new is old for new, old in zip(eqns, program.eqns, strict=True)):
        return program
    return program.replace(eqns=eqns)


def map_params(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """An equation with its parameters changed; the very same if they all are."""
    params = {name: change(value) for name, value in eqn.params.items()}
    if all(params[name] is value for name, value in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def _map_params(eqn: Any, change: Callable[[Any], Any]) -> Any:
    def changed(value: Any) -> Any:
        if isinstance(value, jex.Jaxpr | jex.ClosedJaxpr):
            return map_equations(value, change)
        if type(value) in (tuple, list):
            new = type(value)(map(changed, value))
            same = all(a is b for a, b in zip(new, value, strict=True))
            return value if same else new
        return value

    return map_params(eqn, changed)
