"""How long it takes to trace the gradient of loops that are given a schedule."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import eqloop as el

from .._claims import compile_ratio
from .._comparison import Comparison
from .._measure import Case

LEAVES, WIDTH, LENGTH = 50, 16, 64

# How much longer it may take than without a schedule.
AT_MOST = 1.5


def reschedule() -> Iterator[Comparison]:
    """A training step of many leaves, and one with a scan in each of its steps."""
    params = {f"w{i}": jnp.eye(WIDTH) for i in range(LEAVES)}
    args = (params, jnp.ones((LENGTH, WIDTH)))
    for what, loss in (("a scan", _scan), ("a scan of scans", _scan_of_scans)):
        schedules = el.StoreAll(), el.Recursive(4), el.Binomial(8)
        functions = {"`lax.scan`": loss} | {
            f"`Reschedule`, `{schedule}`": el.Reschedule(loss, schedule)
            for schedule in schedules
        }
        yield Comparison(
            f"The gradient of {what} with {LEAVES} leaves, traced",
            [
                Case(n, _traced(f), args, is_compiled=False)
                for n, f in functions.items()
            ],
            [compile_ratio(n, "`lax.scan`", AT_MOST) for n in list(functions)[1:]],
            rounds=3,
            compile_rounds=7,
        )


def _traced(name: str, f: Any, args: Any) -> Case:
    """Traces a gradient, anew each time, and runs nothing."""

    def trace(params: Any, xs: Any) -> jax.Array:
        jax.jit(jax.grad(lambda params, xs: f(params, xs))).trace(params, xs)
        return jnp.zeros(())

    return Case(name, trace, args, is_compiled=False)


def _step(params: Any, h: Any, x: Any) -> Any:
    return {name: jnp.tanh(w @ h[name] + x) for name, w in params.items()}


def _loss(params: Any, xs: jax.Array, step: Any) -> jax.Array:
    h, _ = lax.scan(step, {name: jnp.zeros(WIDTH) for name in params}, xs)
    return sum((jnp.sum(leaf**2) for leaf in h.values()), jnp.zeros(()))


def _scan(params: Any, xs: jax.Array) -> jax.Array:
    return _loss(params, xs, lambda h, x: (_step(params, h, x), None))


def _scan_of_scans(params: Any, xs: jax.Array) -> jax.Array:
    def step(h: Any, x: jax.Array) -> tuple[Any, None]:
        return lax.scan(lambda h, _: (_step(params, h, x), None), h, length=16)[0], None

    return _loss(params, xs, step)
