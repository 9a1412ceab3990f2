"""`StackedLayers` beside a Python loop over the layers."""

import io
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from ..weights import normal

pytestmark = pytest.mark.sampled

DEPTH, WIDTH = 5, 3
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, WIDTH)


class Block(eqx.Module):
    """A residual layer, with leaves of several kinds."""

    linear: eqx.nn.Linear
    scale: np.ndarray
    uses: jax.Array
    activation: Any
    rate: float

    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.scale = np.ones(WIDTH, np.float32)
        self.uses = jnp.zeros((), int)
        self.activation = jnp.tanh
        self.rate = 0.5

    def __call__(self, x, shift=0.0, *, key=None):
        y = self.activation(self.scale * self.linear(x) + shift)
        noise = 0.0 if key is None else jax.random.normal(key, x.shape)
        return x + self.rate * (y + noise)


def make(depth=DEPTH, **settings):
    return el.StackedLayers.init(Block, depth, key=KEY, **settings)


def in_turn(layers, x, *args, key=None):
    keys = [None] * len(layers) if key is None else jax.random.split(key, len(layers))
    every_x = []
    for layer, one in zip(layers, keys, strict=True):
        x = layer(x, *args) if one is None else layer(x, *args, key=one)
        every_x.append(x)
    return x, every_x


def arrays(tree: Any) -> Any:
    return eqx.filter(tree, eqx.is_inexact_array_like)


# The call


def scan(layers, *args, **keywords):
    return layers.scan(*args, **keywords)


@eqx.filter_jit
def derive(run, *args):
    """A loss of what the layers return, and its gradient in all of the arguments."""

    def loss(args):
        x, every_x = run(*args, key=jax.random.key(1))
        every_x = jnp.stack(every_x)
        return jnp.sum(x**2) + jnp.sum(every_x[1]), (x, every_x)

    return eqx.filter_value_and_grad(loss, has_aux=True)(args)


@pytest.fixture(scope="module")
def expected() -> Any:
    out, (grads, *others) = derive(in_turn, make().unstack(), X, 0.3 * X)
    grads = [arrays(layer) for layer in grads]
    return out, (jax.tree.map(lambda *g: jnp.stack(g), *grads), *others)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule": el.Recursive(2)},
        {"schedule": el.Chunked(2), "policy": "dots_saveable"},
        {"schedule": el.Binomial(2), "unroll": 2},
        {"unroll": True},
    ],
    ids=lambda settings: "-".join(settings) or "default",
)
def test_beside_a_loop(settings, expected):
    out, (grads, *others) = derive(scan, make(**settings), X, 0.3 * X)
    out_, (grads_, *others_) = expected
    assert_close(out, out_)
    assert_close(others, others_)
    assert_close(arrays(grads.layers), grads_)


def test_the_call_returns_what_the_last_layer_does():
    layers, key = make(), jax.random.key(1)
    assert_close(layers(X, 0.3, key=key), in_turn(layers, X, 0.3, key=key)[0])


def test_without_a_key_layers_are_called_without_one():
    layers = make()
    assert_close(layers(X), in_turn(layers, X)[0])

    plain = el.StackedLayers.init(lambda k: eqx.nn.PReLU(0.1), 2, key=KEY)
    assert_close(plain(-X), jnp.where(X > 0, -0.01 * X, -X))


def test_leaves_that_are_no_arrays():
    def layer(scale, x, options):
        assert options["name"] == "pole"
        return {**x, "h": scale * x["h"] + options["shift"], "n": x["n"] + 1}

    layers = el.StackedLayers(jax.tree_util.Partial(layer, jnp.array([2.0, 3.0])))
    out = layers({"h": X, "act": jnp.tanh, "n": 0}, {"name": "pole", "shift": 1})
    assert_close(out["h"], 6 * X + 4)
    assert out["act"] is jnp.tanh
    assert out["n"] == 2


