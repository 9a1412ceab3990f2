"""Operations on each number by itself, choices between numbers, and sums of them."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._programs import aval_of
from ..._types import Value
from ._entries import Parts, is_known, parts_of, values_of
from ._formulas import GUARDED
from ._scope import BlockScope, alike, from_vectors, mapped, objects, valued
from ._tpu import where as one_of


def bound(eqn: Any, xs: Sequence[Any]) -> Any:
    """An elementwise operation on one entry of each operand."""
    name = eqn.primitive.name
    dtypes = [aval_of(v).dtype for v in eqn.invars]
    to = aval_of(eqn.outvars[0]).dtype
    if name in ("complex", "real", "imag"):
        return _part(name, xs, dtypes[0])
    if name == "select_n":
        return chosen(xs[0], xs[1:], to)
    if all(map(is_known, xs)) and (fold := _KNOWN.get(name)) is not None:
        made = [np.asarray(x, d) for x, d in zip(xs, dtypes, strict=True)]
        with np.errstate(all="ignore"):
            return np.asarray(fold(*made), to)[()]
    if name == "convert_element_type":
        if dtypes[0] == to:
            return xs[0]
        if is_known(xs[0]) and (dtypes[0].kind in "biu" or to.kind == "f"):
            return np.asarray(xs[0], dtypes[0]).astype(to)[()]
    if name == "bitcast_convert_type" and is_known(xs[0]):  # which Triton refuses
        return np.asarray(xs[0], dtypes[0]).view(to)[()]
    if (simple := simplified(name, xs)) is not None:
        return simple
    made = alike(dtypes, xs)
    if name in GUARDED and to.kind in "iu" and not _is_safe(name, xs[1], to):
        return GUARDED[name](*made)
    params = {k: None if k == "sharding" else v for k, v in eqn.params.items()}
    return eqn.primitive.bind(*made, **params)


def _is_safe(name: str, x: Any, dtype: Any) -> bool:
    """Whether it is known that one can divide by an integer, or shift by it."""
    least = 0 if name.startswith("shift") else 1
    most = jnp.iinfo(dtype).bits if least == 0 else math.inf
    return is_known(x) and least <= int(x) < most


def _part(name: str, xs: Sequence[Any], dtype: Any) -> Any:
    if name == "complex":
        return Parts(tuple(xs))
    return values_of(xs[0], dtype)[name == "imag"]


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
}


# What leaves the other operand as it is.
_NEUTRAL = {"add": 0, "add_any": 0, "mul": 1, "or": 0, "xor": 0}


def simplified(name: str, xs: Sequence[Any]) -> Any:
    """What adding zero and multiplying by one leave, and the like."""
    if (neutral := _NEUTRAL.get(name)) is not None:
        for x, other in (xs, reversed(xs)):
            if is_known(x) and x == neutral:
                return other
    if name == "sub" and is_known(xs[1]) and xs[1] == 0:
        return xs[0]
    return None


def pairwise(f: Callable[..., Value], dtype: Any) -> Callable[..., Any]:
    """A sum or a product of two numbers of a dtype, which may be known."""
    fold, name = (np.add, "add") if f is jnp.add else (np.multiply, "mul")

    def run(a: Any, b: Any) -> Any:
        if is_known(a) and is_known(b):
            with np.errstate(all="ignore"):
                return np.asarray(fold(np.asarray(a, dtype), np.asarray(b, dtype)))[()]
        simple = simplified(name, [a, b])
        return f(*alike([dtype, dtype], [a, b])) if simple is None else simple

    return run


def summed(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), out, axes = ins, aval_of(eqn.outvars[0]), eqn.params["axes"]
    add, zero = pairwise(jnp.add, out.dtype), np.zeros((), out.dtype)[()]
    left = [i for i in range(a.ndim) if i not in axes]
    a = valued(scope, a.transpose([*left, *axes]))
    rows = a.reshape(math.prod(out.shape), math.prod(a.shape[len(left) :]))
    return [objects([functools.reduce(add, row, zero) for row in rows], out.shape)]


def chosen(at: Any, choices: Sequence[Any], dtype: Any) -> Any:
    """The choice of a number: the first one below range, and above it the last."""
    if is_known(at):
        return choices[min(max(int(at), 0), len(choices) - 1)]
    count, part = parts_of(dtype)
    if count > 1:
        columns = zip(*(values_of(c, dtype) for c in choices), strict=True)
        return Parts(tuple(chosen(at, list(c), part) for c in columns))
    found = choices[0]
    for i, choice in enumerate(choices[1:], 1):
        if choice is not found:
            hit = at if jnp.result_type(at).kind == "b" else at >= i
            found = where(hit, choice, found, dtype)
    return found


def where(hit: Any, a: Any, b: Any, dtype: Any) -> Any:
    count, part = parts_of(dtype)
    if count > 1:
        pairs = zip(values_of(a, dtype), values_of(b, dtype), strict=True)
        return Parts(tuple(where(hit, x, y, part) for x, y in pairs))
    return one_of(*alike([np.bool_, part, part], [hit, a, b]))


def wrapped(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """Keys, of their words."""
    words, out = valued(scope, ins[0]).reshape(-1), aval_of(eqn.outvars[0])
    return [from_vectors(list(words), out.shape, out.dtype)]


def unwrapped(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """The words of keys."""
    dtype, keys = aval_of(eqn.invars[0]).dtype, map(scope.value, ins[0].reshape(-1))
    words = [word for key in keys for word in values_of(key, dtype)]
    return [objects(words, aval_of(eqn.outvars[0]).shape)]


def elementwise(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    return [mapped(lambda *xs: bound(eqn, list(map(scope.value, xs))), *ins)]
