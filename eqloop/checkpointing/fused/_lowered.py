"""Programs by few operations, which `_numbers.py` evaluates.

Every other operation is a function of JAX here: of slices, concatenations, selects and
operations on each number. So it can be compared with the operation itself, without a
kernel.

    gather --> slices at computed places     cumsum --> slices, sums, a concatenation
    sort --> neighbours change places        erfc --> exp, products (`_formulas.py`)
"""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random

from ..._compat import called_by
from ..._programs import NOTHING, aval_of, inlined, simpler
from ..._types import Value
from ._by_moves import BY_MOVES, gathered, is_put, scattered, slices, stacked
from ._classes import EMPTY
from ._complex import of_complex
from ._formulas import (
    ALL,
    BOOLS,
    FLOATS,
    INTEGERS,
    bitcast,
    greatest,
    in_total_order,
    is_nan,
    least,
    threefry,
    to_integers,
)

Function = Callable[..., Any]

# What only moves numbers, or is not about numbers alone.
_MOVES = frozenset(
    """broadcast_in_dim concatenate dynamic_slice dynamic_update_slice reshape rev
    select_n slice squeeze transpose cond while unvmap_any random_unwrap random_wrap
    complex real imag""".split()  # noqa: SIM905
)
# What a kernel computes, of real numbers, integers or booleans.
_OF_NUMBERS = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type
    cbrt ceil clz convert_element_type cos cosh div dot_general eq exp exp2 expm1 floor
    ge gt integer_pow le log log1p log2 lt max min mul ne neg not or population_count
    pow reduce_sum rem rsqrt shift_left shift_right_arithmetic shift_right_logical sin
    sinh sqrt sub tan tanh xor""".split()  # noqa: SIM905
)
# Of complex numbers a kernel has none of these.
_WITH_ORDER = frozenset(
    """argmax argmin cumlogsumexp cummax cummin reduce_max reduce_min scatter-max
    scatter-min""".split()  # noqa: SIM905
)
# Those that are approximated, and not to 64 bits.
_SINGLE = frozenset({"erf", "erfc", "erf_inv"})
# What a kernel has for narrow floats, too: others are computed in float32.
_OF_NARROW = frozenset(
    """bitcast_convert_type convert_element_type nextafter
    reduce_precision""".split()  # noqa: SIM905
)


def lowered(program: jex.ClosedJaxpr, but: Collection[str] = ()) -> jex.ClosedJaxpr:
    """A program by few operations `but` some; all can be lowered, see `why_not`."""
    others = lambda eqn: None if eqn.primitive.name in but else _by_few(eqn)
    return inlined(program, lambda eqn: called_by(eqn) is not None, others)


def _by_few(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    name, function = eqn.primitive.name, _function(eqn)
    if name in _MOVES or (simple := simpler(eqn)) is None:
        return function and jax.make_jaxpr(function)(*map(aval_of, eqn.invars))
    return simple


def why_not(eqn: jex.JaxprEqn) -> str | None:
    """Why an operation cannot be in a kernel, if it cannot."""
    name, what = eqn.primitive.name, "cannot be in a kernel"
    dtypes = [aval_of(x).dtype for x in (*eqn.invars, *eqn.outvars)]
    if name in _STRUCTURED and any(_is_key(d) and d.name != "key<fry>" for d in dtypes):
        return "has keys that are not of `threefry2x32`, which a kernel lacks"
    if name in _SINGLE and np.dtype("float64") in dtypes:
        return "is not there in float64 in a kernel"
    if eqn.params.get("update_jaxpr") is not None and name == "scatter":
        return "has a function of its own, which a kernel does not know"
    if _is_complex(eqn) and name in _WITH_ORDER:
        return f"{what} for complex numbers"
    is_there = name in (*_MOVES, *NOTHING, *EMPTY) or _function(eqn) is not None
    if is_there or (name in _OF_NUMBERS and not _is_complex(eqn)):
        return None
    return f"{what} for complex numbers" if _is_complex(eqn) else what


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _is_complex(eqn: jex.JaxprEqn) -> bool:
    avals = map(aval_of, (*eqn.invars, *eqn.outvars))
    return any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals)


def _function(eqn: jex.JaxprEqn) -> Function | None:
    """The function of JAX that an operation is; `None` if it is one of the few."""
    name, p = eqn.primitive.name, eqn.params
    if name in NOTHING:
        return lambda *xs: list(xs)
    if name in BY_MOVES:
        return None if is_put(eqn) else functools.partial(BY_MOVES[name], eqn)
    if name in _STRUCTURED:
        of = functools.partial(_STRUCTURED[name], eqn)
        adds = name.startswith(("reduce_", "cum")) and _is_narrow(eqn)
        return (lambda x: of(x.astype(np.float32)).astype(x.dtype)) if adds else of
    if name in _MOVES or not eqn.invars:
        return None
    if _is_complex(eqn):
        return of_complex(eqn)
    old, new = aval_of(eqn.invars[-1]).dtype, aval_of(eqn.outvars[0]).dtype
    if name == "dot_general":
        wide = np.dtype("float32") if _is_floating(new) and new.itemsize < 4 else new
        is_one = all(aval_of(x).dtype == wide for x in (*eqn.invars, *eqn.outvars))
        return None if is_one else functools.partial(_product, p, wide, new)
    if name == "bitcast_convert_type":
        return functools.partial(bitcast, p) if old.itemsize != new.itemsize else None
    if name == "convert_element_type":
        is_cut = _is_floating(old) and new.kind in "iu" and new.itemsize < 4
        return functools.partial(to_integers, p) if is_cut else None
    if name == "mul" and p.get("out_dtype") is not None:
        return lambda x, y: x.astype(p["out_dtype"]) * y.astype(p["out_dtype"])
    if name == "pow" and not _is_floating(old):
        return lambda x, y: lax.pow(x, y.astype(x.dtype))
    is_number = name in _OF_NUMBERS or name in FLOATS or name in ALL
    if is_number and name not in _OF_NARROW and _is_narrow(eqn):
        return functools.partial(_in_float32, eqn)
    if name in _NATIVE.get(old.name, ()) or _is_key(old):
        return None
    of_kind = FLOATS if _is_floating(old) else BOOLS if old.kind == "b" else INTEGERS
    rule = ALL.get(name) or of_kind.get(name)
    return rule and functools.partial(rule, p)


# What backends lack of integers of other sizes, or without a sign, they have of these.
_COUNTS = "clz", "population_count"
_NATIVE = {
    "int32": ("not", *_COUNTS),
    "int64": ("not", *_COUNTS),
    **dict.fromkeys(("int8", "int16", "uint8", "uint16", "uint32"), ("not",)),
}


def _is_narrow(eqn: jex.JaxprEqn) -> bool:
    dtype = aval_of(eqn.invars[-1]).dtype
    return _is_floating(dtype) and jnp.finfo(dtype).bits < 32


def _is_floating(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _in_float32(eqn: jex.JaxprEqn, *xs: Value) -> Value:
    wide = [x.astype(np.float32) if _is_floating(x.dtype) else x for x in xs]
    found, out = eqn.primitive.bind(*wide, **eqn.params), aval_of(eqn.outvars[0])
    return found.astype(out.dtype)


def _product(p: dict[str, Any], wide: Any, new: Any, x: Value, y: Value) -> Value:
    """Numbers of one dtype are multiplied and added up, narrow ones in float32."""
    numbers = p["dimension_numbers"]
    return lax.dot_general(x.astype(wide), y.astype(wide), numbers).astype(new)


# Sums and comparisons along axes.


def _reduced(f: Function, empty: Callable[[Any], Any]) -> Function:
    """Neighbours become one, until one is left."""

    def of(eqn: jex.JaxprEqn, x: Value) -> Value:
        axes = eqn.params["axes"]
        for axis in axes:
            if not (n := x.shape[axis]):
                shape = [1 if i == axis else n for i, n in enumerate(x.shape)]
                x = jnp.full(shape, empty(x.dtype), x.dtype)
            while (n := x.shape[axis]) > 1:
                even = n - n % 2
                pairs = (slices(x, axis, i, 2, even) for i in range(2))
                x = lax.concatenate([f(*pairs), slices(x, axis, even)], axis)
        return lax.squeeze(x, axes)

    return of


def _all_bits(dtype: Any) -> Any:
    return np.invert(np.zeros((), dtype))


def _cumulated(f: Function) -> Function:
    def of(eqn: jex.JaxprEqn, x: Value) -> Value:
        axis, size = eqn.params["axis"], x.shape[eqn.params["axis"]]
        each = [slices(x, axis, i, 1, i + 1) for i in range(size)]
        step = -1 if eqn.params["reverse"] else 1
        made = list[Value]()
        for part in each[::step]:
            made.append(f(made[-1], part) if made else part)
        return lax.concatenate(made[::step], axis) if made else x

    return of


def _log_of_sum(a: Value, b: Value) -> Value:
    """`log(exp(a) + exp(b))`, also of infinities."""
    big, rest = lax.max(a, b), -jnp.abs(a - b)
    return jnp.where(a == b, a + math.log(2), big + jnp.log1p(jnp.exp(rest)))


def _best(is_better: Function) -> Function:
    """The place of the first NaN, or else of the first of the best."""

    def of(eqn: jex.JaxprEqn, x: Value) -> Value:
        (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
        at = lax.broadcasted_iota(dtype, x.shape, axis)
        while (n := x.shape[axis]) > 1:
            even = n - n % 2
            (a, b), (i, j) = (
                [slices(y, axis, k, 2, even) for k in range(2)] for y in (x, at)
            )
            takes = (is_better(b, a) | is_nan(b)) & ~is_nan(a)
            x, at = (
                lax.concatenate([jnp.where(takes, v, u), slices(y, axis, even)], axis)
                for u, v, y in ((a, b, x), (i, j, at))
            )
        return lax.squeeze(at, [axis])

    return of


def _sorted(eqn: jex.JaxprEqn, *given: Value) -> list[Value]:
    """Neighbours change places, in as many rounds as there are numbers."""
    axis, keys, xs = eqn.params["dimension"], eqn.params["num_keys"], list(given)
    size = xs[0].shape[axis]
    for turn in range(size):
        start, end = turn % 2, size - (size - turn) % 2
        if end - start < 2:
            continue
        a, b = ([slices(x, axis, start + k, 2, end) for x in xs] for k in range(2))
        swaps = _is_behind(a[:keys], b[:keys])
        for n, x in enumerate(xs):
            first, second = (jnp.where(swaps, *p) for p in ((b[n], a[n]), (a[n], b[n])))
            pairs = stacked([first, second], axis + 1)
            shape = [end - start if i == axis else n for i, n in enumerate(x.shape)]
            pairs = lax.reshape(pairs, shape)
            edges = slices(x, axis, 0, 1, start), slices(x, axis, end)
            xs[n] = lax.concatenate([edges[0], pairs, edges[1]], axis)
    return xs


def _is_behind(xs: Sequence[Value], ys: Sequence[Value]) -> Value:
    """Whether numbers are sorted behind others: by the first that differs, NaN last."""
    pairs = list[tuple[Value, Value]]()
    for x, y in zip(xs, ys, strict=True):
        of = (lax.real, lax.imag) if jnp.iscomplexobj(x) else (lambda x: x,)
        pairs += [(f(x), f(y)) for f in of]
    behind = lambda x, y: (x > y) | (is_nan(x) & ~is_nan(y))
    found = behind(*pairs[-1])
    for x, y in pairs[-2::-1]:
        found = behind(x, y) | (~behind(y, x) & found)
    return found


def _top(eqn: jex.JaxprEqn, x: Value) -> list[Value]:
    """The greatest in total order, and of equal ones the first."""
    axis, k = eqn.params.get("axis", x.ndim - 1), eqn.params["k"]
    keys = in_total_order(x) if _is_floating(x.dtype) else x
    at = lax.broadcasted_iota(aval_of(eqn.outvars[1]).dtype, x.shape, axis)
    _, *found = lax.sort((~keys, x, at), dimension=axis, num_keys=1)
    return [slices(y, axis, 0, 1, k) for y in found]


# Keys.

_IMPL: Any = random.threefry_prng_impl


def _of_keys(f: Callable[..., Value], makes_keys: bool = False) -> Function:
    """A function of the words of a key, and of a number; of each of several ones."""

    def of(eqn: jex.JaxprEqn, *xs: Value) -> Value:
        shape = np.broadcast_shapes(*(x.shape for x in xs))
        xs = tuple(jnp.broadcast_to(x, shape) for x in xs)
        words = [jax.random.key_data(x) if _is_key(x.dtype) else x for x in xs]
        one = functools.partial(f, eqn.params)
        for _ in shape:
            one = jax.vmap(one)
        found = one(*words)
        wrap = functools.partial(jax.random.wrap_key_data, impl="threefry2x32")
        return wrap(found) if makes_keys else found

    return of


def _pairs_of_counts(eqn: jex.JaxprEqn) -> list[Value]:
    shape = eqn.params["shape"]
    low = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return [jnp.asarray(np.zeros_like(low)), jnp.asarray(low)]


_STRUCTURED: dict[str, Function] = {
    "reduce_prod": _reduced(lax.mul, lambda dtype: 1),
    "reduce_max": _reduced(lax.max, least),
    "reduce_min": _reduced(lax.min, greatest),
    "reduce_and": _reduced(lax.bitwise_and, _all_bits),
    "reduce_or": _reduced(lax.bitwise_or, lambda dtype: 0),
    "reduce_xor": _reduced(lax.bitwise_xor, lambda dtype: 0),
    "cumsum": _cumulated(lax.add),
    "cumprod": _cumulated(lax.mul),
    "cummax": _cumulated(lax.max),
    "cummin": _cumulated(lax.min),
    "cumlogsumexp": _cumulated(_log_of_sum),
    "argmax": _best(lax.gt),
    "argmin": _best(lax.lt),
    "sort": _sorted,
    "top_k": _top,
    "gather": gathered,
    "scatter": scattered(lambda old, new: new),
    **dict.fromkeys(("scatter-add", "scatter_add"), scattered(lax.add)),
    **dict.fromkeys(("scatter-sub", "scatter_sub"), scattered(lax.sub)),
    **dict.fromkeys(("scatter-mul", "scatter_mul"), scattered(lax.mul)),
    **dict.fromkeys(("scatter-min", "scatter_min"), scattered(lax.min)),
    **dict.fromkeys(("scatter-max", "scatter_max"), scattered(lax.max)),
    "random_bits": _of_keys(
        lambda p, k: _IMPL.random_bits(k, p["bit_width"], p["shape"])
    ),
    "random_split": _of_keys(lambda p, k: _IMPL.split(k, p["shape"]), True),
    "random_fold_in": _of_keys(
        lambda p, k, n: _IMPL.fold_in(k, n.astype(np.uint32)), True
    ),
    "random_seed": _of_keys(lambda p, n: _IMPL.seed(n), True),
    "threefry2x32": lambda eqn, *xs: threefry(*xs),
    "iota_2x32_shape": _pairs_of_counts,
}
