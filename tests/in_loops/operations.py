"""Operations to try: functions of a row and of what is the same for all rows."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import one_hot


class Operation(NamedTuple):
    """A function, the shape of its first argument, and those of the others."""

    run: Callable[..., Any]
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()


def _conv(
    layout: tuple[str, str, str] | None = None, stride: int = 1, **settings: Any
) -> Any:
    def run(x: Any, w: Any) -> Any:
        each = (stride,) * (x.ndim - 2)
        given = dict(padding="SAME", dimension_numbers=layout)
        return lax.conv_general_dilated(x, w, each, **{**given, **settings})

    return run


def _pooled(x: Any) -> Any:
    window = (1, 1, 2, 2)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


_MANY = (512, 512)
_IMAGES = (4, 16, 32, 32)
_NUMBERS = ((16, 16, 3, 3),)
_LAST = ("NHWC", "HWIO", "NHWC")

OPERATIONS: Mapping[str, Operation] = {
    "convolution": Operation(_conv(), _IMAGES, _NUMBERS),
    "convolution, features last": Operation(
        _conv(_LAST), (4, 32, 32, 16), ((3, 3, 16, 16),)
    ),
    "convolution, kernel of 1 x 1": Operation(_conv(), _IMAGES, ((64, 16, 1, 1),)),
    "convolution, strides": Operation(_conv(stride=2), _IMAGES, _NUMBERS),
    "convolution, dilated kernel": Operation(
        _conv(rhs_dilation=(2, 2)), _IMAGES, _NUMBERS
    ),
    "convolution, dilated image": Operation(
        _conv(lhs_dilation=(2, 2), padding=((1, 2), (1, 2))), (4, 16, 16, 16), _NUMBERS
    ),
    "convolution, two groups": Operation(
        _conv(feature_group_count=2), _IMAGES, ((16, 8, 3, 3),)
    ),
    "convolution, a group for each feature": Operation(
        _conv(feature_group_count=16), _IMAGES, ((16, 1, 3, 3),)
    ),
    "convolution in one dimension": Operation(_conv(), (8, 32, 512), ((32, 32, 5),)),
    "convolution in three": Operation(_conv(), (2, 8, 12, 12, 12), ((8, 8, 3, 3, 3),)),
    "product x w": Operation(lambda x, w: x @ w, (64, 512), (_MANY,)),
    "product w x": Operation(lambda x, w: w @ x, (512, 64), (_MANY,)),
    "product w.T x": Operation(lambda x, w: w.T @ x, (512, 64), (_MANY,)),
    "product x w.T": Operation(lambda x, w: x @ w.T, (64, 512), (_MANY,)),
    "product x.T w": Operation(lambda x, w: x.T @ w, (512, 64), (_MANY,)),
    "product (w x.T).T": Operation(lambda x, w: (w @ x.T).T, (64, 512), (_MANY,)),
    "product of a matrix and a vector": Operation(
        lambda x, w: w @ x, (1024,), ((1024, 1024),)
    ),
    "product of a transposed matrix and a vector": Operation(
        lambda x, w: w.T @ x, (1024,), ((1024, 1024),)
    ),
    "einsum ij,bj->bi": Operation(
        lambda x, w: jnp.einsum("ij,bj->bi", w, x), (64, 512), (_MANY,)
    ),
    "einsum ij,bi->bj": Operation(
        lambda x, w: jnp.einsum("ij,bi->bj", w, x), (64, 512), (_MANY,)
    ),
    "attention, heads last": Operation(
        lambda x, w: jnp.einsum("qhd,khd->hqk", x, w), (128, 8, 32), ((128, 8, 32),)
    ),
    "products of a batch": Operation(
        lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (16, 64, 64), ((16, 64, 64),)
    ),
    "tanh": Operation(jnp.tanh, _MANY),
    "exp(x) / (1 + x * x)": Operation(lambda x: jnp.exp(x) / (1 + x * x), _MANY),
    "softmax": Operation(lambda x: jax.nn.softmax(x, -1), _MANY),
    "softmax along the first axis": Operation(lambda x: jax.nn.softmax(x, 0), _MANY),
    "sum of rows": Operation(lambda x: jnp.sum(x, -1), _MANY),
    "sum of columns": Operation(lambda x: jnp.sum(x, 0), _MANY),
    "cumulative sum": Operation(lambda x: jnp.cumsum(x, 0), (256, 128)),
    "maximum in windows": Operation(_pooled, _IMAGES),
    "sort": Operation(lambda x: jnp.sort(x, -1), (64, 256)),
    "top_k": Operation(lambda x: lax.top_k(x, 8)[0], (64, 256)),
    "rows by number": Operation(
        lambda x, w: w[jnp.abs(x * 100).astype(jnp.int32) % 512], (512,), (_MANY,)
    ),
    "rows added by number": Operation(
        lambda x, w: jnp.zeros_like(w).at[jnp.arange(512) * 7 % 512].add(x),
        _MANY,
        (_MANY,),
    ),
    "one-hot product": Operation(
        lambda x, w: one_hot(jnp.abs(x * 100).astype(jnp.int32) % 512, 512) @ w,
        (64,),
        (_MANY,),
    ),
    "transposition": Operation(lambda x: jnp.sin(x).T * x, _MANY),
    "concatenation": Operation(lambda x: jnp.concatenate([x[256:], x[:256]]), _MANY),
    "reversal": Operation(lambda x: x[::-1] * x, _MANY),
    "Fourier transform": Operation(lambda x: jnp.abs(jnp.fft.rfft(x)), (64, 512)),
    "Cholesky": Operation(
        lambda x: jnp.linalg.cholesky(x @ x.T + 99 * jnp.eye(96)), (96, 96)
    ),
    "triangular solve": Operation(
        lambda x, w: jax.scipy.linalg.solve_triangular(w + 99 * jnp.eye(128), x),
        (128, 64),
        ((128, 128),),
    ),
    "solve": Operation(
        lambda x, w: jnp.linalg.solve(w + 99 * jnp.eye(96), x), (96, 16), ((96, 96),)
    ),
    "random normals": Operation(
        lambda x: jax.random.normal(jax.random.key(jnp.int32(x[0] * 9)), _MANY), (4,)
    ),
}
