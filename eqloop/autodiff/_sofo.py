"""`SofoGrad`: second-order steps, in forward mode."""

from typing import Any, final

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import Arrays, describe
from .._calls import setting
from .._types import PyTree
from ._call import Call
from ._complex import check_forward, common_dtype
from ._counts import as_int
from ._directions import AbstractEstimate
from ._sofo_loss import new_axes


@final
class SofoGrad(AbstractEstimate):
    r"""The direction of a Gauss-Newton step within a random subspace.

    Second-order forward-mode optimisation (SOFO): `tangents` random directions, the
    columns of $V$, are pushed forward through `f` at once. Along with the derivatives
    $V^\top g$ of the loss this gives its generalised Gauss-Newton matrix in their span,
    $C = V^\top G V$, and the result is

    $$V (C + \lambda I)^{-1} V^\top g, \qquad \lambda = \text{damping} \cdot \lVert C
    \rVert.$$

    Call it like [`Grad`][eqloop.Grad], and use what it returns in place of a gradient.
    A step against it, with a rate of about 1, minimises a quadratic model of the loss.
    You can use any optimiser that takes gradients; `optax.sgd`, perhaps with momentum,
    suits it best.

    There is no backward pass. So the memory does not grow with the length of a loop
    (`el.Scan`, `jax.lax.scan`) if the losses of the steps are added up in the carry
    rather than stacked.

    Args:
        f: The function. It returns a real scalar. Terms with curvature come from
            `eqloop.losses.mean_squared`, `eqloop.losses.cross_entropy` or another
            [`SofoLoss`][eqloop.SofoLoss]. `f` may call these anywhere, any number of
            times, and add, average and weight them. Other terms are differentiated, and
            have no curvature.
        tangents: How many directions. The time and the memory are those of evaluating
            `f` for a batch of so many more.
        damping: How much to shrink directions of little curvature, relative to the
            largest curvature: a number, or a scalar array if it is to change.

    Returns:
        When called, as `f` is, and with a `key=` for the directions: the direction, a
        tree as the argument, with `None` for leaves that are not differentiated; and
        value and aux as for `Grad`. `f` is not given the key.

    Raises:
        TypeError: If a setting is not of its type; when called, as for `Grad`, if an
            array to differentiate with respect to is complex, and if `key` is not a
            key.
        ValueError: If `tangents` is less than 1, `damping` less than 0 or `argnums`
            empty; when called, as for `Grad`, and if `f` calls no `SofoLoss`.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> @el.SofoGrad(tangents=8, return_value=True)
        ... def loss(cell, xs, targets):
        ...     def step(carry, now):
        ...         hidden, total = carry
        ...         x, target = now
        ...         hidden = cell(x, hidden)
        ...         loss = el.losses.mean_squared(hidden, target)
        ...         return (hidden, total + loss), None
        ...     (_, total), _ = el.Scan(step)((jnp.zeros(2), 0.0), (xs, targets))
        ...     return total / len(xs)
        >>> sofo = eqx.filter_jit(loss)
        >>> cell = eqx.nn.GRUCell(1, 2, key=jax.random.key(0))
        >>> xs, targets = jnp.ones((20, 1)), jnp.full((20, 2), 0.5)
        >>> value, direction = sofo(cell, xs, targets, key=jax.random.key(1))
        >>> cell = eqx.apply_updates(cell, jax.tree.map(jnp.negative, direction))
        >>> bool(sofo(cell, xs, targets, key=jax.random.key(2))[0] < value)
        True

    References:
        Yu, Xia, Ma, Lengyel & Hennequin, [Second-order forward-mode optimization of
        recurrent neural networks for
        neuroscience](https://openreview.net/forum?id=Pox8jNQOo5), NeurIPS 2024.
    """

    tangents: int = setting(default=32, converter=as_int)
    damping: Any = setting(default=1e-3, static=False)

    def __call__(self, *args: PyTree, key: PyTree, **kwargs: PyTree) -> PyTree:
        """The direction at `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`.
            key: A PRNG key, for the random directions.
            **kwargs: The keyword arguments of `f`.

        Returns:
            The direction, and with it what `return_value` and `has_aux` ask for.

        Raises:
            TypeError: If `key` is not a PRNG key, if an argument has no derivative, or
                if `f` does not return a real scalar.
            ValueError: If `argnums` names an argument that is not passed, or if `f`
                calls no `SofoLoss`.
        """
        call, directions = self._directions(key, args, kwargs)
        directions = _normalised(directions)
        slopes, curvature, outs, others = _push(call, directions, self.tangents)
        weights = _solve(curvature, slopes, self.damping)
        step = [jnp.tensordot(weights.astype(v.dtype), v, axes=1) for v in directions]
        return self._results(call, call.gradient(step), outs, others)

    def _check(self, call: Call, value: object) -> None:
        super()._check(call, value)
        check_forward(call, value, holomorphic=False)

    def __check_init__(self) -> None:
        damping = self.damping
        if isinstance(damping, bool) or not eqx.is_array_like(damping):
            raise TypeError(
                f"SofoGrad: `damping` must be a number or a scalar array, not "
                f"{describe(damping)}."
            )
        if jnp.shape(damping):
            raise TypeError(
                f"SofoGrad: `damping` must be a scalar, but it is {describe(damping)}."
            )
        if isinstance(damping, int | float) and not damping >= 0:
            raise ValueError(
                f"SofoGrad: `damping` must be at least 0, but it is {damping}."
            )


