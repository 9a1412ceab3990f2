"""`_row_order.py`: transposed `xs` are copied once on a CPU; nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec

import eqloop as el

from ...asserts import assert_close
from ...compiling import temp_bytes
from ...mapping.devices import mesh_of
from ...weights import normal

LENGTH, ROWS, WIDTH = 400, 8, 16
COPY = 4 * LENGTH * ROWS * WIDTH
W = normal(0, (WIDTH, WIDTH), np.dtype("float32")) / 8

# Where the steps are an axis that is not the first.
TRANSPOSED = {
    "swapaxes": ((ROWS, LENGTH, WIDTH), lambda x: x.swapaxes(0, 1)),
    "moveaxis": ((ROWS, WIDTH, LENGTH), lambda x: jnp.moveaxis(x, -1, 0)),
    "images": (
        (ROWS, LENGTH * WIDTH),
        lambda x: x.reshape(ROWS, LENGTH, WIDTH).transpose(1, 0, 2),
    ),
}
SCHEDULES = (
    el.Recursive(16),
    el.Chunked(20),
    el.Chunked(20, batch=20),
    el.Binomial(20),
    el.Budget("64KiB", measure=False),
)


def loss(schedule, transposed, w, x):
    step = lambda h, x: (jnp.tanh(h @ w + x), None)
    scan = el.Scan(step, schedule=schedule)
    return jnp.sum(scan(jnp.zeros((ROWS, WIDTH)), transposed(x))[0] ** 2)


def gradient(schedule, name="swapaxes"):
    _, transposed = TRANSPOSED[name]
    return jax.grad(lambda w, x: loss(schedule, transposed, w, x))


@pytest.mark.sampled
@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_they_are_copied_once(schedule, name):
    shape, _ = TRANSPOSED[name]
    assert temp_bytes(gradient(schedule, name), W, shape) < COPY + 2**17


def test_several_of_them_and_a_loop_that_stops():
    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x[0] * x[1]), None)
        scan = el.ScanWhile(
            lambda h: h[0, 0] < 2, step, max_steps=LENGTH, schedule=el.Recursive(16)
        )
        xs = [x.swapaxes(0, 1) for x in xs]
        return jnp.sum(scan(jnp.zeros((ROWS, WIDTH)), xs)[0] ** 2)

    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), "float32")
    assert temp_bytes(jax.grad(loss), W, [x, x]) < 2 * COPY + 2**17


def test_what_lies_in_order_is_not_copied():
    f = jax.grad(lambda w, x: loss(el.Recursive(16), lambda x: x, w, x))
    assert temp_bytes(f, W, (LENGTH, ROWS, WIDTH)) < COPY / 2


def test_it_changes_no_number_and_can_be_exported():
    x = normal(1, (ROWS, LENGTH, WIDTH), np.dtype("float32"))
    step = lambda w, h, x: (jnp.tanh(h @ w + x), None)
    plain = lambda w, x: lax.scan(
        lambda h, x: step(w, h, x), jnp.zeros((ROWS, WIDTH)), x.swapaxes(0, 1)
    )[0]
    expected = jax.grad(lambda w, x: jnp.sum(plain(w, x) ** 2))(W, x)
    of = jax.jit(gradient(el.Recursive(16)))
    assert_close(of(W, x), expected)
    exported = export.export(of)(W, x)
    assert "LayoutConstraint" not in exported.mlir_module()
    assert_close(exported.call(W, x), expected)
    both = lambda f: jax.vmap(lambda x: f(W, x))(jnp.stack([x, 2 * x]))
    assert_close(both(of)[0], expected)


def test_elsewhere_it_is_read_where_it_lies():
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), "float32")
    traced = jax.jit(gradient(el.Recursive(16))).trace(W, x)
    assert "LayoutConstraint" in traced.lower().as_text()
    assert "LayoutConstraint" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_what_is_split_over_devices_stays_split():
    split = NamedSharding(mesh_of(d=4), PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), "float32", sharding=split)
    compiled = jax.jit(gradient(el.Recursive(16))).lower(W, x).compile()
    assert "all-gather" not in compiled.as_text()
