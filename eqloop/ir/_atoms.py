"""What jaxprs consist of: checked, counted, and told apart."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from .._arrays import has_dtype
from .._compat import is_open
from .._programs import equations, rewritable_programs

Closed: TypeAlias = jex.ClosedJaxpr
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
