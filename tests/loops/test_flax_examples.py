"""The examples and settings of `flax.linen.scan`, written anew with eqloop."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..weights import without_key

# Parameters that all steps share (`variable_broadcast`): a recurrent network

BATCH, TIME, IN, OUT = 4, 12, 7, 32
SEQUENCES = jnp.sin(jnp.arange(1.0 * BATCH * TIME * IN)).reshape(BATCH, TIME, IN)
CELL = without_key(eqx.nn.LSTMCell, IN, OUT)


class Lstm(eqx.Module):
    """A cell for one element of a batch; its output is the hidden state."""

    cell: eqx.nn.LSTMCell

    def __call__(self, state: Any, x: jax.Array) -> Any:
        state = jax.vmap(self.cell)(x, state)
        return state, state[0]


def states() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((BATCH, OUT)), jnp.zeros((BATCH, OUT))


def lstm_by_hand(cell: eqx.nn.LSTMCell) -> tuple[Any, jax.Array]:
    state, out = states(), []
    for t in range(TIME):
        state = jax.vmap(cell)(SEQUENCES[:, t], state)
        out.append(state[0])
    return state, jnp.stack(out, axis=1)


def test_lstm_as_a_module():
    scan = el.Scan(Lstm(CELL), in_axes=1, out_axes=1)
    state, out = scan(states(), SEQUENCES)
    assert out.shape == (BATCH, TIME, OUT)
    assert_close((state, out), lstm_by_hand(CELL))


def test_lstm_as_a_function():
    def body(state: Any, x: jax.Array) -> Any:
        state = jax.vmap(CELL)(x, state)
        return state, state[0]

    assert_close(
        el.Scan(body, in_axes=1, out_axes=1)(states(), SEQUENCES), lstm_by_hand(CELL)
    )


@pytest.mark.slow
def test_the_gradient_of_shared_parameters():
    scan = el.CheckpointedScan(Lstm(CELL), base=4, in_axes=1, out_axes=1)
    loss = lambda scan: jnp.sum(scan(states(), SEQUENCES)[1] ** 2)
    by_hand = lambda cell: jnp.sum(lstm_by_hand(cell)[1] ** 2)
    actual = eqx.filter_jit(eqx.filter_grad(loss))(scan).f.cell
    assert_close(actual, eqx.filter_jit(eqx.filter_grad(by_hand))(CELL))


# Parameters of which each step has its own (`variable_axes`): layers


class ResidualBlock(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(self.linear(x)), None


def make_block(key: jax.Array) -> ResidualBlock:
    return ResidualBlock(eqx.nn.Linear(2, 2, key=key))


KEYS = jax.random.split(jax.random.key(42), 4)
BLOCKS = eqx.filter_vmap(make_block)(KEYS)  # `split_rngs={"params": True}`


def residual_by_hand(x: jax.Array) -> jax.Array:
    for key in KEYS:
        x, _ = make_block(key)(x, None)
    return x


def test_residual_mlp():
    mlp = el.Scan(BLOCKS, f_axes=eqx.if_array(0))
    assert_close(mlp(jnp.ones(2))[0], residual_by_hand(jnp.ones(2)))
    assert len({float(w) for w in mlp.f.linear.weight[:, 0, 0]}) == 4


@pytest.mark.parametrize("schedule", [el.Recursive(2), el.Chunked(2)], ids=str)
def test_checkpointed_layers(schedule):
    """As `flax.linen.remat_scan`, which checkpoints them as well."""
    layers = lambda **settings: el.Scan(BLOCKS, f_axes=eqx.if_array(0), **settings)
    loss = lambda mlp: jnp.sum(mlp(jnp.ones(2))[0] ** 2)
    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    assert_close(gradient(layers(schedule=schedule)).f, gradient(layers()).f)


def test_the_number_of_layers_is_that_of_their_parameters():
    with pytest.raises(ValueError, match=r"length: 5\n  f.linear.weight: 4"):
        el.Scan(BLOCKS, f_axes=eqx.if_array(0))(jnp.ones(2), length=5)


def test_shared_and_stacked_parameters_at_once():
    class Block(eqx.Module):
        own: eqx.nn.Linear
        shared: eqx.nn.Linear

        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            x = x + self.shared(jnp.tanh(self.own(x)))
            return x, jnp.max(x)

    shared = without_key(eqx.nn.Linear, 2, 2)
    axes = Block(eqx.if_array(0), None)
    x, greatest = el.Scan(Block(BLOCKS.linear, shared), f_axes=axes)(jnp.ones(2))
    expected = jnp.ones(2)
    for key in KEYS:
        own = eqx.nn.Linear(2, 2, key=key)
        expected = expected + shared(jnp.tanh(own(expected)))
    assert_close(x, expected)
    assert greatest.shape == (4,)


# Variables that are carried (`variable_carry`)


def test_a_counter_and_running_statistics():
    class Statistics(eqx.Module):
        count: jax.Array
        mean: jax.Array

        def add(self, x: jax.Array) -> "Statistics":
            count = self.count + 1
            return Statistics(count, self.mean + (x - self.mean) / count)

    def f(carry: tuple[jax.Array, Statistics], x: jax.Array) -> Any:
        h, statistics = carry
        return (jnp.tanh(h + x), statistics.add(h)), None

    xs = jnp.linspace(-1, 1, 9)
    start = Statistics(jnp.zeros(()), jnp.zeros(()))
    (_, statistics), _ = el.Scan(f)((jnp.zeros(()), start), xs)
    hs = [jnp.zeros(())]
    for x in xs[:-1]:
        hs.append(jnp.tanh(hs[-1] + x))
    assert statistics.count == 9
    np.testing.assert_allclose(statistics.mean, np.mean(hs), rtol=1e-5)


# Keys (`split_rngs`)


@pytest.mark.parametrize("split_keys", [True, False])
def test_dropout_masks_differ_if_keys_are_split(split_keys):
    dropout = eqx.nn.Dropout(0.5)
    f = lambda carry, x, key: (carry, dropout(x, key=key))
    scan = el.Scan(f, split_keys=split_keys)
    _, ys = scan(None, jnp.ones((3, 20)), key=jax.random.key(0))
    assert len({tuple(row) for row in ys.tolist()}) == (3 if split_keys else 1)


# Arguments and outputs


def test_several_arguments_each_with_axes_of_its_own():
    """All of `xs` are one tree, whole leaves (`flax.core.broadcast`) included."""

    def f(carry: jax.Array, x: Any) -> Any:
        query, memory, scale = x
        carry = carry + scale * jnp.sum(memory @ query)
        return carry, {"query": query, "total": carry}

    queries, memory = jnp.arange(15.0).reshape(3, 5), jnp.ones((2, 3))
    scan = el.Scan(f, in_axes=(1, None, None), out_axes={"query": -1, "total": 0})
    total, ys = scan(jnp.zeros(()), (queries, memory, 0.5))
    np.testing.assert_allclose(total, 0.5 * 2 * jnp.sum(queries))
    np.testing.assert_array_equal(ys["query"], queries)
    assert ys["total"].shape == (5,)


def test_outputs_that_are_not_scanned():
    f = lambda carry, x: (carry + x, (carry, jnp.sqrt(2.0)))
    _, (carries, root) = el.Scan(f, out_axes=(0, None))(0.0, jnp.ones(3))
    assert carries.tolist() == [0, 1, 2]
    assert root.shape == ()


def test_reverse_length_and_unroll():
    f = lambda carry, _: (2 * carry + 1, carry)
    scan = el.Scan(f, reverse=True, unroll=2)
    carry, ys = scan(0, length=5)
    assert (int(carry), ys.tolist()) == (31, [15, 7, 3, 1, 0])


# What is done to the variables in the body (`data_transform`)


def test_parameters_are_constrained_in_the_body():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("model")
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def constrain(block: ResidualBlock) -> ResidualBlock:
        place = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding)
        return eqx.tree_at(lambda b: b.linear.weight, block, replace_fn=place)

    mlp = el.Scan(BLOCKS, f_axes=eqx.if_array(0), f_transform=constrain)
    jaxpr = str(jax.make_jaxpr(lambda x: mlp(x)[0])(jnp.ones(2)))
    assert "sharding_constraint" in jaxpr[jaxpr.index("scan") :]
    assert_close(
        jax.jit(lambda x: mlp(x)[0])(jnp.ones(2)), residual_by_hand(jnp.ones(2))
    )


# Methods other than `__call__` (`methods`)


def test_several_methods_of_one_module():
    class Filter(eqx.Module):
        rate: jax.Array

        def smooth(self, h: jax.Array, x: jax.Array) -> Any:
            h = h + self.rate * (x - h)
            return h, h

        def total(self, h: jax.Array, x: jax.Array) -> Any:
            return h + self.rate * x, None

    model, xs = Filter(jnp.array(0.5)), jnp.arange(4.0)
    smoothed = el.Scan(model.smooth)(jnp.zeros(()), xs)[1]
    np.testing.assert_allclose(smoothed, [0, 0.5, 1.25, 2.125])
    assert el.Scan(model.total)(jnp.zeros(()), xs)[0] == 3
    grad = eqx.filter_grad(lambda model: el.Scan(model.total)(0.0, xs)[0])(model)
    assert grad.rate == 6
