"""The scans, as layers of a model on a mesh: what moves is what `lax.scan` moves."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close
from ..mapping.devices import mesh_of
from ..marks import slow

pytestmark = pytest.mark.sampled

LENGTH, BATCH, WIDTH = 12, 8, 16

SCHEDULES = (
    el.StoreAll(),
    slow(el.Chunked(4)),
    el.Recursive(3),
    slow(el.Binomial(3)),
    slow(el.Budget("24KiB")),
    el.Offload(el.Recursive(3)),
)

# The specifications of the carry, of xs, and of the two matrices of the cell.
LAYOUTS = {
    "batch": (P("data"), P(None, "data"), P(), P()),
    "hidden": (P(None, "model"), P(), P(None, "model"), P(None, "model")),
    "both": (
        P("data", "model"),
        P(None, "data"),
        P(None, "model"),
        P(None, "model"),
    ),
}
MESH = mesh_of(data=4, model=2)


class Cell(eqx.Module):
    """A recurrent cell of a whole batch, whose outputs are kept."""

    recur: jax.Array
    read: jax.Array

    def __call__(self, h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(h @ self.recur + x @ self.read)
        return h, jnp.mean(h, 1)


def lax_scan(cell: Cell) -> Any:
    return lambda h, xs: jax.lax.scan(lambda h, x: cell(h, x), h, xs)


def inputs(layout: str | None) -> tuple[Any, Any, Any]:
    """The cell, the carry and xs; on the mesh, if there is a layout."""
    draw = functools.partial(np.random.default_rng(0).normal, scale=0.3)
    shapes = ((BATCH, WIDTH), (LENGTH, BATCH, 4), (WIDTH, WIDTH), (4, WIDTH))
    arrays = [jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes]
    if layout is not None:
        shardings = [NamedSharding(MESH, spec) for spec in LAYOUTS[layout]]
        arrays = jax.device_put(arrays, shardings)
    h, xs, *weights = arrays
    return Cell(*weights), h, xs


def value_and_gradient(make: Any) -> Any:
    """A function of the cell, the carry and xs, that compares to one of any other."""

    def loss(args: Any) -> tuple[jax.Array, Any]:
        cell, h, xs = args
        last, ys = make(cell)(h, xs)
        return jnp.sum(last**2) + jnp.sum(jnp.sin(ys)), (last, ys)

    return lambda *args: jax.value_and_grad(loss, has_aux=True)(args)


@functools.cache
def compiled(schedule: Any, layout: str | None) -> tuple[Any, str]:
    """What a schedule computes, and the text of its program."""
    make = (
        lax_scan if schedule == "lax" else functools.partial(el.Scan, schedule=schedule)
    )
    args = inputs(layout)
    program = jax.jit(value_and_gradient(make)).lower(*args).compile()
    return program(*args), program.as_text()


COLLECTIVES = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"collective-broadcast)(?:-start)?\("
)


def moved(text: str) -> set[tuple[str, str]]:
    """What a program moves between devices or adds up: the operations, with shapes."""
    return {
        (kind, shape)
        for shapes, kind in COLLECTIVES.findall(text)
        for shape in re.findall(r"\w+\[[\d,]*\]", shapes)
    }


@pytest.mark.parametrize("layout", [slow("batch"), slow("hidden"), "both"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_nothing_moves_that_lax_scan_would_not_move(schedule, layout):
    found, text = compiled(schedule, layout)
    expected, _ = compiled("lax", None)
    assert_close(found, expected)
    _, plain = compiled("lax", layout)
    assert moved(text) <= moved(plain)
    _, (cell, h, xs) = found
    for x, spec in zip((h, xs, cell.recur, cell.read), LAYOUTS[layout], strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(MESH, spec), x.ndim)


def test_the_comparison_sees_moves():
    kinds = lambda layout: {kind for kind, _ in moved(compiled("lax", layout)[1])}
    assert kinds("batch") == {"all-reduce"}  # of the gradient of the weights
    assert "all-gather" in kinds("hidden")
