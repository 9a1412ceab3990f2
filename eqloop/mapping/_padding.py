"""Pads rows with copies of the last one, to a multiple of the number of devices.

A row that is there several times must count once. If the copies were just dropped, they
would get zero cotangents, and zero times an infinite derivative is NaN. So each of them
gets an equal share of the cotangent. That needs copies that are alike, and derivatives
that are linear in the cotangent. If a row can see the rows that it is mapped with, its
copies have other values and derivatives, and a backward rule of the user's need not be
linear. Then the copies are dropped.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import is_inexact
from .._types import PyTree, Value


def padded(x: jax.Array, axis: int, count: int) -> jax.Array:
    """An array with so many copies of its last row after it."""
    last = lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    copies = jnp.broadcast_to(last, (*x.shape[:axis], count, *x.shape[axis + 1 :]))
    return lax.concatenate([x, copies], axis)


def without_padding(y: jax.Array, count: int, *, shared: bool = True) -> jax.Array:
    """The array without its last `count` rows, which are copies of the one before.

    Args:
        y: The array.
        count: How many copies there are.
        shared: Whether each copy gets a share of the cotangent.

    >>> y = jnp.array([1.0, 2.0, 2.0])
    >>> jax.vjp(lambda y: without_padding(y, 1), y)[1](jnp.ones(2))[0].tolist()
    [1.0, 0.5, 0.5]
    """
    rows = len(y) - count
    if not (shared and is_inexact(y)):
        return y[:rows]

    @jax.custom_jvp
    def first(y: jax.Array) -> jax.Array:
        return y[:rows]

    @first.defjvp
    def first_jvp(primals: PyTree, tangents: PyTree) -> Value:
        (y,), (t,) = primals, tangents
        mean = jnp.mean(t[rows - 1 :], 0, keepdims=True)
        return first(y), jnp.concatenate([t[: rows - 1], mean])

    return first(y)
