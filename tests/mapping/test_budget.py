"""Chunks that fit a budget, beside the memory that XLA says the programs take."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop.mapping import _fitting

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from ..weights import without_key


def mlp(width, depth):
    return without_key(eqx.nn.MLP, 8, 4, width, depth)


def pairwise(x):
    return jnp.sum(jnp.exp(-((x[:, None] - x[None]) ** 2)))


def recurrent(x):
    return lax.scan(lambda h, _: (jnp.tanh(h + x), h), x, None, 20)[1]


def newton(x):
    return lax.fori_loop(0, 5, lambda _, y: y - (y**2 - x) / (2 * y), x + 1.0)


FUNCTIONS = {
    "mlp": (mlp(64, 2), (8,)),
    "attention": (lambda x: jax.nn.softmax(x @ x.T) @ x, (16, 8)),
    "recurrent": (recurrent, (6,)),
    "pairs": (pairwise, (16,)),
}
MORE = {
    "narrow mlp": (mlp(8, 1), (8,)),
    "deep mlp": (mlp(16, 6), (8,)),
    "wide mlp": (mlp(256, 1), (8,)),
    "elementwise": (lambda x: jnp.sin(x) ** 2 + jnp.cos(x), (50,)),
    "softmax": (lambda x: jax.nn.softmax(jnp.outer(x, x)), (12,)),
    "sort": (lambda x: jnp.sort(jnp.sin(x)), (64,)),
    "cumulative": (lambda x: jnp.cumprod(1 + x**2), (64,)),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (64,)),
    "convolution": (lambda x: jnp.convolve(x, jnp.sin(x), "full"), (32,)),
    "outer": (lambda x: jnp.tanh(jnp.outer(x, jnp.sin(x))).sum(0), (24,)),
    "matrix power": (lambda x: x @ x @ x @ x, (12, 12)),
    "solve": (lambda x: jnp.linalg.solve(x @ x.T + jnp.eye(6), x), (6, 6)),
    "newton": (newton, (10,)),
    "integers": (lambda x: (jnp.round(x).astype(jnp.int32), x.sum()), (20,)),
    "half": (lambda x: jnp.tanh(jnp.outer(x, x).astype(jnp.bfloat16)), (20,)),
    "complex": (
        lambda x: jnp.abs(jnp.exp(lax.complex(jnp.zeros((16, 16)), jnp.outer(x, x)))),
        (16,),
    ),
}
ROWS = 2001


def programs(f, shape, chunk_size, **settings):
    """The bytes that a map takes, and those that its gradient does."""
    x = jax.ShapeDtypeStruct((ROWS, *shape), jnp.float32)
    chunked = el.ChunkedVmap(f, chunk_size, **settings)
    inexact = lambda x: eqx.filter(chunked(x), eqx.is_inexact_array)
    gradient = lambda x, ct: jax.vjp(inexact, x)[1](ct)
    ct = jax.eval_shape(inexact, x)
    return np.array([temp_bytes(inexact, x), temp_bytes(gradient, x, ct)])


@pytest.fixture
def sizes(monkeypatch):
    """The sizes that are found, in order."""
    search, found = _fitting.largest_that_fits, []

    def largest_that_fits(*args):
        size, used = search(*args)
        found.append(size)
        return size, used

    monkeypatch.setattr(_fitting, "largest_that_fits", largest_that_fits)
    return found


def check(f, shape, divide, sizes):
    whole, one = programs(f, shape, ROWS), programs(f, shape, 1)
    budget = int(max(one.max() * 1.5, whole.max() / divide))
    used = programs(f, shape, el.Budget(budget))
    assert (used <= budget).all()
    for kind, size in ((0, sizes[0]), (1, sizes[-1])):
        if used[kind] >= budget / 2 or size == ROWS:
            continue
        # The next size would be too large: XLA makes another program of it.
        assert programs(f, shape, _fitting._above(ROWS, size))[kind] > budget


@pytest.mark.parametrize("name", [slow("mlp"), slow("attention"), "recurrent", "pairs"])
def test_fits_and_uses_at_least_half(name, sizes):
    check(*FUNCTIONS[name], 20, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS | MORE)
@pytest.mark.parametrize("divide", [3, 100])
def test_fits_and_uses_at_least_half_of_each_budget(name, divide, sizes):
    check(*(FUNCTIONS | MORE)[name], divide, sizes)


def test_holds_for_the_whole_batch_under_vmap():
    f, shape = FUNCTIONS["mlp"]
    x = jax.ShapeDtypeStruct((4, 500, *shape), jnp.float32)
    ct = jax.ShapeDtypeStruct((4, 500, 4), jnp.float32)
    chunked = el.ChunkedVmap(f, el.Budget("200kB"))
    gradient = lambda x, ct: jax.vjp(jax.vmap(chunked), x)[1](ct)
    for used in (temp_bytes(jax.vmap(chunked), x), temp_bytes(gradient, x, ct)):
        assert 100_000 <= used <= 200_000


def test_holds_for_what_a_policy_stores():
    f, shape = FUNCTIONS["mlp"]
    stored = programs(f, shape, 1, policy="save_dots")[1]
    budget = 2 * stored
    used = programs(f, shape, el.Budget(int(budget)), policy="save_dots")[1]
    assert used <= budget


def test_holds_for_what_is_added_up():
    f, shape = FUNCTIONS["mlp"]
    run = el.ChunkedVmap(lambda x: f(x).sum(), el.Budget("100kB"), reduce="mean")
    for rows in (100, 100_000):
        x = jax.ShapeDtypeStruct((rows, *shape), jnp.float32)
        assert temp_bytes(jax.grad(run), x) <= 100_000


def test_in_a_map_and_around_one():
    x = jnp.sin(jnp.arange(60.0)).reshape(5, 4, 3)
    f = lambda x: jnp.tanh(jnp.outer(x, x))
    inner, outer = el.Budget(200), el.Budget(1000)
    nested = el.ChunkedVmap(el.ChunkedVmap(f, inner), outer)
    total = lambda g: jax.grad(lambda x: jnp.sum(g(x) ** 2))
    run = lambda x: (total(nested)(x), total(jax.vmap(jax.vmap(f)))(x))
    assert_close(*jax.jit(run)(x))


def test_what_cannot_be_compiled_by_itself_is_estimated():
    def centred(x):
        return x - lax.pmean(jnp.outer(x, x).sum(0), "batch")

    x = jnp.arange(24.0).reshape(2, 4, 3)
    run = lambda f: jax.vmap(f, axis_name="batch")(x)
    chunked = el.ChunkedVmap(centred, el.Budget(300))
    assert_close(*jax.jit(lambda: (run(chunked), run(jax.vmap(centred))))())


def test_without_a_figure_of_the_compiler_all_values_are_counted(monkeypatch):
    monkeypatch.setattr(_fitting, "temporary_bytes", lambda run, *types: None)
    x = jnp.ones((12, 3))
    run = lambda size: el.ChunkedVmap(lambda x: jnp.outer(x, x).sum(0), size)(x)
    assert_close(run(el.Budget(700)), run(12))


def test_is_found_once_for_maps_that_are_alike(monkeypatch):
    compiled = []
    count = lambda run, *types: compiled.append(run) or 7
    monkeypatch.setattr(_fitting, "temporary_bytes", count)
    for _ in range(2):
        el.ChunkedVmap(lambda x: jnp.sin(x) ** 7, el.Budget(12345))(jnp.ones((9, 2)))
    assert len(compiled) == 1


def test_what_is_found_is_kept_for_other_processes(monkeypatch, tmp_path):
    compiled, path = [], tmp_path / "measurements.json"
    count = lambda run, *types: compiled.append(run) or 7
    monkeypatch.setattr(_fitting, "temporary_bytes", count)
    try:
        for file in (path, None, path):
            el.measurements(file)
            budget = el.Budget(12345 + len(compiled))  # another one asks for the same
            el.ChunkedVmap(lambda x: jnp.sin(x) ** 5, budget)(jnp.ones((9, 2)))
    finally:
        el.measurements(None)
    assert len(compiled) == 2


def test_is_found_anew_for_maps_that_only_print_alike(monkeypatch):
    compiled = []
    count = lambda run, *types: compiled.append(run) or 7
    monkeypatch.setattr(_fitting, "temporary_bytes", count)

    def run(value):
        held = np.zeros((33, 33), np.float32)
        held[16, 16] = value
        f = jax.jit(lambda x: x @ held)
        el.ChunkedVmap(f, el.Budget(12345))(jnp.ones((9, 33)))
        return len(compiled)

    assert [run(value) for value in (0.5, 0.5, 0.6)] == [1, 1, 2]
