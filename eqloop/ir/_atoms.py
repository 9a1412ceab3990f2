"""What jaxprs consist of: checked, counted, and told apart."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from .._arrays import has_dtype
from .._calls import typed
from .._compat import is_open
from .._programs import (
    Rewrite,
    Rewriter,
    equations,
    rewritable_programs,
    rewrite_everywhere,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
Closed: TypeAlias = jex.ClosedJaxpr
Level: TypeAlias = Callable[[Closed, Rewrite], Closed]
# The equations that compute variables.
Definitions: TypeAlias = Mapping[jex.Var, jex.JaxprEqn]


def count_equations(jaxpr: Closed) -> int:
    """How many equations there are, those of the jaxprs inside included."""
    return sum(1 for _ in equations(jaxpr, rewritable_programs))


def check_closed(jaxpr: Any, name: str) -> None:
    """Raises a `TypeError` for what is not a closed jaxpr."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return
    hint = (
        "close it, `jax.extend.core.ClosedJaxpr(jaxpr, consts)`"
        if is_open(jaxpr)
        else "trace the function first, `jax.make_jaxpr(f)(*args)`"
        if callable(jaxpr)
        else "`jax.make_jaxpr(f)(*args)` gives one"
    )
    raise TypeError(
        f"{name}: expected a ClosedJaxpr, but got a {type(jaxpr).__name__}: {hint}."
    )


def of_closed(f: _Function) -> _Function:
    """A public function whose first argument is a closed jaxpr, which is checked."""

    @functools.wraps(f)
    def call(jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        check_closed(jaxpr, f.__name__)
        return f(jaxpr, *args, **kwargs)

    return typed(call)  # pyright: ignore


def jaxpr_pass(level: Level) -> Callable[[_Function], _Function]:
    """A pass with the name and the words of a function, which rewrites every level."""

    def decorate(words: _Function) -> _Function:
        run = lambda jaxpr: rewrite_everywhere(level, jaxpr)
        named: Any = functools.wraps(words)(run)
        return of_closed(named)

    return decorate


def by_equation(
    each: Callable[[Rewriter, jex.JaxprEqn, dict[Any, Any]], jex.JaxprEqn],
) -> Level:
    """Rewrites a level; what is noted down at an equation is known at the next ones."""

    def level(jaxpr: Closed, rewrite: Rewrite) -> Closed:
        rewriter, known = Rewriter(jaxpr), {}
        for eqn in jaxpr.eqns:
            rewriter.emit(each(rewriter, rewriter.enter(eqn, rewrite), known))
        return rewriter.result()

    return level


def is_array(atom: Any) -> bool:
    """Whether an atom is an ordinary array: no reference, token or PRNG key."""
    return type(atom.aval) is jax.core.ShapedArray and not is_extended(atom)


def is_extended(atom: Any) -> bool:
    """Whether an atom is of a dtype that NumPy does not have, such as a PRNG key."""
    return jnp.issubdtype(dtype_of(atom), jax.dtypes.extended)


def dtype_of(atom: Any) -> Any:
    """The dtype of a variable or literal that is an array."""
    return atom.aval.dtype


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal that is an array."""
    return atom.aval.shape


def has_known_shape(atom: Any) -> bool:
    """Whether the sizes of an array are numbers: those of `jax.export` may be `n`."""
    return not any(map(is_symbolic_dim, shape_of(atom) if has_dtype(atom.aval) else ()))
