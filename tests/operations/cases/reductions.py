# ruff: noqa: E501  (a case is a line)
"""Reductions, cumulative ones, sorts and windows."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..case import Case
from ..values import ALL, mixed, plain

_KINDS = "sum", "prod", "max", "min", "and", "or", "xor"
_SHAPES = (
    ((0,), (2, 3)),
    ((1,), (2, 3)),
    ((0, 1), (2, 3)),
    ((), (2, 3)),
    ((0,), (0, 2)),
    ((0,), (1, 2)),
    ((0, 2), (2, 3, 2)),
)


def cases() -> Iterator[Case]:
    for kind in _KINDS:
        for axes, shape in _SHAPES:
            f = functools.partial(_reduced, kind, axes)
            dtypes = (
                ("float32", "int8")
                if kind not in ("and", "or", "xor")
                else ("bool", "int8")
            )
            for dtype in dtypes:
                yield Case(f"reduce_{kind}", f"{axes}", f, [mixed(dtype, *shape)])
        for dtype in ALL:
            args = [mixed(dtype, 3)]
            yield Case(
                f"reduce_{kind}", "", functools.partial(_reduced, kind, (0,)), args
            )
    for name in ("argmax", "argmin"):
        for dtype, index in itertools.product(
            ALL, ("int32", "int64", "int8", "uint16")
        ):
            f = functools.partial(getattr(lax, name), axis=0, index_dtype=index)
            yield Case(name, index, f, [mixed(dtype, 4)])
        for axis in (0, 1):
            f = functools.partial(getattr(lax, name), axis=axis, index_dtype="int32")
            yield Case(name, f"{axis}", f, [mixed("float32", 2, 3)])
        f = functools.partial(getattr(lax, name), axis=0, index_dtype="int8")
        yield Case(name, "long", f, [np.sort(plain("float32", 130), 1)])
        yield Case(name, "single", f, [mixed("float32", 1)])
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        for dtype in ALL:
            for reverse in (False, True):
                f = functools.partial(getattr(lax, name), axis=0, reverse=reverse)
                yield Case(name, f"reverse={reverse}", f, [mixed(dtype, 4)], 16)
        for shape in ((2, 3), (2, 1), (2, 0), (2, 9)):
            f = functools.partial(getattr(lax, name), axis=1)
            yield Case(name, "axis 1", f, [mixed("float32", *shape)], 16)
    yield from _sorts()
    yield from _windows()
    yield from _general()


def _reduced(kind: str, axes: Any, x: Any) -> Any:
    return getattr(lax, f"reduce_{kind}")(x, axes)


def _sorts() -> Iterator[Case]:
    for dtype in ALL:
        for stable in (True, False):
            f = functools.partial(lax.sort, is_stable=stable)
            yield Case("sort", f"is_stable={stable}", f, [mixed(dtype, 5)])
        pair = lambda a, b: lax.sort((a, b), num_keys=1)
        numbers = np.tile(np.arange(5, dtype="int32"), (6, 1))
        yield Case("sort", "and others", pair, [mixed(dtype, 5), numbers])
        two = lambda a, b: lax.sort((a, b), num_keys=2)
        yield Case("sort", "two keys", two, [mixed("int8", 5) % 2, mixed(dtype, 5)])
    for axis, shape in ((0, (3, 2)), (1, (2, 3)), (1, (2, 1)), (1, (2, 0)), (0, (9,))):
        f = functools.partial(lax.sort, dimension=axis)
        yield Case("sort", f"{axis}", f, [mixed("float32", *shape)])
    for dtype in ALL:
        yield Case("top_k", "k=2", lambda x: lax.top_k(x, 2), [mixed(dtype, 5)])
    for k, axis, shape in (
        (1, 1, (2, 4)),
        (2, 0, (4, 2)),
        (4, 1, (2, 4)),
        (0, 1, (2, 3)),
    ):
        f = functools.partial(lax.top_k, k=k, axis=axis)
        yield Case("top_k", f"k={k} {axis}", f, [mixed("float32", *shape)])
    f = functools.partial(lax.top_k, k=2, is_stable=False)
    yield Case("top_k", "is_stable=False", f, [mixed("float32", 5)])
    for dtype in ("float32", "bfloat16"):
        for most, target, axis in itertools.product((True, False), (0.95, 0.5), (0, 1)):
            run = lax.approx_max_k if most else lax.approx_min_k
            f = functools.partial(
                run, k=2, recall_target=target, reduction_dimension=axis
            )
            yield Case(
                "approx_top_k", f"{most} {target} {axis}", f, [plain(dtype, 3, 4)]
            )
    f = functools.partial(lax.approx_max_k, k=1, aggregate_to_topk=False)
    yield Case("approx_top_k", "aggregate_to_topk", f, [plain("float32", 4)])
    f = functools.partial(lax.approx_max_k, k=1, reduction_input_size_override=8)
    yield Case("approx_top_k", "size", f, [plain("float32", 4)])


_WINDOWS = (
    ((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1)),
    ((2, 1), (2, 1), ((1, 0), (0, 0)), (1, 1), (1, 1)),
    ((2, 2), (1, 1), ((1, 1), (0, 1)), (2, 1), (1, 1)),
    ((1, 2), (1, 2), ((0, 0), (0, 0)), (1, 1), (1, 2)),
    ((3, 1), (1, 1), ((2, 0), (0, 0)), (1, 1), (1, 1)),
)


def _windows() -> Iterator[Case]:
    computed = {"max": lax.max, "min": lax.min, "sum": lax.add}
    for kind, run in computed.items():
        for size, strides, padding, base, dilation in _WINDOWS:
            for dtype in ("float32", "int32", "bfloat16"):
                is_int = dtype == "int32"
                most = np.iinfo(np.int32).max if is_int else np.inf
                start = {"max": -most, "min": most, "sum": 0}[kind]

                def f(x: Any, size=size, strides=strides, padding=padding, base=base, dilation=dilation, start=start, run=run) -> Any:  # fmt: skip
                    zero = np.asarray(start, x.dtype)
                    return lax.reduce_window(
                        x, zero, run, size, strides, padding, base, dilation
                    )

                label = f"{size} {strides} {padding} {base} {dilation}"
                x = mixed(dtype, 3, 4) if kind != "sum" else plain(dtype, 3, 4)
                yield Case(f"reduce_window_{kind}", label, f, [x])
    for size, strides, padding, base, dilation in _WINDOWS:

        def f(x: Any, size=size, strides=strides, padding=padding, base=base, dilation=dilation) -> Any:  # fmt: skip
            both = lambda a, b: a * b * 1.0
            one = np.asarray(1, x.dtype)
            return lax.reduce_window(
                x, one, both, size, strides, padding, base, dilation
            )

        yield Case("reduce_window", f"{size}", f, [plain("float32", 3, 4)])
    two = lambda x, y: lax.reduce_window(
        (x, y),
        (np.float32(0), np.float32(1)),
        lambda a, b: (a[0] + b[0], a[1] * b[1]),
        (2,),
        (1,),
        "SAME",
    )
    yield Case("reduce_window", "two", two, [plain("float32", 4), plain("float32", 4)])
    # What their derivatives are made of.
    for size, strides, padding, *_ in _WINDOWS[:2]:
        g = lambda x, s=size, t=strides, p=padding: jax.vjp(
            lambda y: lax.reduce_window(y, -np.inf, lax.max, s, t, p), x
        )[1](jnp.ones_like(lax.reduce_window(x, -np.inf, lax.max, s, t, p)))[0]
        yield Case("select_and_scatter_add", f"{size}", g, [plain("float32", 3, 4)])
        g = lambda x, s=size, t=strides, p=padding: jax.vjp(
            lambda y: lax.reduce_window(y, np.inf, lax.min, s, t, p), x
        )[1](jnp.ones_like(lax.reduce_window(x, np.inf, lax.min, s, t, p)))[0]
        yield Case("select_and_scatter_add", f"min {size}", g, [plain("float32", 3, 4)])
        h = lambda x, d, s=size, t=strides, p=padding,: jax.jvp(
            lambda y: lax.reduce_window(y, -np.inf, lax.max, s, t, p), (x,), (d,)
        )[1]
        yield Case(
            "select_and_gather_add",
            f"{size}",
            h,
            [plain("float32", 3, 4), plain("float32", 3, 4)],
        )
        h = lambda x, d, s=size, t=strides, p=padding,: jax.jvp(
            lambda y: lax.reduce_window(y, np.inf, lax.min, s, t, p), (x,), (d,)
        )[1]
        yield Case(
            "select_and_gather_add",
            f"min {size}",
            h,
            [plain("float32", 3, 4), plain("float32", 3, 4)],
        )


def _general() -> Iterator[Case]:
    for axes, dtype in itertools.product(((0,), (1,), (0, 1)), ("float32", "int32")):
        f = lambda x, a=axes: lax.reduce(
            x, np.asarray(1, x.dtype), lambda p, q: p * q + 0 * p, a
        )
        yield Case("reduce", f"{axes}", f, [plain(dtype, 2, 3)], 32)

    def largest(x: Any, axes: Any = (0,)) -> Any:
        at = lax.iota("int32", 4)
        keep = lambda a, b: (
            jnp.where(a[0] >= b[0], a[0], b[0]),
            jnp.where(a[0] >= b[0], a[1], b[1]),
        )
        return lax.reduce((x, at), (np.float32(-np.inf), np.int32(-1)), keep, axes)

    yield Case("reduce", "two", largest, [plain("float32", 4)])
