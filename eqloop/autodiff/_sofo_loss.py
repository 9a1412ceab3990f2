"""`SofoLoss`: a loss whose curvature `SofoGrad` sees.

The generalised Gauss-Newton matrix of a loss `L(p(w))` is `J^T H J`, where `J` is the
Jacobian of the predictions `p`, and `H` the Hessian of `L` by them. In the span of
directions `v_1 ... v_K` of `w` it is the K by K matrix of all `(J v_k)^T H (J v_l)`.
Each `J v_k` is the tangent that a prediction has where its loss is evaluated, and all
of them are there at once, since `SofoGrad` pushes the directions under a `vmap` whose
axis has a name: an `all_gather` gives each of its rows the tangents of the others.

What remains is to get the matrix out, through whatever stands between the loss and the
end of the function: a loop that adds up losses carries a scalar with its tangent, and
no more. So there is a second `vmap`, over K + 2 columns, in each of which the tangent
of a loss means something else: its derivative in the first, its products with the K
rows in those that follow, and nothing in the last. All that is done to a loss, such as
to sum it over the steps of a loop, is done to its tangent in each column. Terms that
are no `SofoLoss` have the same tangent in all of them, the last one included.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import final

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import Arrays, as_arrays, describe, is_complex, partition
from .._calls import AbstractTransform, enforce_annotations
from .._types import PyTree, Value
from ._call import is_differentiable


@final
class SofoLoss(AbstractTransform):
    """A loss whose curvature [`SofoGrad`][eqloop.SofoGrad] sees.

    Call it like `f`: the value and the derivatives are the same. Within a `SofoGrad`,
    the generalised Gauss-Newton matrix is made from the Hessian of `f` with respect to
    its first argument; only products with it are computed.

    Two are provided: `eqloop.losses.mean_squared` and `eqloop.losses.cross_entropy`.
    You can call a loss anywhere except in a function that a `ChunkedVmap` maps; there,
    compute the losses from what the map returns.

    Args:
        f: `f(prediction, ...)`, a real scalar, and convex in the prediction. That may
            be any PyTree: its floating-point arrays count.

    Raises:
        TypeError: When called, if `f` does not return a real scalar.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.SofoLoss
        ... def huber(prediction, target):
        ...     error = jnp.abs(prediction - target)
        ...     return jnp.sum(jnp.where(error < 1, error**2 / 2, error - 0.5))
        >>> huber(jnp.array([0.0, 3.0]), jnp.zeros(2))
        Array(2.5, dtype=float32)
    """

    f: Callable[..., PyTree]

    def __call__(
        self, prediction: PyTree, /, *args: PyTree, **kwargs: PyTree
    ) -> jax.Array:
        """The loss of a prediction.

        Args:
            prediction: What the curvature is taken by.
            *args: Passed on.
            **kwargs: Passed on as well.

        Returns:
            What `f(prediction, *args, **kwargs)` returns.

        Raises:
            TypeError: If that is not a real floating-point scalar.
        """
        prediction = as_arrays(prediction, scalars=True)
        arrays, rest = partition(prediction, is_differentiable)

        def loss(arrays: Arrays) -> jax.Array:
            f = enforce_annotations(self.f)
            return _as_scalar(f(rest.join(arrays), *args, **kwargs))

        axes = _axes.get()
        if axes is None:
            return loss(arrays)
        axes.has_losses = True
        gradient = jax.grad(loss)
        # Its value is zero, and its tangent the Hessian times that of the prediction,
        # without what else moves in the loss.
        change = jax.tree.map(
            jnp.subtract, gradient(arrays), gradient(lax.stop_gradient(arrays))
        )
        column = lax.axis_index(axes.columns)
        return _curved((axes.rows, axes.count), loss(arrays), arrays, change, column)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _curved(
    rows: PyTree, loss: PyTree, prediction: PyTree, change: PyTree, column: Value
) -> PyTree:
    return loss


@_curved.defjvp
def _curved_jvp(
    rows: PyTree, primals: PyTree, tangents: PyTree
) -> tuple[PyTree, PyTree]:
    loss, _, _, column = primals
    derivative, prediction_dot, change_dot, _ = tangents
    axis, count = rows
    products = sum(
        jnp.tensordot(lax.all_gather(p, axis), c, c.ndim)
        for p, c in zip(prediction_dot, change_dot, strict=True)
    )
    meanings = jnp.append(derivative, products)
    return loss, jnp.vdot(jax.nn.one_hot(column, count + 1, dtype=loss.dtype), meanings)


def _as_scalar(value: Value) -> jax.Array:
    value = as_arrays(value, scalars=True)
    if not is_differentiable(value) or value.shape or is_complex(value):
        raise TypeError(
            f"SofoLoss: f must return a real floating-point scalar, but it returned "
            f"{jax.tree.map(describe, value)}. Sum or average it."
        )
    return value


# The axes of the `SofoGrad` that is being traced.


@dataclasses.dataclass
class Axes:
    """The names of the two axes, and the number of rows.

    Attributes:
        columns: That of the meanings of a tangent.
        has_losses: Whether a `SofoLoss` has been called.
    """

    # The names are new for each call of a `SofoGrad`. So a function that JAX has traced
    # in one call of it, or outside, is traced again in another.

    rows: str
    columns: str
    count: int
    has_losses: bool = False


_axes: contextvars.ContextVar[Axes | None]
_axes = contextvars.ContextVar("_axes", default=None)
_axes_numbers = itertools.count()


@contextlib.contextmanager
def new_axes(count: int) -> Iterator[Axes]:
    """The axes for so many directions, which each `SofoLoss` called herein sees."""
    number = next(_axes_numbers)
    axes = Axes(f"sofo_rows_{number}", f"sofo_columns_{number}", count)
    token = _axes.set(axes)
    try:
        yield axes
    finally:
        _axes.reset(token)
