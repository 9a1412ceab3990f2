"""Derivatives take what the function takes.

What they return depends on `argnums`, `has_aux` and `return_value`, so it is `Any`.
"""

from typing import Any, assert_type

import equinox as eqx
from jax import Array

import eqloop as el


def loss(model: Array, x: Array, *, rate: float = 1.0) -> Array:
    return (model * x * rate).sum()


def derivatives(model: Array, x: Array, key: Array) -> None:
    """An editor shows the parameters of `loss`, in each of these calls."""
    assert_type(el.Grad(loss)(model, x, rate=0.5), Any)
    assert_type(el.Grad(loss, argnums=(0, "rate"), has_aux=False)(model, x), Any)
    assert_type(el.VectorGrad(loss, return_value=True)(model, x), Any)
    assert_type(el.JacRev(loss, chunk_size=4)(model, x), Any)
    assert_type(el.JacFwd(loss, chunk_size=el.Budget("1MB"))(model, x), Any)
    assert_type(el.Jacobian(loss, holomorphic=False)(model, x), Any)
    assert_type(el.Hessian(loss)(model, x), Any)
    assert_type(el.ForwardGrad(loss, tangents=8)(model, x, key=key), Any)
    assert_type(el.SofoGrad(loss, damping=model)(model, x, key=key), Any)


def products(model: Array, x: Array) -> None:
    """The value of a `Jvp` is that of the function."""
    value, _ = el.Jvp(loss)((model, x), (model, None))
    assert_type(value, Array)
    assert_type(el.Vjp(loss)(model, x, rate=0.5), Any)


@el.Grad(return_value=True)
def gradient(model: Array, x: Array) -> Array:
    return (model * x).sum()


@el.SofoLoss
def huber(prediction: Array, target: Array) -> Array:
    return abs(prediction - target).sum()


class Model(eqx.Module):
    weight: Array

    @el.Grad
    def slope(self, x: Array) -> Array:
        return (self.weight * x).sum()


def as_decorators(model: Model, x: Array, key: Array) -> None:
    """A decorated function is called as before."""
    assert_type(gradient(x, x), Any)
    assert_type(gradient.return_value, bool)
    assert_type(model.slope(x), Any)
    assert_type(el.SofoGrad(tangents=4)(loss), el.SofoGrad)
    assert_type(huber(x, x), Array)
    assert_type(el.losses.mean_squared(x, x), Array)
    assert_type(el.losses.cross_entropy(x, x), Array)


def wrong(model: Model, x: Array, key: Array) -> None:
    """Each of these is underlined."""
    el.Grad(loss)(x)  # pyright: ignore[reportCallIssue]
    el.Grad(loss)(x, x, rat=0.5)  # pyright: ignore[reportCallIssue]
    el.Grad(loss)("x", x)  # pyright: ignore[reportArgumentType]
    el.Grad(loss, 0)  # pyright: ignore[reportCallIssue]
    el.Grad(loss, has_aux="no")  # pyright: ignore[reportArgumentType]
    el.Grad(loss, chunk_size=3)  # pyright: ignore[reportCallIssue]
    el.Hessian(loss, chunk_size="3")  # pyright: ignore[reportArgumentType]
    el.ForwardGrad(loss)(x, x)  # pyright: ignore[reportCallIssue]
    el.Jvp(loss)(x)  # pyright: ignore[reportCallIssue]
    model.slope(model, x)  # pyright: ignore[reportCallIssue]
