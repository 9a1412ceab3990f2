"""A progress bar, beside jax-tqdm's."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import lax

import eqloop as el

from .._claims import Claim, Measurements
from .._comparison import Comparison
from .._measure import Case

STEPS, WIDTH = 20_000, 256


def progress() -> Sequence[Comparison]:
    """What a bar with default settings adds to a cheap step."""
    weight = jr.orthogonal(jr.key(0), WIDTH)
    args = (weight, jnp.ones(WIDTH))
    cases = [
        Case("`lax.scan`", _plain, args),
        Case("jax-tqdm", _jax_tqdm, args, requires="jax_tqdm"),
        Case("Scan, no bar", _ours(None), args),
        Case("Scan, with a bar", _ours(True), args),
        Case("CheckpointedScan, with a bar", _ours(True, el.Recursive(16)), args),
    ]
    title = f"Progress bars: {STEPS} products of a {WIDTH} x {WIDTH} matrix"
    return [Comparison(title, cases, [_added(0.5)], tolerance=0.0, rounds=31)]


def _added(at_most: float) -> Claim:
    ours, theirs, plain = "Scan, with a bar", "jax-tqdm", "`lax.scan`"

    def figure(measured: Measurements) -> float:
        seconds = lambda name: measured[name].seconds - measured[plain].seconds
        return float(np.median(seconds(ours)) / np.median(seconds(theirs)))

    text = f"added time, {ours} over {theirs}"
    return Claim(text, figure, at_most, "x", (ours, theirs, plain))


def _step(weight: jax.Array) -> Callable[..., Any]:
    return lambda h, x: (weight @ h, None)


def _plain(weight: jax.Array, h: jax.Array) -> jax.Array:
    return lax.scan(_step(weight), h, length=STEPS)[0]


def _ours(progress: Any, schedule: Any = None) -> Callable[..., jax.Array]:
    def run(weight: jax.Array, h: jax.Array) -> jax.Array:
        scan = el.Scan(_step(weight), schedule=schedule, progress=progress)
        return scan(h, length=STEPS)[0]

    return run


def _jax_tqdm(weight: jax.Array, h: jax.Array) -> jax.Array:
    from jax_tqdm import scan_tqdm

    return lax.scan(scan_tqdm(STEPS)(_step(weight)), h, jnp.arange(STEPS))[0]