def _normalised(directions: Arrays) -> list[jax.Array]:
    """The directions, each of length 1."""
    row = lambda v: v.reshape(len(v), -1).astype(_at_least_float32(v))
    squares = sum(jnp.sum(row(v) ** 2, axis=1) for v in directions)
    scale = jax.lax.rsqrt(squares)
    return [
        v * scale.astype(v.dtype).reshape(-1, *[1] * (v.ndim - 1)) for v in directions
    ]


def _at_least_float32(x: jax.Array) -> jax.Array:
    return common_dtype(x.dtype, jnp.float32)


def _push(
    call: Call, directions: Arrays, count: int
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """The derivatives of the loss, its matrix, and what `call.run` returns."""
    with new_axes(count) as axes:
        columns = lambda v: jax.vmap(
            lambda: call.push(v), axis_name=axes.columns, axis_size=count + 2
        )()
        rows = jax.vmap(columns, out_axes=(None, 0, None), axis_name=axes.rows)
        outs, (table,), others = rows(directions)
        if not axes.has_losses:
            raise ValueError(
                "SofoGrad: f called no `SofoLoss`, so its value has no curvature. "
                "Use `el.losses.mean_squared`, `el.losses.cross_entropy`, or wrap the "
                "loss of a prediction in `el.SofoLoss`."
            )
    table = table.astype(_at_least_float32(table))
    plain = table[:, -1:]
    # Whether the value itself differs from column to column is up to the loops.
    outs, others = jax.tree.map(lambda x: x[0], (outs, others))
    return table[:, 0], table[:, 1:-1] - plain, outs, others


def _solve(curvature: jax.Array, slopes: jax.Array, damping: PyTree) -> jax.Array:
    """The weights of the directions in the step."""
    values, vectors = jnp.linalg.eigh(curvature)  # of its lower half: it is symmetric
    largest = jnp.maximum(values[-1], 0.0)
    # Without damping, no step is taken where the curvature is nothing but rounding.
    rounding = len(values) * jnp.finfo(values.dtype).eps * largest
    values = jnp.maximum(values, 0.0) + damping * largest
    curves = values > rounding
    inverse = jnp.where(curves, 1 / jnp.where(curves, values, 1), 0)
    return vectors @ (inverse * (vectors.T @ slopes))
