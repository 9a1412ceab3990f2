"""What takes the place of `equinox.internal.while_loop` and `scan`.

Their `buffers` say which arrays are written in place, and only so. Ours need not know:
such an array is an array of the carry like any other.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import eqloop as el

from ._lax import as_arrays
from ._variants import Variant


def replacements(variant: Variant) -> dict[str, Callable[..., Any]]:
    """Functions with the signatures of those in `equinox.internal`, by name."""

    def scan(
        f: Any,
        init: Any,
        xs: Any,
        length: int | None = None,
        *,
        buffers: Any = None,
        kind: Literal["lax", "checkpointed"],
        checkpoints: int | Literal["all"] | None = None,
    ) -> Any:
        init, xs = jax.tree.map(jnp.asarray, (init, xs))
        schedule = variant.schedule
        if kind == "checkpointed":
            schedule = _stored(checkpoints)
        return el.Scan(f, schedule=schedule)(init, xs, length=length)

    return {"while_loop": while_loop, "scan": scan}


def _stored(checkpoints: int | Literal["all"] | None) -> Any:
    if checkpoints == "all":
        return el.Chunked(1)
    return el.Recursive(2) if checkpoints is None else el.Binomial(checkpoints)


def while_loop(
    cond_fun: Any,
    body_fun: Any,
    init_val: Any,
    *,
    max_steps: int | None = None,
    buffers: Any = None,
    kind: Literal["lax", "checkpointed", "bounded"],
    checkpoints: int | None = None,
    base: int = 16,
) -> Any:
    """As `equinox.internal.while_loop`, by the loop of ours that stands for a kind."""
    init = as_arrays(init_val)
    if kind == "lax":
        return _forward(cond_fun, body_fun, init, max_steps)
    if kind == "bounded":
        if max_steps is None:
            raise ValueError("kind='bounded' requires `max_steps` to be specified")
        loop = el.BoundedWhileLoop(cond_fun, body_fun, max_steps=max_steps, base=base)
    else:
        settings = dict(checkpoints=checkpoints, max_steps=max_steps)
        loop = el.CheckpointedWhileLoop(cond_fun, body_fun, **settings)
    return loop(init)


def _forward(cond: Any, body: Any, init: Any, max_steps: int | None) -> Any:
    if max_steps is None:
        return el.WhileLoop(cond, body)(init)
    _, last = el.WhileLoop(
        lambda carry: jnp.logical_and(carry[0] < max_steps, cond(carry[1])),
        lambda carry: (carry[0] + 1, body(carry[1])),
    )((jnp.asarray(0), init))
    return last
