"""Maps that add up their rows: the gradient of a mean, from chunk to chunk."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow_if
from ..weights import without_key

pytestmark = pytest.mark.sampled

W = jnp.cos(jnp.arange(6.0)).reshape(2, 3)
X = jnp.sin(jnp.arange(21.0)).reshape(7, 3)


def loss(w, x):
    return jnp.sum(jnp.tanh(w @ x) ** 2)


def mean_of_all(w, x):
    return jax.vmap(loss, (None, 0))(w, x).mean()


SETTINGS = {
    "chunks that divide": {"chunk_size": 1},
    "the first one shorter": {"chunk_size": 3},
    "all at once": {"chunk_size": 7},
    "a policy": {"chunk_size": 1, "policy": "save_dots"},
    "a policy, the first one shorter": {"chunk_size": 3, "policy": "save_dots"},
    "a budget": {"chunk_size": el.Budget(400)},
}

MODES = {
    "value": lambda f: f(W, X),
    "gradient": lambda f: jax.grad(f, (0, 1))(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), (W, X)),
    "hessian": lambda f: jax.hessian(f)(W, X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None))(
        jnp.stack([W, -W]), X
    ),
}


@pytest.fixture(scope="module")
def expected():
    return jax.jit(lambda: {name: mode(mean_of_all) for name, mode in MODES.items()})()


SLOW = {"chunks that divide", "a policy", "all at once"}


@pytest.mark.parametrize("name", slow_if(SLOW.__contains__, SETTINGS))
def test_is_the_mean_of_all_rows_in_every_mode(name, expected):
    mean = el.ChunkedVmap(loss, in_axes=(None, 0), reduce="mean", **SETTINGS[name])
    run = lambda: {name: mode(mean) for name, mode in MODES.items()}
    assert_close(jax.jit(run)(), expected)


NUMBERS = {
    "float32": jnp.linspace(-1, 2, 11),
    "bfloat16": jnp.ones(4001, jnp.bfloat16),  # of which the sum is rounded, once
    "float16": jnp.full(2111, 0.5, jnp.float16),
    "complex64": jnp.linspace(-1, 2, 11) * (1 + 2j),
    "int8": jnp.arange(100, 127, dtype=jnp.int8),
    "uint8": jnp.arange(235, 256, dtype=jnp.uint8),
    "int32": jnp.arange(11) - 4,
    "bool": jnp.arange(11) % 3 == 0,
    "rows of several": jnp.arange(33.0).reshape(11, 3),
    "a single row": jnp.arange(3.0)[None],
    "none": jnp.zeros((0, 3)),
}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_is_what_numpy_makes_of_each_dtype(reduce):
    whole = {"sum": jnp.sum, "mean": jnp.mean}[reduce]
    run = lambda x: (el.ChunkedVmap(lambda x: x, 5, reduce=reduce)(x), whole(x, 0))
    for found, expected in jax.jit(lambda: list(map(run, NUMBERS.values())))():
        assert_close(found, expected)


def test_each_result_by_itself():
    reduce = {"loss": "mean", "hits": "sum", "guess": None, "shared": "sum"}
    reduce |= {"rows": "sum", "half": "mean"}

    def row(x):
        out = {"loss": x**2, "hits": x > 2, "guess": [x, "static"], "shared": W}
        return out | {"rows": 1, "half": 0.5}

    out_axes = {"loss": 0, "hits": 0, "guess": -1, "shared": None}
    out_axes |= {"rows": 0, "half": 0}
    out = el.ChunkedVmap(row, 3, reduce=reduce, out_axes=out_axes)(jnp.arange(7.0))
    x = jnp.arange(7.0)
    expected = {
        "loss": jnp.mean(x**2),
        "hits": jnp.sum(x > 2),
        "guess": [x, "static"],
        "shared": W,
        "rows": jnp.int32(7),
        "half": jnp.float32(0.5),
    }
    assert_close(out, expected)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4])
def test_a_row_counts_once_where_f_is_singular(chunk_size):
    scaled = el.ChunkedVmap(
        lambda w, x: jnp.sqrt(w * x), chunk_size, in_axes=(None, 0), reduce="sum"
    )
    assert jax.grad(scaled)(0.0, jnp.ones(5)) == jnp.inf
    assert jax.grad(lambda x: scaled(1.0, x))(jnp.zeros(5)).tolist() == [jnp.inf] * 5


def test_accumulates_the_gradient_of_a_module():
    mlp = without_key(eqx.nn.MLP, 3, 1, 8, 1)
    one = lambda mlp, x: jnp.sum(mlp(x) ** 2)
    chunked = el.ChunkedVmap(one, 3, in_axes={"mlp": None}, reduce="mean")
    whole = lambda mlp, x: jnp.mean(jax.vmap(lambda x: one(mlp, x))(x))
    both = lambda mlp: [eqx.filter_value_and_grad(f)(mlp, X) for f in (chunked, whole)]
    assert_close(*eqx.filter_jit(both)(mlp))


def test_memory_is_that_of_one_chunk_whatever_the_number_of_rows():
    mlp = without_key(eqx.nn.MLP, 4, 1, 32, 2, jax.nn.silu)
    params, static = eqx.partition(mlp, eqx.is_array)
    one = lambda params, x: eqx.combine(params, static)(x)[0] ** 2
    chunked = el.ChunkedVmap(one, 256, in_axes=(None, 0), reduce="mean")
    whole = lambda params, x: jnp.mean(jax.vmap(one, (None, 0))(params, x))

    def temporary(mean, rows):
        return temp_bytes(jax.value_and_grad(mean), params, (rows, 4))

    of_chunk = temporary(whole, 256)
    assert temporary(chunked, 512) <= 1.3 * of_chunk
    assert temporary(chunked, 10**6 + 1) <= 1.3 * of_chunk


def test_nothing_is_padded():
    seen = []

    def row(x):
        jax.debug.callback(lambda x: seen.append(int(x)), x)
        return x

    assert int(el.ChunkedVmap(row, 4, reduce="sum")(jnp.arange(1, 12))) == 66
    jax.effects_barrier()
    assert sorted(seen) == list(range(1, 12))
