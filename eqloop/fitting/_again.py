"""Runs a part again on the way back, whether or not XLA heeds barriers.

`jax.checkpoint` puts a barrier between a value and the same value computed again. Where
XLA drops barriers, it sees that both are equal and keeps the first. So there, what is
computed again is computed from values that wait for the cotangents (`waiting`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import Flags, as_arrays, number_of, pick, put, split, waiting
from .._compat import drops_barriers
from .._programs import run, without_array_literals
from .._types import PyTree, Value

Program = Callable[..., Sequence[Value]]


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the inputs of a part are.

    Attributes:
        weights: Which of these are inputs of the whole function. To hide them from XLA
            would be to copy them.
    """

    moving: Flags
    weights: Flags


def again(f: Program, policy: Callable[..., bool] | None, roles: Roles) -> Program:
    """A function that is run again on the way back, but for what the policy keeps."""
    program, moving = jax.checkpoint(f, policy=policy), roles.moving
    if not drops_barriers() or not any(moving):
        return program

    @jax.custom_vjp
    def apart(*inputs: Value) -> Sequence[Value]:
        return f(*inputs)

    def there(*inputs: Value) -> tuple[Sequence[Value], PyTree]:
        of_moving = lambda *given: program(*put(inputs, moving, given))
        outs, pull = jax.vjp(of_moving, *pick(inputs, moving))
        shown = pick(inputs, roles.weights)
        leaves, tree = jax.tree.flatten(pull)
        is_shown = [any(leaf is x for x in shown) for leaf in leaves]
        if all(is_shown):
            is_shown = [False] * len(leaves)
        kept = pick(leaves, is_shown), pick(leaves, [not s for s in is_shown])
        structures.append((tree, is_shown))
        return outs, kept

    def back(kept: PyTree, cts: list[Value]) -> tuple[PyTree, ...]:
        number = number_of(cts)
        tree, is_shown = structures[-1]
        shown, others = map(iter, kept)
        leaves = [next(shown) if s else waiting(next(others), number) for s in is_shown]
        found = iter(jax.tree.unflatten(tree, leaves)(cts))
        return tuple(next(found) if has else None for has in moving)

    structures: list[tuple[Any, list[bool]]] = []
    apart.defvjp(there, back)
    return apart


def twice(program: jex.ClosedJaxpr, roles: Roles) -> Program:
    """A program that is run once for its value, and once more for its gradient.

    These share nothing, so the gradient is as if nobody wanted the value.
    """

    @jax.custom_vjp
    def apart(*inputs: Value) -> Sequence[Value]:
        return run(program, *inputs)

    def there(*inputs: Value) -> tuple[Sequence[Value], PyTree]:
        return _hidden(program, inputs), inputs

    def back(inputs: PyTree, cts: list[Value]) -> tuple[PyTree, ...]:
        of_moving = lambda *given: run(program, *put(inputs, roles.moving, given))
        _, pull = jax.vjp(of_moving, *pick(inputs, roles.moving))
        found = iter(pull(cts))
        return tuple(next(found) if has else None for has in roles.moving)

    apart.defvjp(there, back)
    return apart


def _hidden(program: jex.ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """The outputs of a program of which XLA does not see that it is that program."""
    # Numbers as well: XLA shares an array that is full of one, and so writes it.
    program = without_array_literals(program, numbers=True)
    pairs = zip(program.consts, program.jaxpr.constvars, strict=True)
    consts = [jnp.asarray(x, v.aval.dtype) if np.isscalar(x) else x for x, v in pairs]
    values = [*as_arrays(consts), *inputs]
    if drops_barriers():
        number = number_of(inputs)
        values = [waiting(x, number) for x in values]
    else:
        values = lax.optimization_barrier(values)
    consts, inputs = split(values, len(consts))
    return jax.core.eval_jaxpr(program.jaxpr, consts, *inputs)
