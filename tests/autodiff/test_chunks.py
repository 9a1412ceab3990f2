"""Jacobians and Hessians in chunks: the same, within the memory of a chunk."""

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes

pytestmark = pytest.mark.sampled

SIZES = [3, 100]
X = {"a": jnp.linspace(-1.0, 1.0, 4).reshape(2, 2), "b": jnp.array([0.3])}


def f(x):
    y = jnp.tanh(x["a"] @ x["a"] * x["b"][0])
    return {"y": y[:, 0], "z": jnp.sum(y) ** 2, "static": "s"}


def of_arrays(x):
    out = f(x)
    return {"y": out["y"], "z": out["z"]}


def losses(x):
    return x["a"] ** 3 * x["b"][0], jnp.sum(x["b"] ** 2)


@pytest.mark.parametrize(
    ("transform", "function", "of_jax"),
    [
        (el.JacRev, f, jax.jacrev(of_arrays)),
        (el.JacFwd, f, jax.jacfwd(of_arrays)),
        (el.Jacobian, f, jax.jacrev(of_arrays)),
        (el.Hessian, losses, jax.hessian(losses)),
    ],
    ids=["JacRev", "JacFwd", "Jacobian", "Hessian"],
)
def test_chunks_of_every_size(transform, function, of_jax):
    @jax.jit
    def all_sizes(x):
        return [transform(function, chunk_size=size)(x) for size in SIZES]

    expected = jax.jit(of_jax)(X)
    if function is f:
        expected = expected | {"static": None}
    for derivative in all_sizes(X):
        assert_close(derivative, expected)


@pytest.mark.parametrize("transform", [el.JacRev, el.JacFwd])
def test_value_and_aux_in_chunks(transform):
    g = lambda x: (f(x)["y"], x["b"])
    settings = dict(has_aux=True, return_value=True, chunk_size=2)
    (value, aux), jacobian = jax.jit(transform(g, **settings))(X)
    assert_close(jacobian, jax.jit(jax.jacrev(lambda x: g(x)[0]))(X))
    assert_close((value, aux), g(X))


def test_outputs_of_no_size_and_of_several():
    x = jnp.arange(1.0, 4.0)
    g = lambda sizes, x: [jnp.full(size, 2.0) * x[0] * x[-1] for size in sizes]
    cases = [((0,), 1), ((3, 0, 1), 3), ((2, 2), 3)]

    @jax.jit
    def both(x):
        chunks = lambda sizes, c: el.JacRev(lambda x: g(sizes, x), chunk_size=c)(x)
        whole = lambda sizes, c: jax.jacfwd(lambda x: g(sizes, x))(x)
        return [(chunks(*case), whole(*case)) for case in cases]

    for got, expected in both(x):
        assert_close(got, expected)


def test_jacobian_takes_the_mode_with_fewer_sweeps():
    is_forward = lambda g, size: el.Jacobian(g)._is_forward(
        el.Jacobian(g)._open((jnp.ones(size),), {})
    )
    assert is_forward(lambda x: jnp.tile(x, 25), 2)
    assert is_forward(jnp.sin, 3)
    assert not is_forward(lambda x: x[:2], 50)


def test_chunks_may_be_as_large_as_fits():
    whole, within = el.JacRev(hidden), el.JacRev(hidden, chunk_size=el.Budget("60KB"))
    both = jax.jit(lambda x: (within(x), whole(x)))
    assert_close(*both(jnp.linspace(0.0, 1.0, 64)))
    assert temp_bytes(within, (64,)) < temp_bytes(whole, (64,)) / 4


# Memory


def hidden(x):
    """A layer of 1024 numbers between 64 and 64."""
    return jnp.cumsum(jnp.sin(jnp.cumsum(jnp.sin(jnp.repeat(x, 16)))))[::16]


@pytest.mark.parametrize(
    ("transform", "function"),
    [
        (el.JacRev, hidden),
        (el.JacFwd, hidden),
        (el.Hessian, lambda x: jnp.sum(hidden(x))),
    ],
    ids=["JacRev", "JacFwd", "Hessian"],
)
def test_memory_is_that_of_a_chunk(transform, function):
    whole = temp_bytes(transform(function), (64,))
    chunk = temp_bytes(transform(function, chunk_size=4), (64,))
    # 4 of 64 directions, and what there is of `function` itself.
    assert chunk < whole / 8