def test_annotations_are_enforced():
    class Widening(eqx.Module):
        weight: jax.Array

        def __call__(self, x: Float[Array, " n"]) -> Float[Array, " n"]:
            return jnp.concatenate([x, self.weight])

    layers = el.StackedLayers(Widening(jnp.ones((2, 1))))
    with pytest.raises(TypeError, match="the return value") as info:
        layers(X)
    notes = "\n".join(info.value.__notes__)
    assert "while StackedLayers traced `layer(x)` with\n  x = f32[3]" in notes


def test_no_layers():
    layers = make(0)
    assert len(layers) == 0
    assert_close(layers(X), X)
    assert layers.scan(X)[1].shape == (0, WIDTH)


# The program


def count_equations(jaxpr: jex.Jaxpr) -> int:
    inner = [
        count_equations(getattr(j, "jaxpr", j))
        for eqn in jaxpr.eqns
        for j in jex.jaxprs_in_params(eqn.params)
    ]
    return len(jaxpr.eqns) + sum(inner)


def test_the_program_does_not_grow_with_the_depth():
    def size(depth):
        params, static = eqx.partition(make(depth), eqx.is_inexact_array)
        loss = lambda params: jnp.sum(eqx.combine(params, static)(X, X))
        gradient = jax.jit(jax.grad(loss))
        lines = gradient.lower(params).as_text().count("\n")
        return count_equations(jax.make_jaxpr(gradient)(params).jaxpr), lines

    assert size(24) == size(6)


def test_the_schedule_bounds_what_is_stored():
    def taken(schedule):
        params, static = eqx.partition(
            make(64, schedule=schedule), eqx.is_inexact_array
        )
        x = jnp.ones((256, WIDTH))

        def loss(params, x):
            apply = eqx.combine(params, static)
            return jnp.sum(jax.vmap(apply)(x))

        return temp_bytes(jax.grad(loss), params, x)

    assert taken(el.Recursive(4)) < taken(None) / 3


def test_plan():
    layers = make(64, schedule=el.Chunked(8))
    plan = layers.plan(jax.ShapeDtypeStruct((WIDTH,), jnp.float32), X, key=KEY)
    assert plan.length == 64
    assert plan.schedule == el.Chunked(8)
    assert layers.layers.uses.shape == (64,)


def test_a_plan_does_not_count_what_no_layer_changes():
    def layer(a, x):
        return jnp.sin(a * x[0]) + x[1], x[1]

    layers = jax.tree_util.Partial(layer, jnp.ones(8))
    layers = el.StackedLayers(layers, schedule=el.Recursive(2))
    assert layers.plan((jnp.ones(100), jnp.ones(100))).slot_bytes == 400


# A list of layers


def test_init_makes_the_layers_of_split_keys():
    layers = make()
    assert len(layers) == DEPTH
    for layer, key in zip(layers, jax.random.split(KEY, DEPTH), strict=True):
        assert_close(arrays(layer), arrays(Block(key=key)))
        assert layer.activation is jnp.tanh
        assert layer.rate == 0.5


def test_from_layers_and_back():
    each = [Block(key=key) for key in jax.random.split(KEY, DEPTH)]
    layers = el.StackedLayers.from_layers(each, unroll=2, schedule=el.Chunked(2))
    assert layers.unroll == 2
    assert layers.schedule == el.Chunked(2)
    assert_close(layers(X), in_turn(each, X)[0])
    for layer, back in zip(each, layers.unstack(), strict=True):
        assert_close(arrays(back), arrays(layer))
        assert back.activation is layer.activation


def test_indexing():
    layers = make(schedule=el.Chunked(2), policy=el.policies.save_dots)
    each = layers.unstack()
    for i in (0, 2, -1, -DEPTH, np.int64(1)):
        assert eqx.tree_equal(layers[i], each[i])
    for part in (slice(1, 3), slice(None, None, -2), slice(3, 3)):
        assert type(layers[part]) is el.StackedLayers
        assert layers[part].schedule == el.Chunked(2)
        assert layers[part].policy == el.policies.save_dots
        assert eqx.tree_equal(layers[part].unstack(), each[part])
    assert_close(layers[3:](layers[:3](X)), layers(X))


