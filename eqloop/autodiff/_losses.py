"""Losses whose curvature `SofoGrad` sees."""

import jax
import jax.numpy as jnp

from .._arrays import describe, is_dynamic
from .._calls import value_in_words
from .._types import Value
from ._sofo_loss import SofoLoss

__all__ = ["cross_entropy", "mean_squared"]


def _mean_squared(prediction: jax.Array, target: jax.Array) -> jax.Array:
    _check_prediction("mean_squared", "prediction", prediction)
    if not is_dynamic(target) or target.shape != prediction.shape:
        raise TypeError(
            f"mean_squared: `target` must be an array of the shape of the prediction, "
            f"which is {describe(prediction)}, not {value_in_words(target)}."
        )
    return jnp.mean((prediction - target) ** 2)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    name = "cross_entropy"
    _check_prediction(name, "logits", logits)
    if not logits.ndim:
        raise TypeError(
            f"{name}: `logits` must have the classes along their last axis, but they "
            f"are {describe(logits)}."
        )
    are_numbers = is_dynamic(labels) and jnp.issubdtype(labels.dtype, jnp.integer)
    shape = logits.shape[:-1] if are_numbers else logits.shape
    is_inexact = is_dynamic(labels) and jnp.issubdtype(labels.dtype, jnp.inexact)
    if not (are_numbers or is_inexact) or labels.shape != shape:
        numbers = f"integers of shape {logits.shape[:-1]}"
        raise TypeError(
            f"{name}: `labels` must be {numbers}, or probabilities of shape "
            f"{logits.shape}, since the logits are {describe(logits)}; but they are "
            f"{value_in_words(labels)}."
        )
    if are_numbers:
        labels = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    # The logit of a masked class is -inf. Without a label for it, it adds nothing; and
    # neither does a row of masked classes without a label.
    is_masked, is_labelled = logits == -jnp.inf, labels != 0
    is_row = is_labelled.any(-1, keepdims=True) | ~is_masked.all(-1, keepdims=True)
    logs = jax.nn.log_softmax(jnp.where(is_row, logits, 0))
    logs = jnp.where(is_masked & ~is_labelled, 0, logs)
    return -jnp.mean(jnp.sum(labels * logs, axis=-1))


def _check_prediction(owner: str, name: str, value: Value) -> None:
    if not (is_dynamic(value) and jnp.issubdtype(value.dtype, jnp.floating)):
        raise TypeError(
            f"{owner}: `{name}` must be an array of floating-point numbers, not "
            f"{value_in_words(value)}."
        )


mean_squared = SofoLoss(_mean_squared)
"""The mean of the squares of `prediction - target`, two arrays of one shape."""

cross_entropy = SofoLoss(_cross_entropy)
"""The cross-entropy of logits of shape `(..., classes)`, averaged over all but classes.

Labels are the numbers of the classes, of shape `(...)`, or their probabilities, of the
shape of the logits. A logit of minus infinity masks a class: it adds nothing unless it
is labelled, and then the loss is infinite. A label that is not the number of a class,
such as -1, adds nothing either, and counts in the average. A row that has a label and
whose classes are all masked gives NaN.
"""
