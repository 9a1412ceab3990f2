"""Runs a part again on the way back, whether or not XLA heeds barriers.

`jax.checkpoint` puts a barrier between a value and the same value computed again. Where
XLA drops barriers, it sees that both are equal and keeps the first. So there, what is
computed again is computed from values that wait for the cotangents (`waiting`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from .._arrays import Flags, number_of, pick, put, waiting
from .._compat import drops_barriers
from .._types import PyTree, Value

Program = Callable[..., list[Value]]


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
    run, moving = jax.checkpoint(f, policy=policy), roles.moving
    if not drops_barriers() or not any(moving):
        return run

    @jax.custom_vjp
    def apart(*inputs: Value) -> list[Value]:
        return f(*inputs)

    def there(*inputs: Value) -> tuple[list[Value], PyTree]:
        of_moving = lambda *given: run(*put(inputs, moving, given))
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
        return tuple(next(found) if moves else None for moves in moving)

    structures: list[tuple[Any, list[bool]]] = []
    apart.defvjp(there, back)
    return apart
