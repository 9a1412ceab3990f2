"""Operations that are given a function of numbers: reductions and scatters."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex

from ..._arrays import split
from ..._compat import close
from .._atoms import shape_of
from ._control import Statement, returned, traced_name
from ._lines import call, structure
from ._operations import call_by_settings
from ._reads import reads_updates
from ._scope import Scope
from ._values import UnprintableError, parameter

_WINDOW = (
    "window_dimensions",
    "window_strides",
    "padding",
    "base_dilation",
    "window_dilation",
)


def _reduce(scope: Scope, eqn: jex.JaxprEqn) -> None:
    dimensions = parameter(eqn.params["dimensions"])
    value = call("lax.reduce", *_combined(scope, eqn), dimensions)
    scope.assign(eqn.outvars, value)


def _reduce_window(scope: Scope, eqn: jex.JaxprEqn) -> None:
    settings = {name: parameter(eqn.params[name]) for name in _WINDOW}
    value = call("lax.reduce_window", *_combined(scope, eqn), **settings)
    scope.assign(eqn.outvars, value)


def _combined(scope: Scope, eqn: jex.JaxprEqn) -> list[str]:
    """What is reduced, what it starts with, and the function that combines two."""
    arrays, starts = split(scope.arguments(eqn.invars), len(eqn.invars) // 2)
    groups = [(name, len(arrays)) for name in ("x", "y")]
    combine = _function_of_numbers(scope, eqn.params["jaxpr"], "combine", groups)
    return [structure(arrays), structure(starts), combine]


def _scatter(scope: Scope, eqn: jex.JaxprEqn) -> None:
    function = eqn.params["update_jaxpr"]
    if function is None or function.outvars[0] is function.invars[1]:
        scope.assign(eqn.outvars, call_by_settings(scope, eqn))
    elif reads_updates(eqn):
        raise UnprintableError(function)
    else:
        scope.assign(eqn.outvars, _applied(scope, eqn))


def _applied(scope: Scope, eqn: jex.JaxprEqn) -> str:
    """A scatter that applies a function to what is there."""
    params = eqn.params
    operand, indices = scope.arguments(eqn.invars[:2])
    settings = {
        name: parameter(params[name])
        for name in ("indices_are_sorted", "unique_indices", "mode")
        if params[name] not in (False, None)
    }
    return call(
        "lax.scatter_apply",
        operand,
        indices,
        _function_of_numbers(scope, params["update_jaxpr"], "apply", [("x", 1)]),
        parameter(params["dimension_numbers"]),
        update_shape=parameter(shape_of(eqn.invars[2])),
        **settings,
    )


def _function_of_numbers(
    scope: Scope, program: Any, default: str, groups: Sequence[tuple[str, int]]
) -> str:
    """Writes a function of numbers, of which JAX has none that close over arrays."""
    jaxpr = close(program)
    name = traced_name(jaxpr)
    return scope.local_function(name, default, jaxpr, (), groups, returned)


COMBINING: dict[str, Statement] = {
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "scatter": _scatter,
}
