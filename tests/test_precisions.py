"""Every loop, map and branch at every precision: numbers near, and dtypes as they were.

With 64 bits enabled, Python's numbers and JAX's counters become wider than the arrays
beside them, so there the narrow dtypes are tried as well.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from .marks import slow
from .schedules import EVERY_KIND, SLOTS

pytestmark = pytest.mark.sampled

LENGTH = 5

Case = tuple[Callable[..., Any], Callable[..., Any]]


def step(h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.sin(h + x) / 2
    return h, h * x


def total(h: Any, ys: Any) -> Any:
    return h + jnp.sum(ys)


def written_ys(h: Any, xs: Any) -> Any:
    ys = []
    for x in xs:
        h, y = step(h, x)
        ys.append(y)
    return jnp.stack(ys)


def written_carry(h: Any, xs: Any) -> Any:
    for x in xs:
        h, _ = step(h, x)
    return h


def written_scan(h: Any, xs: Any) -> Any:
    return total(written_carry(h, xs), written_ys(h, xs))


def scan(schedule: el.checkpointing.AbstractSchedule) -> Case:
    return lambda h, xs: total(*el.Scan(step, schedule=schedule)(h, xs)), written_scan


def while_loop(kind: Any, **settings: Any) -> Case:
    def run(h: Any, xs: Any) -> Any:
        cond = lambda carry: carry[0] < LENGTH
        body = lambda carry: (carry[0] + 1, step(carry[1], xs[carry[0]])[0])
        return kind(cond, body, **settings)((0, h))[1]

    return run, written_carry


def rows(transform: Callable[..., Any]) -> Case:
    run = lambda h, xs: jnp.sum(transform(lambda x: jnp.sin(h * x))(xs))
    return run, lambda h, xs: jnp.sum(jnp.sin(h * xs))


def mean_of_rows(h: Any, xs: Any) -> Any:
    return el.ChunkedVmap(lambda x: jnp.sin(h * x), 2, reduce="mean")(xs)


def prefixes(h: Any, xs: Any) -> Any:
    return jnp.sum(el.AssociativeScan(jnp.multiply, chunk_size=2)(jnp.sin(h + xs)))


class Layer(eqx.Module):
    x: Any

    def __call__(self, h: Any) -> Any:
        return step(h, self.x)[0]


def branches(h: Any, xs: Any) -> Any:
    h = el.Cond(jnp.sin, jnp.cos)(h > 0, h)
    h = el.Switch([jnp.sin, lambda h: h * xs[0]])(1, h)
    return el.IfElse([jnp.cos, jnp.sin])([h < 0, h >= 0], h)


SCHEDULES = (*EVERY_KIND, el.Budget("1MiB"), el.Offload(SLOTS))
CASES: dict[str, Case] = {str(schedule): scan(schedule) for schedule in SCHEDULES} | {
    "SlicedScan": (
        lambda h, xs: jnp.sum(el.SlicedScan(step, step=2)(h, xs)[1]),
        lambda h, xs: jnp.sum(written_ys(h, xs)[::2]),
    ),
    "BoundedWhileLoop": while_loop(el.BoundedWhileLoop, max_steps=9, base=2),
    "CheckpointedWhileLoop": while_loop(el.CheckpointedWhileLoop, checkpoints=2),
    "CheckpointedForLoop": rows(lambda f: el.CheckpointedForLoop(f, base=2)),
    "Map": rows(el.Map),
    "ChunkedVmap": rows(lambda f: el.ChunkedVmap(f, 2)),
    "mean of rows": (mean_of_rows, lambda h, xs: jnp.mean(jnp.sin(h * xs))),
    "AssociativeScan": (
        prefixes,
        lambda h, xs: jnp.sum(jnp.cumprod(jnp.sin(h + xs))),
    ),
    "StackedLayers": (lambda h, xs: el.StackedLayers(Layer(xs))(h), written_carry),
    "branches": (branches, lambda h, xs: jnp.sin(jnp.sin(h) * xs[0])),
    "Remat": (el.Remat(written_carry, policy="save_nothing"), written_carry),
}


def results(f: Callable[..., Any], h: Any, xs: Any) -> Any:
    """The value and its derivatives: in reverse mode, and of these in forward mode."""
    gradient = jax.grad(f, (0, 1))
    return f(h, xs), jax.jvp(gradient, (h, xs), (h, xs))


# A wide and a narrow dtype take turns; each week every case is tried with all of them.
DTYPES = [
    ("bfloat16", True),
    ("float64", True),
    ("bfloat16", False),
    ("float16", True),
    ("float32", True),
]
PAIRS = [
    (name, *dtype) if i % 2 == j else slow(name, *dtype)
    for i, name in enumerate(CASES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "dtype", "x64"), PAIRS)
def test_numbers_are_near_and_dtypes_stay(name, dtype, x64):
    run, written = CASES[name]
    with jax.enable_x64(x64):
        h, xs = jnp.asarray(0.4, dtype), jnp.linspace(0.5, 1.5, LENGTH, dtype=dtype)
        found = jax.jit(results, static_argnums=0)(run, h, xs)
        wide = [x.astype("float64" if x64 else "float32") for x in (h, xs)]
        expected = jax.jit(results, static_argnums=0)(written, *wide)
    near = 16 * float(jnp.finfo(dtype).eps)
    for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.dtype == dtype
        scale = np.max(np.abs(e))
        np.testing.assert_allclose(np.asarray(a, e.dtype), e, atol=near * scale)
