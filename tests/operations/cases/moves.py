"""What moves numbers: shapes, axes, slices, gathers and scatters."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..case import Case
from ..values import ALL, INTEGERS, KINDS, indices, keys, mixed

_FEW = "float32", "int8"


def _all(
    name: str,
    label: str,
    f: Any,
    *shapes: Sequence[int],
    dtypes: Any = ALL,
    **more: Any,
) -> Iterator[Case]:
    """In all types; of empty and of single axes in one of them."""
    for dtype in dtypes:
        yield Case(name, label, f, [mixed(dtype, *s) for s in shapes], **more)


def cases() -> Iterator[Case]:
    yield from _shapes()
    yield from _joined()
    yield from _cut()
    yield from _gathers()
    yield from _scatters()


def _shapes() -> Iterator[Case]:
    part = functools.partial
    for dims, shape, old in (
        ((0,), (3,), (3,)),
        ((1,), (2, 3), (3,)),
        ((1,), (2, 3), (1,)),
        ((0, 2), (3, 2, 4), (3, 4)),
        ((0, 1), (3, 4), (1, 4)),
        ((0, 1), (3, 4), (3, 1)),
        ((0, 1), (1, 0), (1, 0)),
        ((), (2,), ()),
    ):
        f = part(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=dims)
        yield from _all("broadcast_in_dim", f"{shape} {dims}", f, old, dtypes=KINDS)
    yield from _all("broadcast_in_dim", "", f, (), dtypes=ALL)
    for new, old, dims in (
        ((6,), (2, 3), None),
        ((3, 2), (2, 3), None),
        ((3, 2), (2, 3), (1, 0)),
        ((6,), (2, 3), (1, 0)),
        ((12,), (2, 3, 2), (2, 0, 1)),
        ((4, 3), (2, 3, 2), (1, 0, 2)),
        ((2, 3, 2), (2, 3, 2), (2, 1, 0)),
        ((1, 6, 1), (2, 3), None),
        ((2, 2, 3), (4, 3), None),
        ((2, 0), (0, 3), None),
        ((0, 6), (0, 2, 3), None),
        ((), (1, 1), None),
        ((2, 6), (4, 3), (0, 1)),
        ((6, 6), (6, 6), (1, 0)),
        ((36,), (6, 6), (1, 0)),
    ):
        f = part(lax.reshape, new_sizes=new, dimensions=dims)
        yield from _all("reshape", f"{new} {dims}", f, old, dtypes=_FEW)
    yield from _all("reshape", "", part(lax.reshape, new_sizes=(3, 2)), (2, 3))
    ravel = part(jnp.ravel, order="F")
    yield from _all("reshape", "order F", ravel, (2, 3), dtypes=_FEW)
    for perm in ((0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)):
        f = part(lax.transpose, permutation=perm)
        yield from _all("transpose", f"{perm}", f, (2, 3, 2), dtypes=_FEW)
    yield from _all("transpose", "", part(lax.transpose, permutation=(1, 0)), (2, 3))
    for dims in ((0,), (0, 2), (2,), (-1,)):
        f = part(lax.squeeze, dimensions=dims)
        yield from _all("squeeze", f"{dims}", f, (1, 3, 1), dtypes=_FEW)
    yield from _all("squeeze", "", part(lax.squeeze, dimensions=(0,)), (1, 3))
    for dims in ((0,), (1,), (0, 1), ()):
        f = part(lax.rev, dimensions=dims)
        yield from _all("rev", f"{dims}", f, (2, 3), dtypes=_FEW)
    yield from _all("rev", "", part(lax.rev, dimensions=(0,)), (3,))
    for dtype, (shape, axis) in itertools.product(
        (*INTEGERS, "float32", "bfloat16", "complex64"),
        (((3,), 0), ((2, 3), 1), ((2, 3), 0)),
    ):
        own = lambda x, d=dtype, s=shape, a=axis: lax.broadcasted_iota(d, s, a) + x
        yield Case("iota", f"{shape} {axis}", own, [mixed(dtype)])
    own = lambda x: lax.iota("int8", 200).astype("int32") + x
    yield Case("iota", "more than int8 holds", own, [mixed("int32")])
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        f = lambda k: lax.rev(lax.reshape(k, (2, 2)), (0,))
        yield Case("rev", "keys", f, [keys(impl, 4)])


def _joined() -> Iterator[Case]:
    part = functools.partial
    for axis, shapes in (
        (0, [(2, 3), (1, 3)]),
        (1, [(2, 3), (2, 2)]),
        (0, [(2, 3), (0, 3), (2, 3)]),
        (0, [(2, 3)]),
        (1, [(3, 1), (3, 1), (3, 1)]),
    ):
        f = lambda *xs, a=axis: lax.concatenate(xs, a)
        yield from _all("concatenate", f"{axis}", f, *shapes, dtypes=_FEW)
    f = lambda *xs: lax.concatenate(xs, 0)
    yield from _all("concatenate", "", f, (2,), (3,))
    for config, shape in (
        (((1, 2, 0), (0, 0, 0)), (2, 3)),
        (((0, 0, 1), (1, 0, 2)), (2, 3)),
        (((-1, 1, 0), (0, -2, 0)), (2, 3)),
        (((-1, 2, 1), (2, -1, 1)), (2, 3)),
        (((-2, 3, 2), (0, 0, 0)), (2, 3)),
        (((1, 1, 0), (0, 0, 3)), (0, 1)),
        (((0, 0, 0), (0, 0, 0)), (2, 3)),
        (((-1, -1, 0), (0, 0, 0)), (2, 3)),
        (((1, -3, 2), (-4, 5, 2)), (2, 3)),
    ):
        f = lambda x, v, c=config: lax.pad(x, v, c)
        yield from _all("pad", f"{config}", f, shape, (), dtypes=_FEW)
    yield from _all("pad", "", lambda x, v: lax.pad(x, v, [(1, -1, 1)]), (3,), ())
    for axis, sizes in ((0, (1, 3)), (1, (2, 1)), (0, (4,)), (0, (0, 4))):
        f = part(lax.split, sizes=sizes, axis=axis)
        yield from _all("split", f"{sizes} {axis}", f, (4, 3), dtypes=_FEW)
    yield from _all("split", "", part(lax.split, sizes=(1, 2)), (3,))
    for axis in (0, 1, 2):
        f = lambda *xs, a=axis: jnp.stack(xs, a)
        if hasattr(lax, "stack_p"):
            f = lambda *xs, a=axis: lax.stack_p.bind(*xs, axis=a)
        yield from _all("stack", f"{axis}", f, (2, 3), (2, 3), dtypes=_FEW)
    f = lambda *xs: lax.stack_p.bind(*xs, axis=0)
    yield from _all("stack", "", f, (3,), (3,))
    for axis in (0, 1):
        f = lambda x, a=axis: lax.unstack_p.bind(x, axis=a)
        yield from _all("unstack", f"{axis}", f, (2, 3), dtypes=_FEW)
    yield from _all("unstack", "", lambda x: lax.unstack_p.bind(x, axis=0), (2, 3))
    for reps in ((2, 1), (1, 3), (2, 2), (1, 1), (0, 2)):
        f = part(lax.tile, reps=reps)
        yield from _all("tile", f"{reps}", f, (2, 3), dtypes=_FEW)
    yield from _all("tile", "", part(lax.tile, reps=(2,)), (3,))


def _cut() -> Iterator[Case]:
    part = functools.partial
    for lo, hi, strides in (
        ((0, 0), (2, 3), None),
        ((1, 0), (3, 3), None),
        ((0, 1), (3, 4), (2, 1)),
        ((0, 0), (3, 4), (1, 3)),
        ((1, 1), (3, 4), (2, 2)),
        ((1, 1), (1, 4), None),
        ((0, 0), (3, 4), (1, 1)),
        ((0, 0), (3, 1), (1, 4)),
    ):
        f = part(lax.slice, start_indices=lo, limit_indices=hi, strides=strides)
        yield from _all("slice", f"{lo} {hi} {strides}", f, (3, 4), dtypes=_FEW)
    f = lambda x: lax.slice(x, (1,), (3,))
    yield from _all("slice", "", f, (4,))
    for dtype in INTEGERS:
        at = indices(dtype, 2, limit=3)
        for sizes in ((1, 2), (3, 1), (2, 4), (0, 1)):
            f = lambda x, i, s=sizes: lax.dynamic_slice(x, (i[0], i[1]), s)
            label = f"{sizes} at {dtype}"
            yield Case("dynamic_slice", label, f, [mixed("float32", 3, 4), at])
        f = lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0], i[1]))
        args = [mixed("float32", 3, 4), mixed("float32", 1, 2), at]
        yield Case("dynamic_update_slice", f"at {dtype}", f, args)
    at = indices("int32", 1, limit=3)
    for dtype in ALL:
        f = lambda x, i: lax.dynamic_slice(x, (i[0],), (2,))
        yield Case("dynamic_slice", "", f, [mixed(dtype, 4), at])
        f = lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0],))
        yield Case(
            "dynamic_update_slice", "", f, [mixed(dtype, 4), mixed(dtype, 2), at]
        )
    for allow in (True, False):
        f = lambda x, i, a=allow: (
            lax.dynamic_slice_in_dim(x, i[0], 2, 0)
            if a
            else (lax.dynamic_slice(x, (i[0],), (2,), allow_negative_indices=a))
        )
        label = f"allow_negative_indices={allow}"
        yield Case("dynamic_slice", label, f, [mixed("float32", 4), at])
    f = lambda x, u, i: lax.dynamic_update_slice(x, u, (i[0],))
    args = [mixed("float32", 4), mixed("float32", 0), at]
    yield Case("dynamic_update_slice", "of nothing", f, args)
    f = lambda x, i: lax.dynamic_index_in_dim(x, i[0], 0, False)
    yield Case("dynamic_slice", "keys", f, [keys("threefry2x32", 4), at])


_MODES = tuple(lax.GatherScatterMode)


def _numbers(**kwargs: Any) -> lax.GatherDimensionNumbers:
    return lax.GatherDimensionNumbers(**kwargs)


# The operand, the indices, the sizes of parts, and how they go together: what is read,
# or written.
_PARTS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "rows": (
        (4, 3),
        (2, 1),
        (1, 3),
        dict(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)),
    ),
    "columns": (
        (3, 4),
        (2, 1),
        (3, 1),
        dict(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,)),
    ),
    "entries": (
        (4, 4),
        (3, 2),
        (1, 1),
        dict(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1)),
    ),
    "turned": (
        (4, 4),
        (3, 2),
        (1, 1),
        dict(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0)),
    ),
    "windows": (
        (4, 4),
        (2, 2),
        (2, 3),
        dict(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1)),
    ),
    "before": (
        (4, 3),
        (2, 1),
        (2, 3),
        dict(offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(0,)),
    ),
    "one": (
        (4, 3),
        (1,),
        (1, 3),
        dict(offset_dims=(0,), collapsed_slice_dims=(0,), start_index_map=(0,)),
    ),
    "along": (
        (2, 4),
        (2, 3, 1),
        (1, 1),
        dict(
            offset_dims=(),
            collapsed_slice_dims=(1,),
            start_index_map=(1,),
            operand_batching_dims=(0,),
            start_indices_batching_dims=(0,),
        ),
    ),
    "across": (
        (4, 2),
        (3, 2, 1),
        (1, 1),
        dict(
            offset_dims=(),
            collapsed_slice_dims=(0,),
            start_index_map=(0,),
            operand_batching_dims=(1,),
            start_indices_batching_dims=(1,),
        ),
    ),
    "none": (
        (4, 3),
        (0, 1),
        (1, 3),
        dict(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,)),
    ),
}


def _gather(how: str, mode: Any, fill: Any = None, flags: Any = (False, False)) -> Any:
    _, _, sizes, numbers = _PARTS[how]

    def f(x: Any, at: Any) -> Any:
        return lax.gather(
            x,
            at,
            _numbers(**numbers),
            sizes,
            mode=mode,
            fill_value=fill,
            unique_indices=flags[0],
            indices_are_sorted=flags[1],
        )

    return f


def _read(how: str, mode: Any) -> tuple[int, ...]:
    """The shape of what is read, or written."""
    shape, at, *_ = _PARTS[how]
    types = (jax.ShapeDtypeStruct(s, d) for s, d in ((shape, "f4"), (at, "i4")))
    return jax.eval_shape(_gather(how, mode), *types).shape


def _gathers() -> Iterator[Case]:
    for how, mode in itertools.product(_PARTS, _MODES):
        shape, at, sizes, _ = _PARTS[how]
        wild = mode != lax.GatherScatterMode.PROMISE_IN_BOUNDS
        for dtype in ("int32", "uint8", "int8"):
            room = min(n - s + 1 for n, s in zip(shape, sizes, strict=True))
            limit = max(1, room) if not wild else 4
            i = indices(dtype, *at, limit=limit, wild=wild)
            label = f"{how} {mode.name} at {dtype}"
            yield Case(
                "gather", label, _gather(how, mode), [mixed("float32", *shape), i]
            )
    fills = lax.GatherScatterMode.FILL_OR_DROP
    for dtype in ALL:
        i = indices("int32", 2, 1, limit=4)
        x = mixed(dtype, 4, 3)
        yield Case("gather", "fill", _gather("rows", fills), [x, i])
        fill = {"bool": True}.get(dtype, 7)
        yield Case("gather", "fill_value=7", _gather("rows", fills, fill), [x, i])
    for dtype in INTEGERS:
        for mode in (fills, lax.GatherScatterMode.CLIP):
            i = indices(dtype, 2, 1, limit=4)
            label = f"rows {mode.name} at {dtype}"
            x = mixed("float32", 4, 3)
            yield Case("gather", label, _gather("rows", mode), [x, i])
    flags = _gather("rows", lax.GatherScatterMode.CLIP, None, (True, True))
    i = np.sort(indices("int32", 1, 1, limit=4, wild=False), 1)
    yield Case("gather", "unique, sorted", flags, [mixed("float32", 4, 3), i])
    f = lambda x, i: jnp.take(x, i, axis=0, mode="fill", fill_value=-1)
    yield Case("gather", "take", f, [mixed("int32", 4), indices("int32", 3, limit=4)])
    f = lambda k, i: k[i[0]]
    yield Case(
        "gather", "keys", f, [keys("rbg", 4), indices("int32", 1, limit=4, wild=False)]
    )
    f = lambda k, i: jnp.take(k, i, mode="clip")
    yield Case(
        "gather", "keys", f, [keys("threefry2x32", 4), indices("int32", 2, limit=4)]
    )


_WRITES = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


def _scatter(
    name: str, how: str, mode: Any, unique: bool = False, order: bool = False
) -> Any:
    given = _numbers(**_PARTS[how][3])
    numbers = lax.ScatterDimensionNumbers(
        given.offset_dims,
        given.collapsed_slice_dims,
        given.start_index_map,
        given.operand_batching_dims,
        given.start_indices_batching_dims,
    )

    def f(x: Any, at: Any, up: Any) -> Any:
        return _WRITES[name](
            x,
            at,
            up,
            numbers,
            mode=mode,
            unique_indices=unique,
            indices_are_sorted=order,
        )

    return f


def _scatters() -> Iterator[Case]:
    for name in _WRITES:
        if name == "scatter-sub" and not hasattr(lax, "scatter_sub"):
            continue
        for how, mode in itertools.product(_PARTS, _MODES):
            shape, at, *_ = _PARTS[how]
            up = _read(how, mode)
            wild = mode != lax.GatherScatterMode.PROMISE_IN_BOUNDS
            for dtype in ("int32", "uint8") if how == "rows" else ("int32",):
                i = indices(dtype, *at, limit=4 if wild else 2, wild=wild)
                args = [mixed("float32", *shape), i, mixed("float32", *up)]
                f = _scatter(name, how, mode)
                # Which of several writes to one place is the last is not said.
                slope = name not in (
                    "scatter",
                    "scatter-mul",
                    "scatter-min",
                    "scatter-max",
                )
                if name == "scatter" and how != "one":
                    args[1] = _apart(i)
                    f, slope = _scatter(name, how, mode, True), True
                label = f"{how} {mode.name} at {dtype}"
                yield Case(name, label, f, args, has_slope=slope)
        for dtype in ALL:
            i = _apart(indices("int32", 2, 1, limit=4))
            f = _scatter(name, "rows", lax.GatherScatterMode.FILL_OR_DROP, True)
            args = [mixed(dtype, 4, 3), i, mixed(dtype, 2, 3)]
            yield Case(name, "", f, args)
        for dtype in INTEGERS:
            i = _apart(indices(dtype, 2, 1, limit=4))
            args = [mixed("float32", 4, 3), i, mixed("float32", 2, 3)]
            f = _scatter(name, "rows", lax.GatherScatterMode.FILL_OR_DROP, True)
            yield Case(name, f"at {dtype}", f, args)
        f = _scatter(name, "one", lax.GatherScatterMode.CLIP, True, True)
        args = [
            mixed("float32", 4, 3),
            indices("int32", 1, limit=4),
            mixed("float32", 3),
        ]
        yield Case(name, "unique, sorted", f, args)


def _apart(at: Any) -> Any:
    """Indices no two of which are equal: the others are out of bounds."""
    at = at.copy()
    for row in at:
        seen = set()
        for i in np.ndindex(*row.shape[:-1]):
            one = tuple(min(max(int(k), -1), 4) for k in row[i])
            if one in seen:
                row[i] = np.iinfo(at.dtype).max
            seen.add(one)
    return at
