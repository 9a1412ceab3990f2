"""Jaxprs as trees: which equations hold jaxprs of their own, and rewriting those."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import primitives

from .._compat import CALLS, close, is_open
from .._formula import Formula

Closed: TypeAlias = jex.ClosedJaxpr
Rewrite: TypeAlias = Callable[[Closed], Closed]

# The primitives whose jaxprs are programs like the one around them, so that any program
# of the same meaning may take their place. A `reduce` or a Pallas kernel, say, holds a
# jaxpr that is no such thing.
_CALLS = frozenset(
    {
        primitives.cond_p,
        primitives.custom_jvp_call_p,
        primitives.custom_vjp_call_p,
        primitives.scan_p,
        primitives.while_p,
    }
)
_CALL_NAMES = frozenset({*CALLS, "shard_map"})


def is_call(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation runs jaxprs that may be rewritten."""
    return eqn.primitive in _CALLS or eqn.primitive.name in _CALL_NAMES


def inner(eqn: jex.JaxprEqn) -> list[Closed]:
    """The jaxprs that an equation runs, closed."""
    found: list[Closed] = []

    def note(jaxpr: Closed) -> Closed:
        found.append(jaxpr)
        return jaxpr

    map_inner(eqn, note)
    return found


def map_inner(eqn: jex.JaxprEqn, rewrite: Rewrite) -> jex.JaxprEqn:
    """The equation with its jaxprs rewritten; the same object if none changes."""
    formula = eqn.params.get("_prim")
    if isinstance(formula, Formula):
        new = formula.rewritten(rewrite)
        return eqn if new is formula else eqn.replace(params={"_prim": new})
    if not is_call(eqn):
        return eqn
    params = {name: _map_param(param, rewrite) for name, param in eqn.params.items()}
    if all(params[name] is param for name, param in eqn.params.items()):
        return eqn
    return eqn.replace(params=params)


def count_equations(jaxpr: Closed) -> int:
    """How many equations there are, those of the jaxprs inside included."""
    return sum(1 + sum(map(count_equations, inner(eqn))) for eqn in jaxpr.eqns)


def rewrite_everywhere(
    level: Callable[[Closed, Rewrite], Closed], jaxpr: Any
) -> Closed:
    """Rewrites a jaxpr and those inside of it.

    A jaxpr that is called in several places is rewritten once, and stays shared.

    Args:
        level: Rewrites one level; it is also given the function for those below.
        jaxpr: A closed jaxpr.
    """
    # The jaxpr is kept with its result, so that its id cannot become another's.
    done: dict[int, tuple[Closed, Closed]] = {}

    def rewrite(jaxpr: Closed) -> Closed:
        if id(jaxpr) not in done:
            done[id(jaxpr)] = jaxpr, level(jaxpr, rewrite)
        return done[id(jaxpr)][1]

    return rewrite(jaxpr)


def check_closed(jaxpr: Any, name: str) -> None:
    """Raises a `TypeError` for what is no closed jaxpr."""
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


def is_complex(atom: Any) -> bool:
    """Whether an atom is an array of complex numbers."""
    return jnp.issubdtype(dtype_of(atom), jnp.complexfloating)


def dtype_of(atom: Any) -> Any:
    """The dtype of a variable or literal that is an array."""
    return atom.aval.dtype


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal that is an array."""
    return atom.aval.shape


def has_known_shape(atom: Any) -> bool:
    """Whether the sizes of an array are numbers: those of `jax.export` may be `n`."""
    return not any(map(is_symbolic_dim, getattr(atom.aval, "shape", ())))


def literal_value(atom: jex.Literal) -> np.ndarray:
    """What a literal stands for, in its dtype."""
    # It may be on a device, and then the user has not asked to have it here.
    with jax.transfer_guard("allow"):
        return np.asarray(atom.val, dtype_of(atom))


def _map_param(param: Any, rewrite: Rewrite) -> Any:
    if isinstance(param, jex.ClosedJaxpr):
        return rewrite(param)
    if is_open(param):
        closed = close(param)
        new = rewrite(closed)
        return param if new is closed else new.jaxpr
    # A tuple of branches; a named tuple is not one of ours to rebuild.
    if type(param) is tuple:
        new = tuple(_map_param(entry, rewrite) for entry in param)
        return param if all(map(_same, new, param)) else new
    return param


def _same(a: Any, b: Any) -> bool:
    return a is b