@pytest.mark.slow
def test_stacks_of_stacks_and_ensembles():
    nested = el.StackedLayers.init(
        lambda key: el.StackedLayers.init(Block, 2, key=key), 3, key=KEY
    )
    assert (len(nested), len(nested[0])) == (3, 2)
    expected = X
    for inner in nested:
        expected, _ = in_turn(inner, expected)
    assert_close(nested(X), expected)

    ensemble = eqx.filter_vmap(lambda key: el.StackedLayers.init(Block, 2, key=key))
    run = eqx.filter_vmap(lambda layers: layers(X))
    keys = jax.random.split(KEY)
    expected = [el.StackedLayers.init(Block, 2, key=key)(X) for key in keys]
    assert_close(run(ensemble(keys)), jnp.stack(expected))


# A module


def test_some_parameters_are_frozen():
    layers = make()
    trained = jax.tree.map(lambda _: False, layers)
    trained = eqx.tree_at(lambda tree: tree.layers.linear.bias, trained, True)

    @eqx.filter_grad
    def gradient(trained, frozen):
        return jnp.sum(eqx.combine(trained, frozen)(X))

    some = gradient(*eqx.partition(layers, trained))
    every = eqx.filter_grad(lambda layers: jnp.sum(layers(X)))(layers)
    assert len(jax.tree.leaves(some)) == 1
    assert_close(some.layers.linear.bias, every.layers.linear.bias)


def test_serialisation():
    layers, file = make(schedule=el.Recursive(2)), io.BytesIO()
    eqx.tree_serialise_leaves(file, layers)
    file.seek(0)
    like = el.StackedLayers.init(
        Block, DEPTH, key=jax.random.key(9), schedule=el.Recursive(2)
    )
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, like), layers)


def test_editing_and_printing():
    layers = make(schedule=el.Recursive(2))
    zeroed = eqx.tree_at(
        lambda tree: tree.layers.scale, layers, jnp.zeros((DEPTH, WIDTH))
    )
    assert_close(zeroed(X), X)
    other = eqx.tree_at(
        lambda tree: tree.policy, layers, "dots_saveable", is_leaf=lambda x: x is None
    )
    assert_close(other(X), layers(X))
    text = repr(layers)
    assert text.startswith("StackedLayers(\n  layers=Block(")
    assert "schedule=Recursive(base=2)" in text
    assert "weight=f32[5,3,3]" in text


# State


class Counting(eqx.Module):
    """Adds the mean of the inputs that it has seen to its input."""

    linear: eqx.nn.Linear
    mean: eqx.nn.StateIndex
    calls: eqx.nn.StateIndex

    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.mean = eqx.nn.StateIndex(jnp.zeros(WIDTH))
        self.calls = eqx.nn.StateIndex(0)

    def __call__(self, x, state, shift=0.0, *, key=None):
        mean = 0.9 * state.get(self.mean) + 0.1 * x
        state = state.set(self.mean, mean)
        state = state.set(self.calls, state.get(self.calls) + 1)
        return jnp.tanh(self.linear(x) + mean + shift), state


class Model(eqx.Module):
    """Layers with a state, between others with one."""

    first: Counting
    layers: el.StackedLayers

    def __init__(self, key, build, **settings):
        self.first = Counting(key=key)
        self.layers = build(key, **settings)

    def __call__(self, x, state):
        x, state = self.first(x, state)
        return self.layers(x, state, 0.1)


def init(key, **settings):
    return el.StackedLayers.init(Counting, DEPTH, key=key, **settings)


def from_layers(key, **settings):
    keys = jax.random.split(key, DEPTH)
    return el.StackedLayers.from_layers([Counting(key=k) for k in keys], **settings)


