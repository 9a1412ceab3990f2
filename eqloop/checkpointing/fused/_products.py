"""Products of matrices, written out or by tiles."""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._programs import aval_of, said
from ._classes import refuse
from ._elementwise import pairwise, simplified
from ._entries import ProductSum, is_known
from ._scope import BlockScope, objects, valued

# From so many products on, a product of matrices is one of tiles.
_LEAST_OF_TILES = 64


# The most products that are written out.
MOST_PRODUCTS = 65536


def is_large(m: int, n: int, k: int) -> bool:
    """Whether a product of matrices of these sizes is one of tiles."""
    return m * n * k >= _LEAST_OF_TILES


def dot(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p, out = eqn.params, aval_of(eqn.outvars[0])
    (lc, rc), (lb, rb) = p["dimension_numbers"]
    left, right = ins
    free = lambda a, *gone: [i for i in range(a.ndim) if not any(i in g for g in gone)]
    lf, rf = free(left, lb, lc), free(right, rb, rc)
    shape = lambda a, axes: math.prod(a.shape[i] for i in axes)
    batch, k = shape(left, lb), shape(left, lc)
    left = left.transpose([*lb, *lf, *lc]).reshape(batch, shape(left, lf), k)
    right = right.transpose([*rb, *rf, *rc]).reshape(batch, shape(right, rf), k)
    product, add = (pairwise(f, out.dtype) for f in (jnp.multiply, jnp.add))

    if batch == 1:
        if k == 1 and min(left.shape[1], right.shape[1]) > 1:
            made = [
                ProductSum(((u[0], v[0]),), product, add)
                for u in left[0]
                for v in right[0]
            ]
            return [objects(made, out.shape)]
        if scope.tiles is not None and is_large(left.shape[1], right.shape[1], k):
            made = scope.tiles.product(scope, left[0], right[0], out.dtype)
            if made is not None:
                return [objects(made, out.shape)]
    if (count := batch * left.shape[1] * right.shape[1] * k) > MOST_PRODUCTS:
        why = f"multiplies {count} numbers of a row, too many for a kernel"
        refuse(said(eqn), why, "Use another schedule, such as `el.Chunked(32)`.")
    left, right = valued(scope, left), valued(scope, right)

    # Zeros that are known, as of padded cotangents, take no part.
    def total(us: Any, vs: Any) -> Any:
        terms = map(product, us, vs)
        return functools.reduce(add, terms, np.zeros((), out.dtype)[()])

    values = [total(u, v) for b in range(batch) for u in left[b] for v in right[b]]
    return [objects(values, out.shape)]


def has_products(array: np.ndarray) -> bool:
    return array.size > 0 and all(
        isinstance(x, ProductSum) or (is_known(x) and x == 0) for x in array.reshape(-1)
    )


def added_products(x: Any, y: Any) -> Any:
    if isinstance(x, ProductSum) and isinstance(y, ProductSum):
        return ProductSum(x.pairs + y.pairs, x.multiply, x.add)
    return simplified("add", [x, y])
