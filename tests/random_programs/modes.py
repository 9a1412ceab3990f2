"""What is evaluated of a function: itself, or one of its derivatives.

A *run* is a function of arrays, some of which are differentiated; it returns a list of
arrays, of which only those that are inexact have derivatives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqloop._arrays import axes_of, vary

from .values import is_inexact, raw

Run = Callable[..., list[Any]]


def weigh(tree: Any) -> Any:
    """A real number in which each number of the tree has its own weight."""
    real = [
        x.real + x.imag / 2 if jnp.iscomplexobj(x) else x
        for x in map(jnp.ravel, jax.tree.leaves(tree))
    ]
    is_double = any(leaf.dtype == jnp.float64 for leaf in real)
    dtype = jnp.float64 if is_double else jnp.float32
    total = jnp.zeros((), dtype)
    for leaf in real:
        weights = jnp.asarray(np.cos(np.arange(leaf.size)), dtype)
        total = total + jnp.dot(leaf.astype(dtype), weights)
    return total


def direction(tree: Any) -> Any:
    def along(x: Any) -> Any:
        weights = np.cos(1 + np.arange(np.size(x))).reshape(np.shape(x))
        if jnp.iscomplexobj(x):
            weights = weights * (1 + 0.5j)
        weights = jnp.asarray(weights, jnp.result_type(x))
        # In a checked `shard_map` it differs between devices wherever `x` does.
        return vary(weights, axes_of(x))

    return jax.tree.map(along, tree)


def inexact(run: Run) -> Run:
    return lambda *args: [out for out in run(*args) if is_inexact(out)]


def primal(run: Run, *args: Any) -> Any:
    return [raw(out) for out in run(*args)]


def jvp(run: Run, *args: Any) -> Any:
    return jax.jvp(inexact(run), args, direction(args))


def linearize(run: Run, *args: Any) -> Any:
    out, push = jax.linearize(inexact(run), *args)
    return out, push(*direction(args))


def linear_transpose(run: Run, *args: Any) -> Any:
    out, push = jax.linearize(inexact(run), *args)
    return jax.linear_transpose(push, *args)(direction(out))


def vjp(run: Run, *args: Any) -> Any:
    out, pull = jax.vjp(inexact(run), *args)
    return out, pull(direction(out))


def loss(run: Run) -> Callable[..., Any]:
    return lambda *args: weigh(inexact(run)(*args))


def gradient(run: Run, args: Sequence[Any]) -> Callable[..., Any]:
    return jax.grad(loss(run), tuple(range(len(args))))


def grad(run: Run, *args: Any) -> Any:
    return jax.value_and_grad(loss(run), tuple(range(len(args))))(*args)


def jacfwd(run: Run, *args: Any) -> Any:
    return jax.jacfwd(inexact(run), tuple(range(len(args))))(*args)


def jacrev(run: Run, *args: Any) -> Any:
    return jax.jacrev(inexact(run), tuple(range(len(args))))(*args)


def hessian(run: Run, *args: Any) -> Any:
    return jax.hessian(loss(run), tuple(range(len(args))))(*args)


def forward_over_forward(run: Run, *args: Any) -> Any:
    push = lambda *args: jax.jvp(inexact(run), args, direction(args))
    return jax.jvp(push, args, direction(args))


def forward_over_reverse(run: Run, *args: Any) -> Any:
    return jax.jvp(gradient(run, args), args, direction(args))


def reverse_over_forward(run: Run, *args: Any) -> Any:
    push = lambda *args: jax.jvp(inexact(run), args, direction(args))
    return jax.grad(lambda *args: weigh(push(*args)), tuple(range(len(args))))(*args)


def reverse_over_reverse(run: Run, *args: Any) -> Any:
    first = gradient(run, args)
    return jax.grad(lambda *args: weigh(first(*args)), tuple(range(len(args))))(*args)


def jacfwd_of_jacrev(run: Run, *args: Any) -> Any:
    return jax.jacfwd(jax.jacrev(inexact(run)))(*args)


def jacrev_of_jacfwd(run: Run, *args: Any) -> Any:
    return jax.jacrev(jax.jacfwd(inexact(run)))(*args)


def slopes(run: Run, *args: Any) -> Any:
    """Pairs of a value and of its slope where all arguments grow in proportion.

    In each pair the two come from one call, and so belong to one function.
    """
    total = loss(run)
    return _by_reverse(total, args), jax.jvp(total, args, args)


def slopes_twice(run: Run, *args: Any) -> Any:
    """The same by way of second derivatives: a slope, and the slope of that."""
    total = loss(run)
    value, push = jax.linearize(total, *args)
    (_, once), (_, twice) = jax.jvp(lambda *args: _by_reverse(total, args), args, args)
    return (value, push(*args)), (once, twice)


def _by_reverse(total: Callable[..., Any], args: Sequence[Any]) -> Any:
    value, grads = jax.value_and_grad(total, tuple(range(len(args))))(*args)
    return value, sum(map(jnp.vdot, grads, args))


FORWARD = (primal, jvp, jacfwd, forward_over_forward)
FIRST = (*FORWARD[:3], linearize, linear_transpose, vjp, grad, jacrev)
SECOND = (
    hessian,
    forward_over_forward,
    forward_over_reverse,
    reverse_over_forward,
    reverse_over_reverse,
    jacfwd_of_jacrev,
    jacrev_of_jacfwd,
)
MODES = (*FIRST, *SECOND)
SLOPES = (slopes, slopes_twice)
# Those that a function with a `custom_vjp` has, too.
WITHOUT_JVP = (
    primal,
    vjp,
    grad,
    jacrev,
    hessian,
    forward_over_reverse,
    reverse_over_reverse,
    jacfwd_of_jacrev,
)
# Those in which a ref may be updated: it is written to once, or there is an error.
WITH_REF = (primal, vjp, grad, jvp)
# Those that a function of complex numbers has, too.
COMPLEX = (primal, jvp, linearize, vjp, grad, forward_over_reverse)
