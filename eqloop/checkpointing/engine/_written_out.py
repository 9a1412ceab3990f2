"""A loop there and a loop back with every carry kept in between, for JAX to derive."""

import jax
import jax.numpy as jnp
from jax import lax

from ..._partition import Arrays
from ..._typecheck import PyTree
from ..._types import Index, Value
from ._back import Back, Ends, Inputs, Taken
from ._loop import Loop, element, stack_of
from ._step import Step


def there_and_back(
    back: Back, step: Step, loop: Loop, inputs: Inputs, ends: Ends
) -> Taken:
    """What a way back gives in the end.

    It takes memory for every carry, and so it is for what cannot be had otherwise: the
    cotangents of a reversal that is not linear in what it carries back.

    Args:
        back: What the way back does to a step.
        step: The step of the loop there.
        loop: The loop.
        inputs: Consts, the initial carry and `xs`.
        ends: What is carried back from the end, and what the steps get besides.
    """
    (consts, init, xs), (carried, zs) = inputs, ends
    xs = [jnp.moveaxis(x, axis, 0) for x, axis in zip(xs, loop.x_axes, strict=True)]
    one = loop.part(1)

    def move(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        return step(consts, carry, x)[0], carry

    def take(state: tuple[list[Value], list[Value]], at: PyTree) -> PyTree:
        carried, sums = state
        carry, x, z = at
        x = [jnp.expand_dims(e, axis) for e, axis in zip(x, loop.x_axes, strict=True)]
        z = [stack_of(e, 1) for e in z]
        taken = back(one, (consts, carry, x), (carried, z))
        axes = [loop.x_axes[i] for i in back.x_of]
        given = [jnp.squeeze(e, axis) for e, axis in zip(taken.xs, axes, strict=True)]
        sums = [a + b for a, b in zip(sums, taken.sums, strict=True)]
        return (taken.carried, sums), given

    # The order of `xs` and of the rows is that of the steps, or the other way round.
    carry, carries = lax.scan(move, list(init), xs, loop.length, reverse=loop.reverse)
    del carry
    sums = [jnp.zeros_like(consts[i]) for i in back.const_of]
    (carried, sums), given = lax.scan(
        take,
        (list(carried), sums),
        (carries, xs, _of_all_steps(loop, zs)),
        loop.length,
        reverse=not loop.reverse,
    )
    axes = [loop.x_axes[i] for i in back.x_of]
    return Taken(
        sums,
        carried,
        [jnp.moveaxis(x, 0, axis) for x, axis in zip(given, axes, strict=True)],
    )


def _of_all_steps(loop: Loop, zs: Arrays) -> list[Value]:
    """What each step gets: zeros where there is no row for it."""
    if loop.kept is None:
        return list(zs)

    def of_step(index: Index) -> list[Value]:
        row, is_kept = loop.row(index)
        at = [element(z, row) for z in zs]
        return [jnp.where(is_kept, z, jnp.zeros_like(z)) for z in at]

    return jax.vmap(of_step)(jnp.arange(loop.length, dtype=jnp.int32))
