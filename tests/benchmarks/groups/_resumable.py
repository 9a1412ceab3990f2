"""A loop in segments that are stored, beside one compiled call."""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

import eqloop as el

from .._claims import time_ratio
from .._comparison import Comparison
from .._measure import Case

WIDTH, STEPS, EVERY = 512, 320_000, 80_000


def resumable() -> Sequence[Comparison]:
    """What it costs to store a carry each second or so."""
    weight = jr.orthogonal(jr.key(0), WIDTH)
    args = (weight, jnp.ones(WIDTH))
    whole, segments = "Scan, one compiled call", f"Resumable, every {EVERY} steps"
    cases = [
        Case(whole, _at_once, args, is_compiled=False),
        Case(segments, _in_segments, args, is_compiled=False),
    ]
    title = f"{STEPS} products of a {WIDTH} x {WIDTH} matrix, in segments of a second"
    claims = [time_ratio(segments, whole, 1.03, waits=True)]
    return [Comparison(title, cases, claims, rounds=11)]


def _scan(weight: jax.Array) -> el.Scan[Any, Any]:
    return el.Scan(_step(weight))


def _step(weight: jax.Array) -> Callable[..., Any]:
    return lambda h, _: (jnp.tanh(weight @ h), None)


def _at_once(weight: jax.Array, h: jax.Array) -> jax.Array:
    # A new function each time, so that it is compiled each time, as segments are.
    return jax.jit(lambda weight, h: _scan(weight)(h, length=STEPS)[0])(weight, h)


def _in_segments(weight: jax.Array, h: jax.Array) -> jax.Array:
    with tempfile.TemporaryDirectory() as directory:
        run = el.Resumable(_scan(weight), directory, every=EVERY)
        return run(h, length=STEPS)[0]
