"""Evaluates the program of one row, number by number, for a block of rows at once.

An array of one row is an array of objects here, one for each of its entries:

- a vector with a number for each row of the block, which lives in registers;
- a scalar, where all rows have the same number; a NumPy scalar, if it is known;
- `InMemory`, a number in memory that is read where it is used;
- `Parts`, for a number that is several: a key, or a complex number.

What only moves entries computes nothing. Its primitive is run on their positions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._programs import aval_of, reached
from ..._types import Value
from . import _formulas as formulas
from ._axes import ELEMENTWISE, refuse, scan_counts
from ._entries import InMemory, Parts, ProductSum, is_known, parts_of, values_of
from ._tiles import NotTiledError, Tiles
from ._windows import Windows

# From so many products on, a product of matrices is one of tiles.
_LEAST_OF_TILES = 64
# An inner scan of no more steps is written out.
_UNROLLED = 64
# The most products that are written out.
MOST_PRODUCTS = 65536


def objects(values: Sequence[Any], shape: Sequence[int]) -> np.ndarray:
    """An array of objects."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array.reshape(tuple(shape))


def of_array(value: Any) -> np.ndarray:
    """An array of numbers that are known."""
    value = np.asarray(value)
    return objects(list(value.reshape(-1)), value.shape)


class Numbers:
    """Evaluates programs for a block of rows.

    Attributes:
        block: How many rows that are.
        tiles: Multiplies by larger matrices; `None` to write out all products.
    """

    def __init__(self, block: int, tiles: Tiles | None = None):
        self.block, self.tiles = block, tiles

    def outer(self, array: np.ndarray, dtype: Any) -> Value:
        """The sum over the rows of the block of a matrix of products, as a tile."""
        if self.tiles is None:
            raise NotTiledError
        return self.tiles.outer(_Frame(self.block), array, dtype)

    def run(self, closed: jex.ClosedJaxpr, ins: Sequence[np.ndarray]) -> list[Any]:
        """The outputs of a program, given its inputs."""
        frame = _Frame(self.block, self.tiles)
        jaxpr = closed.jaxpr
        env = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            env[var] = of_array(value)
        read = lambda x: of_array(x.val) if isinstance(x, jex.Literal) else env[x]
        for eqn in jaxpr.eqns:
            given = list(map(read, eqn.invars))
            if eqn.primitive.name in ("jit", "pjit", "closed_call"):
                outs = self.run(_closed(eqn.params["jaxpr"]), given)
            else:
                outs = _evaluate(frame, eqn, given)
            env.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))


class _Frame:
    """One level of a program: what was read from memory is there within it."""

    def __init__(self, block: int, tiles: Tiles | None = None):
        self.block, self.tiles, self._read = block, tiles, dict[int, Any]()

    @property
    def numbers(self) -> Numbers:
        """What evaluates the programs within this one."""
        return Numbers(self.block, self.tiles)

    def value(self, x: Any) -> Any:
        """An entry that is a number now, and not to be read or to be computed."""
        if not isinstance(x, InMemory | ProductSum):
            return x
        if id(x) not in self._read:
            found = x.value(self.value) if isinstance(x, ProductSum) else x.read(x.at)
            self._read[id(x)] = (x, found)
        return self._read[id(x)][1]

    def vector(self, x: Any, dtype: Any) -> Value:
        """An entry as a vector of the block."""
        return jnp.broadcast_to(jnp.asarray(self.value(x), dtype), (self.block,))

    def vectors(self, array: np.ndarray, dtype: Any) -> list[Value]:
        """All entries, and their parts, as vectors."""
        _, part = parts_of(dtype)
        entries = map(self.value, array.reshape(-1))
        return [self.vector(v, part) for x in entries for v in values_of(x, dtype)]


def as_vectors(
    block: int, array: np.ndarray, dtype: Any, differs: bool = True
) -> list[Value]:
    """All numbers of an array, as vectors of the block, or else as scalars."""
    frame = _Frame(block)
    if differs:
        return frame.vectors(array, dtype)
    aval = jax.core.ShapedArray(array.shape, dtype)
    return _leaves(frame, [array], [aval], [False])


def mapped_number(f: Callable[[Value], Value], x: InMemory) -> InMemory:
    """A number in memory after `f`, which is called for each of its parts."""

    def read(at: Any) -> Any:
        value = x.read(at)
        if isinstance(value, Parts):
            return Parts(tuple(map(f, value.values)))
        return f(value)

    return InMemory(read, x.at)


def from_vectors(values: Sequence[Value], shape: Sequence[int], dtype: Any) -> Any:
    """An array, from all of its numbers."""
    count, _ = parts_of(dtype)
    if count > 1:
        n = range(0, len(values), count)
        values = [Parts(tuple(values[i : i + count])) for i in n]
    return objects(values, shape)


