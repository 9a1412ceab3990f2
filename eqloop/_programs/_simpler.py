"""Operations that have a program of simpler ones, for whoever interprets programs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import is_inexact
from .._compat import form_of
from .._types import Value
from ._equations import aval_of, formula_of


def simpler(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program of an equation by simpler operations, if it has one.

    A `hijax` primitive loses the derivative that it has of its own.
    """
    function = _by_others(eqn)
    if function is None:
        return None
    try:
        with jax.disable_jit(False):
            return jax.make_jaxpr(function)(*map(aval_of, eqn.invars))
    except Exception:
        return None  # the code of another library needs numbers


def as_simpler(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program of an equation, if it does the same in a gradient and in a batch."""
    is_hijax = type(eqn.params.get("_prim")).__module__.startswith("jax.")
    is_same = is_hijax and not any(is_inexact(aval_of(x)) for x in eqn.outvars)
    return simpler(eqn) if is_same or eqn.primitive.name in _MOVES else None


def _by_others(eqn: jex.JaxprEqn) -> Callable[..., Any] | None:
    name, params = eqn.primitive.name, eqn.params
    if name in _MOVES and params.get("dimensions", ()) is not None:
        return lambda *xs: _MOVES[name](params, *xs)
    if form_of(eqn) == "call_hi_primitive" and formula_of(eqn) is None:
        return lambda *xs: _expanded(params["_prim"], xs)
    # A primitive of another library, such as Equinox.
    run: Any = getattr(eqn.primitive, "impl", None)
    module = getattr(getattr(run, "func", run), "__module__", None) or "jax"
    if module.split(".")[0] in ("jax", "jaxlib"):
        return None
    return lambda *xs: run(*xs, **params)


def _expanded(primitive: Any, xs: Sequence[Value]) -> list[Value]:
    given = jax.tree.unflatten(jax.tree.structure(primitive.in_avals), xs)
    return jax.tree.leaves(primitive.expand(*given))


def _split(params: dict[str, Any], x: Value) -> list[Value]:
    parts, at = list[Value](), 0
    for size in map(int, params["sizes"]):
        parts.append(lax.slice_in_dim(x, at, at + size, axis=params["axis"]))
        at += size
    return parts


def _stack(params: dict[str, Any], *xs: Value) -> Value:
    axis = params["axis"]
    return lax.concatenate([lax.expand_dims(x, [axis]) for x in xs], axis)


def _unstack(params: dict[str, Any], x: Value) -> list[Value]:
    axis = params["axis"]
    return [lax.index_in_dim(x, i, axis, False) for i in range(x.shape[axis])]


def _tile(params: dict[str, Any], x: Value) -> Value:
    reps = params["reps"]
    pairs = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    spread = lax.broadcast_in_dim(x, pairs, range(1, 2 * x.ndim, 2))
    return jnp.reshape(spread, [n * m for n, m in zip(reps, x.shape, strict=True)])


# What moves numbers by several of the moves that older versions of JAX have as well.
_MOVES: dict[str, Callable[..., Any]] = {
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "copy": lambda p, x: x,
    # Only with its axes in another order is it not simple already.
    "reshape": lambda p, x: lax.reshape(x.transpose(p["dimensions"]), p["new_sizes"]),
}