@pytest.mark.parametrize("build", [init, from_layers])
@pytest.mark.parametrize("schedule", [slow(None), el.Recursive(2)])
def test_state(build, schedule):
    model, state = eqx.nn.make_with_state(Model)(KEY, build, schedule=schedule)

    @eqx.filter_jit
    @eqx.filter_grad(has_aux=True)
    def gradient(model, state):
        x, state = model(X, state)
        x, state = model(x, state)
        return jnp.sum(x**2), (x, state)

    @eqx.filter_jit
    @eqx.filter_grad(has_aux=True)
    def expected(weights, first):
        x, means = X, [jnp.zeros(WIDTH) for _ in range(DEPTH + 1)]
        for _ in range(2):
            for i, linear in enumerate([first, *(layer.linear for layer in weights)]):
                means[i] = 0.9 * means[i] + 0.1 * x
                x = jnp.tanh(linear(x) + means[i] + (0.1 if i else 0.0))
        return jnp.sum(x**2), (x, jnp.stack(means))

    grads, (x, new_state) = gradient(model, state)
    grads_, (x_, means) = expected(model.layers.unstack(), model.first.linear)
    assert_close(x, x_)
    assert_close(new_state.get(model.layers.layers.mean), means[1:])
    assert_close(new_state.get(model.first.mean), means[0])
    np.testing.assert_array_equal(new_state.get(model.layers.layers.calls), 2)
    assert_close(
        arrays(grads.layers.layers.linear),
        arrays(jax.tree.map(lambda *g: jnp.stack(g), *grads_)).linear,
    )


def test_state_beside_the_output_of_every_layer():
    layers, state = eqx.nn.make_with_state(init)(KEY)
    (x, state), every_x = layers.scan(X, state, 0.1)
    assert every_x.shape == (DEPTH, WIDTH)
    assert_close(every_x[-1], x)
    np.testing.assert_array_equal(state.get(layers.layers.calls), 1)


def test_state_of_some_of_the_layers():
    layers, state = eqx.nn.make_with_state(init)(KEY)
    clone = jax.tree.map(lambda leaf: leaf, state)
    _, state = layers(X, state)
    few = slice(2)
    part = jax.tree.map(lambda leaf: leaf[few], clone.substate(layers))
    x, (y, part) = X, layers[few](X, part)
    assert_close(part.get(layers.layers.mean), state.get(layers.layers.mean)[few])
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], clone.substate(layers))
        x, _ = layers[i](x, one)
    assert_close(x, y)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, *, key):
        self.linear = eqx.nn.Linear(WIDTH, WIDTH, key=key)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key):
        y, state = self.norm(self.linear(x), state)
        return x + self.dropout(jnp.tanh(y), key=key), state


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, el.Chunked(2)], ids=str)
def test_batch_norm_and_dropout(schedule):
    def stacked(schedule):
        build = lambda key: el.StackedLayers.init(Normed, DEPTH, key=key)
        layers, state = eqx.nn.make_with_state(build)(KEY)
        return el.StackedLayers(layers.layers, schedule=schedule), state

    def separate():
        build = lambda keys: [Normed(key=key) for key in keys]
        return eqx.nn.make_with_state(build)(jax.random.split(KEY, DEPTH))

    def through_all(each, x, state, *, key):
        for layer, one in zip(each, jax.random.split(key, DEPTH), strict=True):
            x, state = layer(x, state, key=one)
        return x, state

    @eqx.filter_jit
    @eqx.filter_grad(has_aux=True)
    def gradient(layers, state, run):
        apply = lambda x, state, key: run(layers, x, state, key=key)
        axes = dict(in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch")
        xs = normal(0, (4, WIDTH))
        keys = jax.random.split(KEY, 4)
        x, state = jax.vmap(apply, **axes)(xs, state, keys)
        return jnp.sum(x**2), (x, state)

    each, state = separate()
    grads_, (x_, state_) = gradient(each, state, through_all)
    grads_ = [jnp.stack(g) for g in zip(*map(jax.tree.leaves, grads_), strict=True)]
    # The bias before a normalisation has none but what rounding leaves of large ones.
    noise = 1e-5 * max(jnp.max(jnp.abs(g)) for g in grads_)
    layers, state = stacked(schedule)
    call = lambda layers, *args, **kwargs: layers(*args, **kwargs)
    grads, (x, state) = gradient(layers, state, call)
    assert_close(x, x_)
    assert_close(jax.tree.leaves(grads), grads_, atol=noise)
    means, _ = state.get(layers.layers.norm.ema_state_index)
    expected = [state_.get(layer.norm.ema_state_index)[0] for layer in each]
    assert_close(means, jnp.stack(expected))