def is_large(m: int, n: int, k: int) -> bool:
    """Whether a product of matrices of these sizes is one of tiles."""
    return m * n * k >= _LEAST_OF_TILES


def _map(f: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    flat = [np.broadcast_to(a, shape).reshape(-1) for a in arrays]
    return objects([f(*xs) for xs in zip(*flat, strict=True)], shape)


def alike(dtypes: Sequence[Any], xs: Sequence[Any]) -> list[Value]:
    """Operands of one shape: scalars are as long as the others."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in xs))
    made = [jnp.asarray(x, d) for x, d in zip(xs, dtypes, strict=True)]
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in made]


def _bound(eqn: Any, xs: Sequence[Any]) -> Any:
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
    if (simple := _simplified(name, xs)) is not None:
        return simple
    if name == "convert_element_type":
        if dtypes[0] == to:
            return xs[0]
        return jnp.asarray(xs[0], dtypes[0]).astype(to)
    if name == "select_n" and dtypes[0].kind != "b":
        return _chosen(xs[0], xs[1:], to)
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


def _simplified(name: str, xs: Sequence[Any]) -> Any:
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


def _broadcast(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    for n, i in zip(a.shape, p["broadcast_dimensions"], strict=True):
        sizes[i] = n
    return np.broadcast_to(a.reshape(sizes), p["shape"])


def _sliced(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    steps = p["strides"] or [1] * a.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return a[tuple(slice(*map(int, bound)) for bound in bounds)]


def _padded(p: dict[str, Any], a: np.ndarray, value: np.ndarray) -> np.ndarray:
    config = [tuple(map(int, c)) for c in p["padding_config"]]
    sizes = [
        low + high + n + max(n - 1, 0) * within
        for n, (low, high, within) in zip(a.shape, config, strict=True)
    ]
    # What is cut off by negative padding is put in first.
    grown = [
        size + max(-low, 0) + max(-high, 0)
        for size, (low, high, _) in zip(sizes, config, strict=True)
    ]
    out = np.empty(grown, object)
    out.reshape(-1)[:] = objects([value[()]], ())
    at = [
        slice(max(low, 0), max(low, 0) + n + max(n - 1, 0) * w, w + 1)
        for n, (low, _, w) in zip(a.shape, config, strict=True)
    ]
    out[tuple(at)] = a
    cut = [
        slice(max(-low, 0), max(-low, 0) + size)
        for size, (low, _, _) in zip(sizes, config, strict=True)
    ]
    return out[tuple(cut)]


def _parted(p: dict[str, Any], a: np.ndarray) -> list[np.ndarray]:
    return np.split(a, np.cumsum(p["sizes"])[:-1], p["axis"])


# What only moves entries, in NumPy: nothing is computed.
_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, a: a.reshape(p["new_sizes"]),
    "squeeze": lambda p, a: np.squeeze(a, tuple(p["dimensions"])),
    "transpose": lambda p, a: a.transpose(p["permutation"]),
    "rev": lambda p, a: np.flip(a, p["dimensions"]),
    "slice": _sliced,
    "concatenate": lambda p, *a: np.concatenate(a, p["dimension"]),
    "stack": lambda p, *a: np.stack(a, p["axis"]),
    "unstack": lambda p, a: list(np.moveaxis(a, p["axis"], 0)),
    "split": _parted,
    "pad": _padded,
}


def _moved(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    move, arity = _MOVES[eqn.primitive.name], len(eqn.invars)
    found = move(eqn.params, *ins[:arity])
    found = found if eqn.primitive.multiple_results else [found]
    # The row of an array with one axis is an entry.
    return [a if isinstance(a, np.ndarray) else objects([a], ()) for a in found]


_REDUCTIONS: dict[str, Callable[..., Value]] = {
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "reduce_xor": lax.bitwise_xor,
    "cumsum": lax.add,
    "cumprod": lax.mul,
    "cummax": lax.max,
    "cummin": lax.min,
}


def _pairwise(f: Callable[..., Value], dtype: Any, name: str) -> Callable[..., Any]:
    def run(a: Any, b: Any) -> Any:
        if isinstance(a, Parts) or isinstance(b, Parts):
            of = _COMPLEX["add" if f is lax.add else "mul"]
            return _complex(of, {}, [a, b], [dtype, dtype], parts_of(dtype)[1])
        if is_known(a) and is_known(b):
            fold = {lax.add: np.add, lax.mul: np.multiply}.get(f)
            if fold is not None:
                return np.asarray(fold(a, b), dtype)[()]
        is_sum = name in ("reduce_sum", "cumsum")
        simple = _simplified("add", [a, b]) if is_sum else None
        if simple is not None:
            return simple
        return f(*alike([dtype, dtype], [a, b]))

    return run


def _rows_along(a: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The array as a matrix: the other axes, and these."""
    left = [i for i in range(a.ndim) if i not in axes]
    a = a.transpose([*left, *axes])
    n = math.prod(a.shape[len(left) :])
    return a.reshape(-1, n) if n else a.reshape(math.prod(a.shape[: len(left)]), 0)


def _reduced(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), out = ins, aval_of(eqn.outvars[0])
    f = _pairwise(_REDUCTIONS[eqn.primitive.name], out.dtype, eqn.primitive.name)
    rows = _rows_along(_valued(frame, a), eqn.params["axes"])
    return [objects([functools.reduce(f, list(row)) for row in rows], out.shape)]


def _valued(frame: _Frame, a: np.ndarray) -> np.ndarray:
    return _map(frame.value, a)


def _cumulated(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), axis = ins, eqn.params["axis"]
    f = _pairwise(
        _REDUCTIONS[eqn.primitive.name],
        aval_of(eqn.outvars[0]).dtype,
        "cumsum" if eqn.primitive.name == "cumsum" else "",
    )
    a = np.moveaxis(_valued(frame, a), axis, 0)
    order = range(len(a))[::-1] if eqn.params["reverse"] else range(len(a))
    out, before = np.empty(a.shape, object), None
    for i in order:
        row = a[i : i + 1]
        before = row if before is None else _map(f, before, row)
        out[i : i + 1] = before
    return [np.moveaxis(out, 0, axis)]


def _arg(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), out = ins, aval_of(eqn.outvars[0])
    dtype, to = aval_of(eqn.invars[0]).dtype, eqn.params["index_dtype"]
    is_max = eqn.primitive.name == "argmax"

    def of(row: Sequence[Any]) -> Any:
        best, at = row[0], np.asarray(0, to)[()]
        for i, x in enumerate(row[1:], 1):
            x, now = alike([dtype, dtype], [x, best])
            better = x > now if is_max else x < now
            if jnp.issubdtype(dtype, jnp.floating):
                better = better | ((x != x) & (now == now))
                better = better & (now == now)
            best, at = (
                jnp.where(better, x, now),
                jnp.where(better, np.asarray(i, to)[()], at),
            )
        return at

    rows = _rows_along(_valued(frame, a), eqn.params["axes"])
    return [objects([of(list(row)) for row in rows], out.shape)]


def _dot(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, out = eqn.params, aval_of(eqn.outvars[0])
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    left, right = ins
    free = lambda a, *gone: [i for i in range(a.ndim) if not any(i in g for g in gone)]
    lf, rf = free(left, lb, lc), free(right, rb, rc)
    shape = lambda a, axes: math.prod(a.shape[i] for i in axes)
    batch, k = shape(left, lb), shape(left, lc)
    left = left.transpose([*lb, *lf, *lc]).reshape(batch, shape(left, lf), k)
    right = right.transpose([*rb, *rf, *rc]).reshape(batch, shape(right, rf), k)
    # Narrow floats are added up in float32, as XLA does.
    dtypes = [aval_of(v).dtype for v in eqn.invars]
    wide = out.dtype
    if jnp.issubdtype(wide, jnp.floating) and jnp.finfo(wide).bits < 32:
        wide = np.dtype("float32")
    mul = _pairwise(lax.mul, wide, "")
    add = _pairwise(lax.add, wide, "reduce_sum")

    def cast(x: Any, dtype: Any) -> Any:
        if is_known(x) or dtype == wide:
            return x
        return jnp.asarray(x, dtype).astype(wide)

    def product(u: Any, v: Any) -> Any:
        simple = _simplified("mul", [u, v])
        return mul(u, v) if simple is None else simple

    if batch == 1 and wide == out.dtype:
        if k == 1 and min(left.shape[1], right.shape[1]) > 1:
            made = [
                ProductSum(((u[0], v[0]),), product, add)
                for u in left[0]
                for v in right[0]
            ]
            return [objects(made, out.shape)]
        if frame.tiles is not None and is_large(left.shape[1], right.shape[1], k):
            made = frame.tiles.product(frame, left[0], right[0], wide)
            if made is not None:
                return [objects(made, out.shape)]
    if (count := batch * left.shape[1] * right.shape[1] * k) > MOST_PRODUCTS:
        why = f"multiplies {count} numbers of a row, too many for a kernel"
        refuse(eqn, "Use another schedule, such as `el.Chunked(32)`.", why)
    left, right = _valued(frame, left), _valued(frame, right)

    # Zeros that are known, as of padded cotangents, take no part.
    def total(us: Any, vs: Any) -> Any:
        pairs = [
            (cast(u, dtypes[0]), cast(v, dtypes[1]))
            for u, v in zip(us, vs, strict=True)
        ]
        found = (
            functools.reduce(add, [product(u, v) for u, v in pairs])
            if pairs
            else np.zeros((), wide)[()]
        )
        return (
            found if wide == out.dtype or is_known(found) else found.astype(out.dtype)
        )

    values = [total(u, v) for b in range(batch) for u in left[b] for v in right[b]]
    return [objects(values, out.shape)]


def _chosen(at: Any, choices: Sequence[Any], dtype: Any) -> Any:
    """The choice of a number, which is in range."""
    if is_known(at):
        return choices[int(at)]
    count, part = parts_of(dtype)
    if count > 1:
        columns = zip(*(values_of(c, dtype) for c in choices), strict=True)
        return Parts(tuple(_chosen(at, list(c), part) for c in columns))
    found = choices[0]
    for i, choice in enumerate(choices[1:], 1):
        if choice is not found:
            found = _where(at == i, choice, found, dtype)
    return found


def _clamped(at: Any, dtype: Any, most: int) -> Any:
    """The start of a slice, moved into range."""
    if is_known(at):
        return np.int32(min(max(int(at), 0), most))
    at = jnp.asarray(at, dtype).astype(jnp.int32)
    return jnp.minimum(jnp.maximum(at, 0), most)


def _taken(frame: _Frame, a: np.ndarray, starts: Any, sizes: Any, dtype: Any) -> Any:
    """The part of an array from these starts on, which are in range."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if a.shape[axis] == size:
            continue
        a = np.moveaxis(a, axis, 0)
        out = np.empty((size, *a.shape[1:]), object)
        table = _strided(a) if not is_known(start) else None
        for i in range(size):
            rows = a[i : i + a.shape[0] - size + 1].reshape(a.shape[0] - size + 1, -1)
            if table is not None:
                # Rows of a table in memory are not all read.
                read, step = table
                got = [read(x.at + start * step) for x in rows[0]]
            else:
                rows = rows if is_known(start) else _valued(frame, rows)
                got = [_chosen(start, list(column), dtype) for column in rows.T]
            out[i] = objects(got, a.shape[1:]) if a.ndim > 1 else got[0]
        a = np.moveaxis(out, 0, axis)
    return a


def _strided(a: np.ndarray) -> tuple[Callable[[Any], Value], int] | None:
    """How to read the rows of a table that lie in memory at equal distances."""
    flat = a.reshape(len(a), -1)
    if not all(isinstance(x, InMemory) for x in flat.reshape(-1)) or len(a) < 2:
        return None
    read = flat[0, 0].read
    at = np.array([[x.at if x.read is read else -1 for x in row] for row in flat])
    steps = np.diff(at, axis=0)
    if (at < 0).any() or (steps != steps.flat[0]).any():
        return None
    return read, int(steps.flat[0])


def _dynamic_slice(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[Any]:
    a, *at = ins
    sizes, dtype = eqn.params["slice_sizes"], aval_of(eqn.invars[0]).dtype
    starts = [
        _clamped(frame.value(x[()]), aval_of(v).dtype, n - size)
        for x, v, n, size in zip(at, eqn.invars[1:], a.shape, sizes, strict=True)
    ]
    return [_taken(frame, a, starts, sizes, dtype)]


def _put(
    frame: _Frame, a: np.ndarray, new: np.ndarray, starts: Any, dtype: Any, f: Any
) -> Any:
    """An array with a part from these starts on replaced by `f(old, new)`."""
    if all(map(is_known, starts)):
        out = a.copy()
        part = tuple(
            slice(int(s), int(s) + n) for s, n in zip(starts, new.shape, strict=True)
        )
        old = out[part]
        out[part] = _map(f, old, new) if a.ndim else _map(f, old, new)[()]
        return out
    out = np.empty(a.shape, object)
    for index in np.ndindex(*a.shape):
        old = frame.value(a[index])
        now = old
        # Each entry of the part may come here, for one value of the start.
        for k in np.ndindex(*new.shape):
            hits = [(s, i - j) for s, i, j in zip(starts, index, k, strict=True)]
            if any(
                w < 0 or w > n - m
                for (_, w), n, m in zip(hits, a.shape, new.shape, strict=True)
            ):
                continue
            if any(is_known(s) and int(s) != w for s, w in hits):
                continue
            hit = functools.reduce(
                lambda p, q: p & q, [s == w for s, w in hits if not is_known(s)]
            )
            now = _where(hit, f(old, frame.value(new[k])), now, dtype)
        out[index] = now
    return out


def _where(hit: Any, a: Any, b: Any, dtype: Any) -> Any:
    count, part = parts_of(dtype)
    if count > 1:
        pairs = zip(values_of(a, dtype), values_of(b, dtype), strict=True)
        return Parts(tuple(_where(hit, x, y, part) for x, y in pairs))
    return jnp.where(*alike([np.bool_, dtype, dtype], [hit, a, b]))


def _update_slice(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[Any]:
    a, new, *at = ins
    dtype = aval_of(eqn.invars[0]).dtype
    starts = [
        _clamped(frame.value(x[()]), aval_of(v).dtype, n - m)
        for x, v, n, m in zip(at, eqn.invars[2:], a.shape, new.shape, strict=True)
    ]
    return [_put(frame, a, new, starts, dtype, lambda old, new: new)]


def _gather(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a, at), p, out = ins, eqn.params, aval_of(eqn.outvars[0])
    windows, sizes, dtype = Windows.of(p), p["slice_sizes"], out.dtype
    result, kept = np.empty(out.shape, object), windows.kept(a.ndim)
    is_batch = windows.of_indices(len(out.shape))
    fills = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    for index in np.ndindex(*at.shape[:-1]):
        starts, inside = _starts(frame, eqn, at[index], a.shape, sizes, index)
        part = _taken(frame, a, starts, sizes, dtype)
        part = part.reshape([sizes[i] for i in kept])
        if fills and inside is not None:
            fill = p["fill_value"]
            fill = _fill_of(dtype) if fill is None else fill
            fill = np.asarray(fill, dtype)[()]
            keep = lambda x, i=inside, f=fill: _where(i, frame.value(x), f, dtype)
            part = _map(keep, part)
        where: list[Any] = [slice(None)] * len(out.shape)
        for j, i in zip(is_batch, index, strict=True):
            where[j] = i
        if part.ndim:
            result[tuple(where)] = part
        else:
            result[tuple(where)] = part[()]
    return [result]


def _fill_of(dtype: Any) -> Any:
    """What JAX takes for an entry that is out of range."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if dtype.kind == "b":
        return True
    info = jnp.iinfo(dtype)
    return info.min if dtype.kind == "i" else info.max


def _starts(
    frame: _Frame,
    eqn: Any,
    at: np.ndarray,
    shape: Any,
    sizes: Any,
    index: Any,
) -> tuple[list[Any], Any]:
    """Where a slice starts, and whether it is in range, if that is not known."""
    windows = Windows.of(eqn.params)
    starts: list[Any] = [np.int32(0)] * len(shape)
    inside, dtype = None, aval_of(eqn.invars[1]).dtype
    for n, axis in enumerate(windows.starts):
        start, most = frame.value(at[n]), shape[axis] - sizes[axis]
        starts[axis] = _clamped(start, dtype, most)
        ok = (start >= 0) & (start <= most)
        if not (is_known(start) and bool(ok)):
            inside = ok if inside is None else inside & ok
    for axis, k in windows.batch:
        starts[axis] = np.int32(index[k])
    return starts, inside


def _scatter(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a, at, new), p, dtype = ins, eqn.params, aval_of(eqn.outvars[0]).dtype
    windows, name = Windows.of(p), eqn.primitive.name
    batch, sizes = windows.of_indices(new.ndim), [1] * a.ndim
    for i, j in zip(windows.kept(a.ndim), windows.own, strict=True):
        sizes[i] = new.shape[j]
    f: Callable[..., Any] = lambda old, new: new
    if "add" in name:
        f = _pairwise(lax.add, dtype, "reduce_sum")
    if "mul" in name:
        f = _pairwise(lax.mul, dtype, "")
    drops = p["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    for index in np.ndindex(*at.shape[:-1]):
        starts, inside = _starts(frame, eqn, at[index], a.shape, sizes, index)
        where: list[Any] = [slice(None)] * new.ndim
        for j, i in zip(batch, index, strict=True):
            where[j] = i
        part = new[tuple(where)]
        part = part if isinstance(part, np.ndarray) else objects([part], ())
        put = _put(
            frame,
            _valued(frame, a),
            _valued(frame, part.reshape(sizes)),
            starts,
            dtype,
            f,
        )
        if drops and inside is not None:
            keep = lambda x, y, i=inside: x if x is y else _where(i, x, y, dtype)
            put = _map(keep, put, a)
        a = put
    return [a]


def _sorted(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, dtypes = eqn.params, [aval_of(v).dtype for v in eqn.invars]
    axis, keys = p["dimension"], p["num_keys"]
    arrays = [np.moveaxis(_valued(frame, a), axis, -1).copy() for a in ins]
    for index in np.ndindex(*arrays[0].shape[:-1]):
        columns = [list(a[index]) for a in arrays]
        _sort(columns, dtypes, keys)
        for a, column in zip(arrays, columns, strict=True):
            a[index] = objects(column, [len(column)])
    return [np.moveaxis(a, -1, axis) for a in arrays]


def _sort(columns: list[list[Any]], dtypes: Sequence[Any], keys: int) -> None:
    """Sorts lists by the first few of them: neighbours change places, in rounds."""
    n = len(columns[0])
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            pairs = [
                alike([d, d], c[i : i + 2])
                for c, d in zip(columns, dtypes, strict=True)
            ]
            greater: Value = None
            equal: Value = None
            for a, b in pairs[:keys]:
                g = formulas.is_nan_greater(a, b)
                greater = g if greater is None else greater | (equal & g)
                e = ~g & ~formulas.is_nan_greater(b, a)
                equal = e if equal is None else equal & e
            for c, (a, b) in zip(columns, pairs, strict=True):
                c[i], c[i + 1] = jnp.where(greater, b, a), jnp.where(greater, a, b)


def _top_k(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    (a,), k = ins, eqn.params["k"]
    dtype, to = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[1]).dtype
    values = np.empty((*a.shape[:-1], k), object)
    places = np.empty((*a.shape[:-1], k), object)
    for index in np.ndindex(*a.shape[:-1]):
        row = [frame.value(x) for x in a[index]]
        column = [jnp.negative(jnp.asarray(x, dtype)) for x in row]
        at = [np.asarray(i, to)[()] for i in range(len(row))]
        columns = [column, at]
        _sort(columns, [dtype, to], 1)
        values[index] = objects([-x for x in columns[0][:k]], [k])
        places[index] = objects(columns[1][:k], [k])
    return [values, places]


def _iota(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p = eqn.params
    n, axis = p["shape"][p["dimension"]], p["dimension"]
    row = (
        np.arange(n)
        .astype(p["dtype"])
        .reshape([-1 if i == axis else 1 for i in range(len(p["shape"]))])
    )
    return [of_array(np.broadcast_to(row, p["shape"]))]


# Control flow.


def _leaves(
    frame: _Frame, arrays: Sequence[np.ndarray], avals: Any, rows: Any
) -> list[Value]:
    """The numbers of a carry: vectors where rows differ, and else scalars."""
    values = list[Value]()
    for array, aval, differs in zip(arrays, avals, rows, strict=True):
        if differs:
            values += frame.vectors(array, aval.dtype)
            continue
        _, part = parts_of(aval.dtype)
        for x in map(frame.value, array.reshape(-1)):
            values += [jnp.asarray(v, part) for v in values_of(x, aval.dtype)]
    return values


def _arrays(values: Sequence[Value], avals: Any) -> list[np.ndarray]:
    arrays, at = list[np.ndarray](), 0
    for aval in avals:
        n = math.prod(aval.shape) * parts_of(aval.dtype)[0]
        arrays.append(from_vectors(values[at : at + n], aval.shape, aval.dtype))
        at += n
    return arrays


def _differ(frame: _Frame, arrays: Sequence[np.ndarray]) -> list[bool]:
    """For each array, whether rows of the block have other numbers in it."""

    def differs(x: Any) -> bool:
        if isinstance(x, Parts):
            return any(map(differs, x.values))
        return np.ndim(frame.value(x)) > 0

    return [any(map(differs, a.reshape(-1))) for a in arrays]


def _closed(program: Any) -> jex.ClosedJaxpr:
    if isinstance(program, jex.ClosedJaxpr):
        return program
    return jex.ClosedJaxpr(program, ())


def _settled_marks(
    body: jex.ClosedJaxpr, consts: list[bool], carry: list[bool], more: list[bool]
) -> list[bool]:
    """Which leaves of a carry differ between rows, after any number of steps."""
    while True:
        outs = reached(body, (*consts, *carry, *more))[: len(carry)]
        grown = [a or b for a, b in zip(carry, outs, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _while(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, numbers = eqn.params, frame.numbers
    n, m = p["cond_nconsts"], p["body_nconsts"]
    cond, body = _closed(p["cond_jaxpr"]), _closed(p["body_jaxpr"])
    of_cond, of_body, init = ins[:n], ins[n : n + m], ins[n + m :]
    avals = [aval_of(v) for v in eqn.invars[n + m :]]
    differ = _settled_marks(body, _differ(frame, of_body), _differ(frame, init), [])
    own = reached(cond, (*_differ(frame, of_cond), *differ))[0]
    # If rows stop by themselves, what they carry differs, too.
    differ = [True] * len(differ) if own else differ

    def pred(values: Sequence[Value]) -> Value:
        (found,) = numbers.run(cond, [*of_cond, *_arrays(values, avals)])
        return _Frame(frame.block).value(found[()])

    def going(values: Sequence[Value]) -> Value:
        found = pred(values)
        if np.ndim(found):
            return jnp.max(found.astype(jnp.int32)) > 0
        return jnp.asarray(found, bool)

    def move(values: Sequence[Value]) -> list[Value]:
        outs = numbers.run(body, [*of_body, *_arrays(values, avals)])
        new = _leaves(_Frame(frame.block), outs, avals, differ)
        if not own:
            return new
        goes_on = jnp.broadcast_to(pred(values), (frame.block,))
        return [jnp.where(goes_on, a, b) for a, b in zip(new, values, strict=True)]

    init = _leaves(frame, init, avals, differ)
    return _arrays(lax.while_loop(going, move, init), avals)


def _cond(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    index, *given = ins
    at, numbers = frame.value(index[()]), frame.numbers
    branches = [_closed(b) for b in eqn.params["branches"]]
    avals = [aval_of(v) for v in eqn.outvars]
    if is_known(at):
        return numbers.run(branches[min(max(int(at), 0), len(branches) - 1)], given)
    every = [True] * len(avals)

    def run(branch: jex.ClosedJaxpr) -> list[Value]:
        return _leaves(_Frame(frame.block), numbers.run(branch, given), avals, every)

    at = jnp.minimum(
        jnp.maximum(jnp.asarray(at).astype(jnp.int32), 0), len(branches) - 1
    )
    if np.ndim(at):
        made = [run(branch) for branch in branches]
        dtypes = [v.dtype for v in made[0]]
        columns = zip(*made, strict=True)
        found = [_chosen(at, list(c), d) for c, d in zip(columns, dtypes, strict=True)]
    else:
        found = lax.switch(at, [functools.partial(run, b) for b in branches])
    return _arrays(found, avals)


def _scan(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, numbers = eqn.params, frame.numbers
    (n, m), body, length = scan_counts(eqn), _closed(p["jaxpr"]), p["length"]
    consts, carry, xs = ins[:n], ins[n : n + m], ins[n + m :]
    ys = [aval_of(v) for v in eqn.outvars[m:]]
    avals = [aval_of(v) for v in eqn.invars[n : n + m]]
    if not xs and not ys and length > 4:
        differ = _settled_marks(body, _differ(frame, consts), _differ(frame, carry), [])

        def move(_: Value, values: Sequence[Value]) -> list[Value]:
            outs = numbers.run(body, [*consts, *_arrays(values, avals)])
            return _leaves(_Frame(frame.block), outs, avals, differ)

        init = _leaves(frame, carry, avals, differ)
        return _arrays(lax.fori_loop(0, length, move, init), avals)
    if length > _UNROLLED:
        refuse(
            eqn,
            "Use another schedule for the loop around it, or fewer steps.",
            f"has {length} steps, each with an entry of an array, and a kernel writes "
            f"them out: at most {_UNROLLED}",
        )
    rows: list[list[Any]] = [[None] * length for _ in ys]
    for i in range(length)[:: -1 if p["reverse"] else 1]:
        x = [_entry(a, i) for a in xs]
        outs = numbers.run(body, [*consts, *carry, *x])
        carry = outs[:m]
        for row, y in zip(rows, outs[m:], strict=True):
            row[i] = y
    stacked = [
        np.stack(row) if row else np.empty(aval.shape, object)
        for row, aval in zip(rows, ys, strict=True)
    ]
    return [*carry, *stacked]


def _entry(a: np.ndarray, i: int) -> np.ndarray:
    x = a[i]
    return x if isinstance(x, np.ndarray) else objects([x], ())


# Keys, and complex numbers.


def _key_bits(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """What is computed from keys, by the functions of their implementation."""
    f = _KEYS[eqn.primitive.name]
    avals = [aval_of(v) for v in eqn.invars]
    data = [_key_data(frame, a, v) for a, v in zip(ins, avals, strict=True)]
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
        own = [_entry_at(a, index) for a in data]
        types = [
            jax.ShapeDtypeStruct(a.shape, np.uint32 if k else v.dtype)
            for a, k, v in zip(own, is_key, avals, strict=True)
        ]
        program = jax.make_jaxpr(functools.partial(f, eqn.params))(*types)
        (made,) = frame.numbers.run(program, own)
        flat = list(made.reshape(-1))
        if to_key:
            flat = [Parts(tuple(flat[i : i + 2])) for i in range(0, len(flat), 2)]
        values += flat
    return [objects(values, out.shape)]


def _entry_at(a: np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    x = a[index] if a.ndim else a
    return x if isinstance(x, np.ndarray) else objects([x], ())


def _key_data(frame: _Frame, a: np.ndarray, aval: Any) -> np.ndarray:
    if parts_of(aval.dtype)[0] == 1:
        return a
    flat = [v for x in a.reshape(-1) for v in frame.value(x).values]
    return objects(flat, (*a.shape, 2))


def _impl() -> Any:
    from jax.extend import random

    return random.threefry_prng_impl


_KEYS: dict[str, Callable[..., Value]] = {
    "random_bits": lambda p, k: _impl().random_bits(k, p["bit_width"], p["shape"]),
    "random_split": lambda p, k: _impl().split(k, p["shape"]),
    "random_fold_in": lambda p, k, n: _impl().fold_in(k, n.astype(jnp.uint32)),
    "random_seed": lambda p, n: _impl().seed(n),
}


def _threefry(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    u32 = [np.dtype("uint32")] * 4
    of = lambda *xs: formulas.threefry(*alike(u32, xs))
    pairs = _map(of, *(_valued(frame, a) for a in ins))
    return [_map(lambda pair, i=i: pair[i], pairs) for i in range(2)]


def _iota_pair(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    shape = eqn.params["shape"]
    low = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return [of_array(np.zeros_like(low)), of_array(low)]


def _unwrap(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    return [_key_data(frame, ins[0], aval_of(eqn.invars[0]))]


def _wrap(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    a, out = _valued(frame, ins[0]), aval_of(eqn.outvars[0])
    pairs = a.reshape(-1, 2)
    return [objects([Parts(tuple(pair)) for pair in pairs], out.shape)]


def _of_parts(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    """An elementwise operation with complex numbers or keys in it."""
    name = eqn.primitive.name
    avals = [aval_of(v) for v in eqn.invars]
    out = aval_of(eqn.outvars[0])
    is_key = any(jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in avals)
    if name == "select_n":
        _, part = parts_of(out.dtype)

        def select(which: Any, *cases: Any) -> Any:
            return _chosen(
                jnp.asarray(which).astype(jnp.int32) if not is_known(which) else which,
                list(cases),
                out.dtype,
            )

        return [_map(select, *(_valued(frame, a) for a in ins))]
    if name in ("copy", "stop_gradient"):
        return [ins[0]]
    f = None if is_key else _COMPLEX.get(name)
    if f is None:
        refuse(
            eqn,
            "Use another schedule, such as `el.Chunked(32)`.",
            "is not there for these numbers in a kernel",
        )
    _, part = parts_of(avals[0].dtype if out.dtype == bool else out.dtype)

    dtypes = [aval.dtype for aval in avals]
    run = lambda *xs: _complex(f, eqn.params, xs, dtypes, part)
    found = _map(run, *(_valued(frame, a) for a in ins))
    if name == "convert_element_type" and parts_of(out.dtype)[0] == 1:
        found = _map(lambda x: x.values[0], found)
    return [found]


def _complex(
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


_COMPLEX: dict[str, Callable[..., Any]] = {
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

_RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    **dict.fromkeys(_MOVES, _moved),
    **dict.fromkeys((n for n in _REDUCTIONS if n.startswith("reduce")), _reduced),
    **dict.fromkeys((n for n in _REDUCTIONS if n.startswith("cum")), _cumulated),
    "argmax": _arg,
    "argmin": _arg,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "gather": _gather,
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"),
        _scatter,
    ),
    "sort": _sorted,
    "top_k": _top_k,
    "iota": _iota,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
    **dict.fromkeys(_KEYS, _key_bits),
    "threefry2x32": _threefry,
    "iota_2x32_shape": _iota_pair,
    "random_unwrap": _unwrap,
    "random_wrap": _wrap,
}


def _has_products(array: np.ndarray) -> bool:
    return array.size > 0 and all(
        isinstance(x, ProductSum) or (is_known(x) and x == 0) for x in array.reshape(-1)
    )


def _added_products(x: Any, y: Any) -> Any:
    if isinstance(x, ProductSum) and isinstance(y, ProductSum):
        return ProductSum(x.pairs + y.pairs, x.multiply, x.add)
    return _simplified("add", [x, y])


def _evaluate(frame: _Frame, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    name = eqn.primitive.name
    if name in ("add", "add_any") and all(map(_has_products, ins)):
        sums = _map(_added_products, *ins)
        if all(x is not None for x in sums.reshape(-1)):
            return [sums]
    if (rule := _RULES.get(name)) is not None:
        return rule(frame, eqn, ins)
    if name not in ELEMENTWISE:
        refuse(eqn)
    avals = [*map(aval_of, eqn.invars), aval_of(eqn.outvars[0])]
    if any(parts_of(aval.dtype)[0] > 1 for aval in avals):
        return _of_parts(frame, eqn, ins)
    of = lambda *xs: _bound(eqn, [frame.value(x) for x in xs])
    return [_map(of, *ins)]
