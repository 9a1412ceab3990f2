"""Nothing keeps a tracer of a trace that is over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import hijax

import eqloop as el

from .marks import slow

XS = jnp.ones(4)


def scanned(schedule: Any) -> Callable[[Any], Any]:
    step = lambda h, x: (jnp.sin(h) * x, h)
    return lambda h: el.Scan(step, schedule=schedule)(h, XS)[0]


def while_true(h: Any) -> Any:
    body = lambda carry: (carry[0] + 1, jnp.sin(carry[1]))
    return el.CheckpointedWhileLoop(lambda carry: carry[0] < 3, body)((0, h))[1]


@pytest.mark.skipif(
    not hasattr(hijax, "HiPrim"),
    reason="JAX 0.10 keeps a tracer of the last equation that reads from any primitive "
    "that is defined outside of it",
)
@pytest.mark.parametrize(
    "f",
    [
        scanned(el.StoreAll()),
        scanned(el.Recursive(2)),
        scanned(el.Binomial(2)),
        while_true,
        lambda h: jnp.sum(el.ChunkedVmap(lambda x: jnp.sin(x * h), 3)(XS)),
    ],
    ids=["StoreAll", "Recursive", "Binomial", "while", "map"],
)
# A Hessian has a gradient in it.
@pytest.mark.parametrize("mode", [lambda f: f, slow(jax.grad), jax.hessian])
def test_nothing_leaks(f: Any, mode: Any):
    # It raises if a tracer is left.
    with jax.checking_leaks():
        jax.jit(mode(f))(0.5)
