"""Which operation is written by what; users can add to it."""

from collections.abc import Callable, Sequence

import jax.extend.core as jex
from jax.extend.core import primitives

from ..._compat import form_of
from ..._tracebacks import border
from ._combine import COMBINING
from ._control import CONTROL
from ._derivatives import DERIVATIVES
from ._lines import call
from ._operations import OPERATIONS
from ._scope import Scope
from ._values import UnprintableError, parameter

_STATEMENTS = COMBINING | CONTROL | DERIVATIVES
_registered: dict[str, Callable[[jex.JaxprEqn, Sequence[str]], str]] = {}


@border
def register_handler(
    primitive: jex.Primitive | str,
    handler: Callable[[jex.JaxprEqn, Sequence[str]], str],
) -> None:
    """Tells `to_python` how to write an operation that it does not know.

    A handler replaces an earlier one, or the library's own, for the same operation.

    Args:
        primitive: The operation, or its name as a printed jaxpr shows it.
        handler: Takes the equation, whose `params` are those of the operation, and an
            expression for each operand. It returns an expression for the result, or for
            a tuple if the operation has `multiple_results`. The names `jax`, `jnp`,
            `lax` and `np` may be used in it; others can be imported with `__import__`.

    Raises:
        TypeError: `primitive` is neither a primitive nor a name, or `handler` is not a
            function.

    Examples:
        >>> from eqloop import ir
        >>> ir.register_handler("erf_inv", lambda eqn, x: f"lax.erf_inv({x[0]})")
    """
    name = primitive.name if isinstance(primitive, jex.Primitive) else primitive
    if not isinstance(name, str):
        raise TypeError(
            f"register_handler: `primitive` must be a primitive or its name, as in "
            f"`eqn.primitive.name`, but it is {primitive!r}."
        )
    if not callable(handler):
        raise TypeError(
            f"register_handler: `handler` must be a function `(eqn, operands) -> str`, "
            f"but it is {handler!r}."
        )
    _registered[name] = handler


def write_equation(scope: Scope, eqn: jex.JaxprEqn) -> None:
    """Writes an equation into a function."""
    name = form_of(eqn)
    try:
        if name in _STATEMENTS and name not in _registered:
            _STATEMENTS[name](scope, eqn)
        else:
            # A `hijax` primitive has several results; the form that it has, one.
            one = name != eqn.primitive.name or not eqn.primitive.multiple_results
            scope.assign(eqn.outvars, _expression(scope, eqn), one_is_bare=one)
    except UnprintableError as error:
        raise ValueError(
            f"to_python: no Python is known for the operation `{name}`, with the "
            f"parameters {', '.join(eqn.params)}. Say what to write with "
            f"`eqloop.ir.register_handler({name!r}, handler)`, where "
            f"`handler(eqn, operands)` returns an expression."
        ) from error


def _expression(scope: Scope, eqn: jex.JaxprEqn) -> str:
    name = form_of(eqn)
    if name in _registered:
        return _text(eqn, _registered[name](eqn, scope.arguments(eqn.invars)))
    if name in OPERATIONS:
        return OPERATIONS[name](scope, eqn)
    return _bound(scope, eqn)


def _bound(scope: Scope, eqn: jex.JaxprEqn) -> str:
    """An operation without a function that has just its parameters: as JAX binds it."""
    name = f"{eqn.primitive.name}_p"
    if getattr(primitives, name, None) is not eqn.primitive:
        raise UnprintableError(eqn.primitive)
    params = {key: parameter(value) for key, value in eqn.params.items()}
    operands = scope.arguments(eqn.invars)
    return call(f"primitives.{name}.bind", *operands, **params)


def _text(eqn: jex.JaxprEqn, text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(
            f"to_python: the handler registered for `{eqn.primitive.name}` must "
            f"return an expression as a string, but it returned {text!r}."
        )
    return text
