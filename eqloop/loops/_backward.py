"""What happens to the cotangent of a carry on its way back from step to step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    axes_of,
    describe,
    flatten,
    is_complex,
    is_dynamic,
    is_inexact,
    is_symbolic,
    paths,
    structure_differences,
    vary,
)
from .._calls import as_count
from .._types import PyTree, Value


@final
@dataclasses.dataclass(frozen=True)
class Truncate:
    """Cuts the gradient every so many steps: truncated backpropagation through time.

    Steps are counted from 0, in the order of running. Before the steps `every`,
    `2 * every`, and so on, `jax.lax.stop_gradient` is applied to the carry, and so in
    forward mode its tangent is zero there. Outputs are differentiated at every step,
    back to the cut before that step.

    There is no cut before step 0: an initial carry that is learned has a gradient, by
    the first `every` steps. If it comes from an earlier part of the same sequence,
    apply `jax.lax.stop_gradient` to it yourself. With an `every` that is not less than
    the length of the loop, nothing is cut.

    Steps that no output needs are not reversed, and take no memory for it. For a scan
    without outputs, these are all steps before the last cut. For a
    [`SlicedScan`][eqloop.SlicedScan], these are the steps before the last cut that
    precedes the first output.

    Args:
        every: How many steps lie between two cuts.

    Raises:
        TypeError: If `every` is not an int.
        ValueError: If it is less than 1.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> total = lambda c, x: (c + x, None)
        >>> scan = el.Scan(total, backward=el.Truncate(3))
        >>> jax.grad(lambda xs: scan(0.0, xs)[0])(jnp.ones(8))
        Array([0., 0., 0., 0., 0., 0., 1., 1.], dtype=float32)

    References:
        R. J. Williams and J. Peng, *An efficient gradient-based algorithm for on-line
        training of recurrent network trajectories*, Neural Computation 2(4), 1990.
    """

    every: int

    def __post_init__(self) -> None:
        what = "the number of steps between two cuts"
        every = as_count("Truncate", "every", what, self.every)
        object.__setattr__(self, "every", every)


@final
@dataclasses.dataclass(frozen=True)
class ClipCotangent:
    """Limits the norm of the cotangent of the carry in each step of the backward pass.

    The norm is that of all leaves of the cotangent together. So a gradient that
    explodes is limited at each step, and not only at the end.

    Args:
        max_norm: The largest Euclidean norm that a cotangent keeps.

    Raises:
        TypeError: If `max_norm` is not a number.
        ValueError: If it is not positive.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> double = lambda c, _: (2 * c, None)
        >>> scan = el.Scan(double, backward=el.ClipCotangent(10.0))
        >>> jax.grad(lambda c: scan(c, length=100)[0])(1.0)
        Array(10., dtype=float32...)

    References:
        R. Pascanu, T. Mikolov and Y. Bengio, *On the difficulty of training recurrent
        neural networks*, [arXiv:1211.5063](https://arxiv.org/abs/1211.5063).
    """

    max_norm: float

    def __post_init__(self) -> None:
        norm = self.max_norm
        is_number = isinstance(norm, int | float | np.number)
        if not is_number or isinstance(norm, bool):
            raise TypeError(
                f"ClipCotangent: `max_norm` must be a number that is known when "
                f"tracing, not {describe(norm)}."
            )
        if not norm > 0:
            raise ValueError(
                f"ClipCotangent: `max_norm` must be more than 0, but it is {norm}."
            )
        object.__setattr__(self, "max_norm", float(norm))

    def __call__(self, cotangent: PyTree) -> PyTree:
        """Scales a cotangent.

        Args:
            cotangent: A tree of arrays.

        Returns:
            The same with at most this norm.
        """
        sizes = [jnp.abs(x).astype(float) for x in jax.tree.leaves(cotangent)]
        # Squares of large entries overflow, and those of small ones vanish, in half
        # precision soon. So what is squared has been divided by the largest entry.
        largest = functools.reduce(
            jnp.maximum, [jnp.max(x, initial=0) for x in sizes], jnp.zeros(())
        )
        # XLA multiplies by the inverse, which for the largest numbers would be 0.
        unit = jnp.where(largest > 1, largest / 8, jnp.where(largest > 0, largest, 1))
        squares = [jnp.sum(jnp.square(x / unit)) for x in sizes]
        norm = jnp.sqrt(sum(squares, start=jnp.zeros(())))
        is_large = norm > self.max_norm / unit
        scale = self.max_norm / jnp.where(is_large, norm, 1) / unit

        def clipped(x: Value) -> Value:
            # In a precision that can hold the scale.
            wide = x if is_complex(x) else x.astype(float)
            scaled = (wide * scale.astype(wide.dtype)).astype(x.dtype)
            # Left as it is to the last bit, if it is not too large.
            return jnp.where(is_large, scaled, x)

        return jax.tree.map(clipped, cotangent)


Backward: TypeAlias = Truncate | Callable[[Any], Any]


def refuse_cuts(owner: str, backward: object) -> None:
    """Checks that a loop whose steps are undone by an inverse is not truncated."""
    if isinstance(backward, Truncate):
        # An inverse of the jvp would have to recover tangents from before the cut,
        # which are zero after it.
        raise ValueError(
            f"{owner}: `backward={backward!r}` cuts the derivative of a "
            f"step, which the inverse of `Reversible` cannot undo. Use another "
            f"schedule, such as `el.Recursive(16)`."
        )


def cuts_of(
    every: int, length: Value, *, start: int = 0, reverse: bool = False
) -> Value:
    """Before which steps the carry is cut, in the order of `xs`.

    Args:
        every: How many steps lie between two cuts.
        length: The number of steps.
        start: How many steps of the same loop were run before them.
        reverse: Whether the last element of `xs` comes first.

    Returns:
        A mark for each step: a NumPy array if the length is known, which is a constant
        of the program and takes no memory while that runs.

    >>> cuts_of(2, 5).tolist(), cuts_of(2, 3, start=2).tolist()
    ([False, False, True, False, True], [True, False, True])
    """
    xp = jnp if is_symbolic(length) else np
    steps = start + xp.arange(length)
    cuts = (steps > 0) & (steps % every == 0)
    return xp.flip(cuts) if reverse else cuts


def cut_before(carry: PyTree, is_cut: PyTree) -> PyTree:
    """The carry before a step, without a derivative if there is a cut."""

    def cut(x: Value) -> Value:
        if not (is_dynamic(x) and is_inexact(x)):
            return x
        return jnp.where(is_cut, lax.stop_gradient(x), x)

    return jax.tree.map(cut, carry)


def passed_back(
    owner: str, carry: PyTree, backward: Callable[[PyTree], PyTree]
) -> PyTree:
    """The carry before a step, whose cotangent a function is applied to."""
    moving, rest = eqx.partition(carry, lambda x: is_dynamic(x) and is_inexact(x))
    # In `shard_map`, each device has a cotangent of its own, of all leaves.
    axes = frozenset[str]().union(*map(axes_of, jax.tree.leaves(moving)))
    moving = jax.tree.map(lambda x: vary(x, axes), moving)

    @jax.custom_vjp
    def identity(moving: PyTree) -> PyTree:
        return moving

    def pull(_: None, cotangent: PyTree) -> tuple[PyTree]:
        return (_applied_to(owner, backward, cotangent),)

    identity.defvjp(lambda moving: (moving, None), pull)
    # Before anything runs, and not first in a gradient.
    jax.eval_shape(lambda moving: _applied_to(owner, backward, moving), moving)
    return eqx.combine(identity(moving), rest)


def _applied_to(
    owner: str, backward: Callable[[PyTree], PyTree], cotangent: PyTree
) -> PyTree:
    """The result of the function, which has to be like what it was given."""
    result = backward(cotangent)
    changes = [
        f"  {d.path}: {d.one} came in, {d.other} came out"
        for d in structure_differences(cotangent, result, "cotangent")
    ]
    if not changes:
        leaves = flatten(cotangent)[0], flatten(result)[0]
        changes = [
            f"  {path}: {describe(one)} came in, {describe(other)} came out"
            for path, one, other in zip(
                paths(cotangent, "cotangent"), *leaves, strict=True
            )
            if not _same_type(one, other)
        ]
    if changes:
        raise TypeError(
            f"{owner}: `backward` must return a cotangent of the same structure, "
            f"shapes and dtypes as it was given, but it changed them:\n"
            + "\n".join(changes)
        )
    return jax.tree.map(lambda x, like: vary(x, axes_of(like)), result, cotangent)


def _same_type(one: Value, other: Value) -> bool:
    if one is None or not is_dynamic(other):
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype
