"""Losses whose curvature `SofoGrad` sees."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Int, Shaped

from ._sofo_loss import SofoLoss

__all__ = ["cross_entropy", "mean_squared"]


def _mean_squared(
    prediction: Float[Array, "*shape"], target: Shaped[Array, "*shape"]
) -> Float[Array, ""]:
    return jnp.mean((prediction - target) ** 2)


def _cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"] | Inexact[Array, "*batch classes"],
) -> Float[Array, ""]:
    if jnp.issubdtype(labels.dtype, jnp.integer):
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(logits), axis=-1))


mean_squared = SofoLoss(_mean_squared)
"""The mean of the squares of `prediction - target`, two arrays of one shape."""

cross_entropy = SofoLoss(_cross_entropy)
"""The cross-entropy of logits of shape `(..., classes)`, averaged over all but classes.

Labels are the numbers of the classes, of shape `(...)`, or their probabilities, of the
shape of the logits.
"""
