"""Operations on each number by itself, and choices between numbers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._programs import aval_of
from ..._types import Value
from . import _formulas as formulas
from ._classes import refuse
from ._entries import Parts, is_known, parts_of, values_of
from ._scope import alike


def bound(eqn: Any, xs: Sequence[Any]) -> Any:
    """An elementwise operation on one entry of each operand."""
    name, p = eqn.primitive.name, eqn.params
    dtypes = [aval_of(v).dtype for v in eqn.invars]
    to = aval_of(eqn.outvars[0]).dtype
    if all(map(is_known, xs)):
        if (fold := _KNOWN.get(name)) is not None:
            made = [np.asarray(x, d) for x, d in zip(xs, dtypes, strict=True)]
            with np.errstate(all="ignore"):
                return np.asarray(fold(*made), to)[()]
        if name == "convert_element_type" and dtypes[0].kind in "biuf":
            return np.asarray(xs[0]).astype(to)[()]
    if (simple := simplified(name, xs)) is not None:
        return simple
    if name == "convert_element_type":
        if dtypes[0] == to:
            return xs[0]
        return jnp.asarray(xs[0], dtypes[0]).astype(to)
    if name == "select_n" and dtypes[0].kind != "b":
        return chosen(xs[0], xs[1:], to)
    made = alike(dtypes, xs)
    if name in _WRITTEN:
        if name in _SINGLE and made[0].dtype == np.dtype("float64"):
            refuse(eqn, "Use float32 for it.", "is not there in float64 in a kernel")
        return _WRITTEN[name](p, *made)
    return eqn.primitive.bind(*made, **_params(p))


# What is known is computed while tracing: without JAX, which may be compiling for a
# device that is not here.
_KNOWN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "clamp": lambda low, x, high: np.minimum(np.maximum(low, x), high),
}


def _params(params: dict[str, Any]) -> dict[str, Any]:
    return {k: None if k == "sharding" else v for k, v in params.items()}


def simplified(name: str, xs: Sequence[Any]) -> Any:
    """What adding zero and multiplying by one leave."""
    if name in ("add", "add_any", "mul"):
        neutral = 1 if name == "mul" else 0
        for x, other in (xs, reversed(xs)):
            if is_known(x) and x == neutral:
                return other
    if name == "sub" and is_known(xs[1]) and xs[1] == 0:
        return xs[0]
    if name == "select_n" and is_known(xs[0]):
        return xs[1 + int(xs[0])]
    return None


_WRITTEN: dict[str, Callable[..., Value]] = {
    "erf": lambda p, x: formulas.erf(x),
    "erfc": lambda p, x: 1 - formulas.erf(x),
    "erf_inv": lambda p, x: formulas.erf_inv(x),
    "round": lambda p, x: formulas.round_half(x, p["rounding_method"]),
    "lgamma": lambda p, x: formulas.lgamma(x),
    "digamma": lambda p, x: formulas.digamma(x),
    "copy": lambda p, x: x,
    "copy_p": lambda p, x: x,
    "stop_gradient": lambda p, x: x,
    "reduce_precision": lambda p, x: x,
    "square": lambda p, x: x * x,
    "one_minus_square": lambda p, x: 1 - x * x,
    "logistic": lambda p, x: 1 / (1 + jnp.exp(-x)),
    "is_finite": lambda p, x: jnp.abs(x) < jnp.asarray(jnp.inf, x.dtype),
    "sign": lambda p, x: jnp.where(x == 0, x, jnp.where(x > 0, jnp.ones_like(x), -1)),
    "clamp": lambda p, a, x, b: jnp.minimum(jnp.maximum(a, x), b),
    "polynomial": lambda p, x, *c: functools.reduce(lambda y, a: y * x + a, c[::-1]),
}


# Those that are approximated, and not to 64 bits.
_SINGLE = frozenset({"erf", "erfc", "erf_inv"})


def chosen(at: Any, choices: Sequence[Any], dtype: Any) -> Any:
    """The choice of a number, which is in range."""
    if is_known(at):
        return choices[int(at)]
    count, part = parts_of(dtype)
    if count > 1:
        columns = zip(*(values_of(c, dtype) for c in choices), strict=True)
        return Parts(tuple(chosen(at, list(c), part) for c in columns))
    found = choices[0]
    for i, choice in enumerate(choices[1:], 1):
        if choice is not found:
            found = where(at == i, choice, found, dtype)
    return found


def where(hit: Any, a: Any, b: Any, dtype: Any) -> Any:
    count, part = parts_of(dtype)
    if count > 1:
        pairs = zip(values_of(a, dtype), values_of(b, dtype), strict=True)
        return Parts(tuple(where(hit, x, y, part) for x, y in pairs))
    return jnp.where(*alike([np.bool_, dtype, dtype], [hit, a, b]))
