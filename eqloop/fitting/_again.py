"""Runs a part again on the way back, whether or not XLA heeds barriers.

`jax.checkpoint` puts a barrier between a value and the same value computed again. Where
XLA drops barriers, it sees that both are equal and keeps the first. So there, what is
computed again is computed from values that depend on the cotangents, and that turn out
to be the same:

    x' = where(c > 1 and c < -1, 0, x)    # for an entry c of a cotangent

This also has it wait for the cotangents.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import dtypes, lax

from .._arrays import Flags, axes_of, explicit_sharding, is_inexact, is_key, pick, put
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
        never = _never(cts)
        tree, is_shown = structures[-1]
        shown, others = map(iter, kept)
        leaves = [next(shown) if s else _hidden(next(others), never) for s in is_shown]
        found = iter(jax.tree.unflatten(tree, leaves)(cts))
        return tuple(next(found) if moves else None for moves in moving)

    structures: list[tuple[Any, list[bool]]] = []
    apart.defvjp(there, back)
    return apart


def _never(cts: list[Value]) -> jax.Array:
    """What is false, and depends on all cotangents: so it waits for them."""
    never = jnp.zeros((), bool)
    for ct in cts:
        if not is_inexact(jax.typeof(ct)) or not ct.size:
            continue
        is_split = explicit_sharding(ct) is not None
        # Of an array that is split over an explicit mesh no device can name an entry.
        entry = jnp.real(jnp.sum(ct) if is_split else ct[(0,) * ct.ndim])
        never = never | ((entry > 1) & (entry < -1))
    return never


def _hidden(x: Any, never: jax.Array) -> Any:
    """The same array, which XLA does not know."""
    # A value that is the same on all devices has to stay so.
    if jax.typeof(x).dtype == dtypes.float0 or not axes_of(never) <= axes_of(x):
        return x
    if is_key(x):
        data = _hidden(jax.random.key_data(x), never)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return lax.select(never, jnp.zeros_like(x), x)
