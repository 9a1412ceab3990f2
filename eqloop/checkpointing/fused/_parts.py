"""Keys and complex numbers, each of which is several numbers."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random

from ..._programs import aval_of
from ..._types import Value
from . import _formulas as formulas
from ._classes import refuse
from ._elementwise import chosen
from ._entries import Parts, is_known, parts_of
from ._scope import BlockScope, alike, entry, mapped, objects, of_array, valued


def key_bits(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """What is computed from keys, by the functions of their implementation."""
    f = KEYS[eqn.primitive.name]
    avals = [aval_of(v) for v in eqn.invars]
    data = [_key_data(scope, a, v) for a, v in zip(ins, avals, strict=True)]
    is_key = [parts_of(v.dtype)[0] > 1 for v in avals]
    out = aval_of(eqn.outvars[0])
    to_key = parts_of(out.dtype)[0] > 1
    shape = max(
        (v.shape for v, k in zip(avals, is_key, strict=True) if k),
        key=len,
        default=avals[0].shape,
    )
    values = list[Any]()
    for index in np.ndindex(*shape):
        own = [entry(a, index if a.ndim else ()) for a in data]
        types = [
            jax.ShapeDtypeStruct(a.shape, np.uint32 if k else v.dtype)
            for a, k, v in zip(own, is_key, avals, strict=True)
        ]
        program = jax.make_jaxpr(functools.partial(f, eqn.params))(*types)
        (made,) = scope.run(program, own)
        flat = list(made.reshape(-1))
        if to_key:
            flat = [Parts(tuple(flat[i : i + 2])) for i in range(0, len(flat), 2)]
        values += flat
    return [objects(values, out.shape)]


def _key_data(scope: BlockScope, a: np.ndarray, aval: Any) -> np.ndarray:
    if parts_of(aval.dtype)[0] == 1:
        return a
    flat = [v for x in a.reshape(-1) for v in scope.value(x).values]
    return objects(flat, (*a.shape, 2))


_IMPL: Any = random.threefry_prng_impl
KEYS: dict[str, Callable[..., Value]] = {
    "random_bits": lambda p, k: _IMPL.random_bits(k, p["bit_width"], p["shape"]),
    "random_split": lambda p, k: _IMPL.split(k, p["shape"]),
    "random_fold_in": lambda p, k, n: _IMPL.fold_in(k, n.astype(jnp.uint32)),
    "random_seed": lambda p, n: _IMPL.seed(n),
}


def threefry(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    u32 = [np.dtype("uint32")] * 4
    of = lambda *xs: formulas.threefry(*alike(u32, xs))
    pairs = mapped(of, *(valued(scope, a) for a in ins))
    return [mapped(lambda pair, i=i: pair[i], pairs) for i in range(2)]


def iota_pair(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    shape = eqn.params["shape"]
    low = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return [of_array(np.zeros_like(low)), of_array(low)]


def unwrap(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    return [_key_data(scope, ins[0], aval_of(eqn.invars[0]))]


def wrap(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    a, out = valued(scope, ins[0]), aval_of(eqn.outvars[0])
    pairs = a.reshape(-1, 2)
    return [objects([Parts(tuple(pair)) for pair in pairs], out.shape)]


def of_parts(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """An elementwise operation with complex numbers or keys in it."""
    name = eqn.primitive.name
    avals = [aval_of(v) for v in eqn.invars]
    out = aval_of(eqn.outvars[0])
    is_key = any(jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in avals)
    if name == "select_n":
        _, part = parts_of(out.dtype)

        def select(which: Any, *cases: Any) -> Any:
            return chosen(
                jnp.asarray(which).astype(jnp.int32) if not is_known(which) else which,
                list(cases),
                out.dtype,
            )

        return [mapped(select, *(valued(scope, a) for a in ins))]
    if name in ("copy", "stop_gradient"):
        return [ins[0]]
    f = None if is_key else COMPLEX.get(name)
    if f is None:
        refuse(
            eqn,
            "Use another schedule, such as `el.Chunked(32)`.",
            "is not there for these numbers in a kernel",
        )
    _, part = parts_of(avals[0].dtype if out.dtype == bool else out.dtype)

    dtypes = [aval.dtype for aval in avals]
    run = lambda *xs: complex_of(f, eqn.params, xs, dtypes, part)
    found = mapped(run, *(valued(scope, a) for a in ins))
    if name == "convert_element_type" and parts_of(out.dtype)[0] == 1:
        found = mapped(lambda x: x.values[0], found)
    return [found]


def complex_of(
    f: Callable[..., Any],
    params: Any,
    xs: Sequence[Any],
    dtypes: Sequence[Any],
    part: Any,
) -> Any:
    """An operation on complex numbers, of which real ones have no second part."""
    zero, flat = np.zeros((), part)[()], list[Any]()
    for x, dtype in zip(xs, dtypes, strict=True):
        if isinstance(x, Parts):
            flat += x.values
        elif is_known(x):
            flat += [np.asarray(y, part)[()] for y in (np.real(x), np.imag(x))]
        else:
            flat += [jnp.asarray(x, dtype).astype(part), zero]
    made = alike([part] * len(flat), flat)
    found = f(params, *zip(made[::2], made[1::2], strict=True))
    return Parts(tuple(found)) if isinstance(found, tuple) else found


def _times(_: Any, x: Any, y: Any) -> tuple[Value, Value]:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _over(p: Any, x: Any, y: Any) -> tuple[Value, Value]:
    size = y[0] * y[0] + y[1] * y[1]
    a, b = _times(p, x, (y[0], -y[1]))
    return a / size, b / size


def _power(p: Any, x: Any) -> tuple[Value, Value]:
    n, found = abs(p["y"]), (jnp.ones_like(x[0]), jnp.zeros_like(x[0]))
    for _ in range(n):
        found = _times(p, found, x)
    one = jnp.ones_like(x[0]), jnp.zeros_like(x[0])
    return found if p["y"] >= 0 else _over(p, one, found)


def _exp(_: Any, x: Any) -> tuple[Value, Value]:
    size = jnp.exp(x[0])
    return size * jnp.cos(x[1]), size * jnp.sin(x[1])


COMPLEX: dict[str, Callable[..., Any]] = {
    "add": lambda p, x, y: (x[0] + y[0], x[1] + y[1]),
    "add_any": lambda p, x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda p, x, y: (x[0] - y[0], x[1] - y[1]),
    "neg": lambda p, x: (-x[0], -x[1]),
    "mul": _times,
    "div": _over,
    "square": lambda p, x: _times(p, x, x),
    "integer_pow": _power,
    "exp": _exp,
    "conj": lambda p, x: (x[0], -x[1]),
    "real": lambda p, x: x[0],
    "imag": lambda p, x: x[1],
    "complex": lambda p, x, y: (x[0], y[0]),
    "abs": lambda p, x: jnp.sqrt(x[0] * x[0] + x[1] * x[1]),
    "eq": lambda p, x, y: (x[0] == y[0]) & (x[1] == y[1]),
    "ne": lambda p, x, y: (x[0] != y[0]) | (x[1] != y[1]),
    "convert_element_type": lambda p, x: x,
}
