"""Wrong calls of `StackedLayers`, and what is said of them."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

KEY = jax.random.key(0)
X = jnp.ones(3)


class Layer(eqx.Module):
    weight: Any
    option: Any = None
    size: int = eqx.field(static=True, default=0)

    def __call__(self, x):
        return x * self.weight


class Counting(eqx.Module):
    scale: jax.Array
    calls: eqx.nn.StateIndex

    def __init__(self, key=None):
        self.scale = jnp.ones(())
        self.calls = eqx.nn.StateIndex(jnp.zeros(()))

    def __call__(self, x, state):
        return self.scale * x, state.set(self.calls, state.get(self.calls) + 1)


def from_layers(*layers: Any) -> Any:
    return el.StackedLayers.from_layers(layers)


def call(f: Any, x: Any = X, *args: Any, **keywords: Any) -> Any:
    """Stacks two layers `f(scale, x)` and calls them."""
    scale = jnp.ones((2, 3))
    return el.StackedLayers(jax.tree_util.Partial(f, scale))(x, *args, **keywords)


def counting(depth: int) -> Any:
    build = lambda: el.StackedLayers.init(Counting, depth, key=KEY)
    return eqx.nn.make_with_state(build)()


TYPES = (
    "StackedLayers.from_layers: layers must have the same structure, and arrays of the "
    "same shapes and dtypes, but these do not:\n"
)
LEAVES = (
    "StackedLayers.from_layers: layers may differ only in the values of their arrays, "
    "but these differ in other leaves:\n"
)
CHANGED = (
    "StackedLayers: x must keep its shape, dtype and structure from layer to layer, "
    "but a layer changed it:\n"
)

WRONG = {
    # Layers that do not match
    "shape": (
        lambda: from_layers(Layer([X]), Layer([X]), Layer([jnp.ones(4)])),
        TypeError,
        TYPES + "  layers[2].weight[0]: float32[4], but float32[3] in layers[0]",
    ),
    "dtype": (
        lambda: from_layers(Layer(X), Layer(X.astype(int))),
        TypeError,
        TYPES + "  layers[1].weight: int32[3], but float32[3] in layers[0]",
    ),
    "no array": (
        lambda: from_layers(Layer(X), Layer(1.0)),
        TypeError,
        TYPES + "  layers[1].weight: 1.0, but float32[3] in layers[0]",
    ),
    "None": (
        lambda: from_layers(Layer(X), Layer(X, option=X)),
        TypeError,
        TYPES + "  layers[1].option: float32[3], but None in layers[0]",
    ),
    "structure": (
        lambda: from_layers(Layer({"a": X}), Layer({"b": X})),
        TypeError,
        TYPES + "  layers[1].weight['a']: nothing, but float32[3] in layers[0]\n"
        "  layers[1].weight['b']: float32[3], but nothing in layers[0]",
    ),
    "class": (
        lambda: from_layers(Layer(X), eqx.nn.PReLU()),
        TypeError,
        TYPES + "  layers[1]: PReLU, but Layer in layers[0]",
    ),
    "static field": (
        lambda: from_layers(Layer(X), Layer(X, size=1)),
        TypeError,
        TYPES + "  layers[1]: the static fields of the Layer differ from layers[0]\n"
        "  layers[1].size: 1, but 0 in layers[0]",
    ),
    "static leaf": (
        lambda: from_layers(Layer(X, option="a"), Layer(X, option="b")),
        ValueError,
        LEAVES + "  layers[1].option: 'b', but 'a' in layers[0]\nMake them arrays, or "
        "make them equal.",
    ),
    "number": (
        lambda: from_layers(Layer(X, 0.1), Layer(X, 0.1), Layer(X, 0.2)),
        ValueError,
        LEAVES + "  layers[2].option: 0.2, but 0.1 in layers[0]",
    ),
    "none at all": (
        lambda: from_layers(),
        ValueError,
        "StackedLayers.from_layers: there is no layer to stack.",
    ),
    "no list": (
        lambda: el.StackedLayers.from_layers(Layer(X)),
        TypeError,
        "StackedLayers.from_layers: `layers` must be a list or tuple of layers, not "
        "Layer(",
    ),
    # Construction
    "a list": (
        lambda: el.StackedLayers([Layer(X), Layer(X)]),
        TypeError,
        "To stack a list of layers, use `StackedLayers.from_layers`.",
    ),
    "no leading axis": (
        lambda: el.StackedLayers(Layer((X, jnp.ones(())))),
        ValueError,
        "StackedLayers: every array must have a leading axis, with one entry for each "
        "layer, but these have no axis:\n  layers.weight[1]: float32[]\n"
        "`StackedLayers.init` and `StackedLayers.from_layers` do this.",
    ),
    "leading axes differ": (
        lambda: el.StackedLayers(Layer((X, jnp.ones((2, 3))))),
        ValueError,
        "but these axes differ:\n  layers.weight[0]: float32[3]\n  layers.weight[1]: "
        "float32[2,3]",
    ),
    "no arrays": (
        lambda: el.StackedLayers.init(lambda key: eqx.nn.Lambda(jnp.tanh), 2, key=KEY),
        ValueError,
        "StackedLayers: the layers hold no arrays, so it is unknown how many layers "
        "there are. Call one of them in an `el.Scan` with `length=`.",
    ),
    "depth": (
        lambda: el.StackedLayers.init(Counting, 2.0, key=KEY),
        TypeError,
        "StackedLayers.init: `depth` must be an int, the number of layers, but it is "
        "2.0, of type float.",
    ),
    "negative depth": (
        lambda: el.StackedLayers.init(Counting, -1, key=KEY),
        ValueError,
        "StackedLayers.init: `depth` must be at least 0, but it is -1.",
    ),
    "schedule": (
        lambda: el.StackedLayers(Layer(X), schedule=16),
        TypeError,
        "StackedLayers: `schedule` must be a schedule, such as `el.Recursive(16)`, not "
        "16.",
    ),
    "unroll": (
        lambda: el.StackedLayers(Layer(X), unroll=0),
        ValueError,
        "StackedLayers: `unroll` must be at least 1, but it is 0.",
    ),
    "policy": (
        lambda: el.StackedLayers(Layer(X), policy="save_dot"),
        ValueError,
        "save_dot",
    ),
    # Indexing
    "out of range": (
        lambda: el.StackedLayers(Layer(X))[3],
        IndexError,
        "StackedLayers: there is no layer 3, as there are 3 layers, counted from 0.",
    ),
    "index": (
        lambda: el.StackedLayers(Layer(X))["a"],
        TypeError,
        "StackedLayers: an index must be an int or a slice, not 'a'.",
    ),
    # The call
    "a layer widens": (
        lambda: call(lambda scale, x: jnp.concatenate([x, scale])),
        TypeError,
        CHANGED + "  x: float32[3] came in, float32[6] came out",
    ),
    "a layer changes the dtype": (
        lambda: call(lambda scale, x: {"h": scale}, {"h": jnp.ones(3, jnp.bfloat16)}),
        TypeError,
        CHANGED + "  x['h']: bfloat16[3] came in, float32[3] came out",
    ),
    "a layer changes a static leaf": (
        lambda: call(lambda scale, x: ("b", scale), ("a", X)),
        ValueError,
        "StackedLayers: only arrays and numbers can change from layer to layer, but a "
        "layer changed these leaves of x:\n  x[0]: 'a' came in, 'b' came out",
    ),
    "a key that layers do not take": (
        lambda: call(lambda scale, x: x, key=KEY),
        TypeError,
        "unexpected keyword argument 'key'",
    ),
    "many keys": (
        lambda: call(lambda scale, x, key: x, key=jax.random.split(KEY)),
        ValueError,
        "StackedLayers: `key` must be one key, which is split for the steps",
    ),
    # State
    "no state is returned": (
        lambda: call(lambda scale, x, state: x, X, counting(2)[1]),
        TypeError,
        "StackedLayers: a layer that is given a state must return `(x, state)`, but it "
        "returned f32[3].",
    ),
    "two states": (
        lambda: counting(2)[0](X, counting(2)[1], counting(2)[1]),
        ValueError,
        "StackedLayers: there can be one state among the arguments, but there are 2.",
    ),
    "the state of another model": (
        lambda: counting(2)[0](X, eqx.nn.State(eqx.nn.PReLU())),
        ValueError,
        "StackedLayers: the state holds nothing for 'StackedLayers.layers.calls', "
        "which is in the layers. Pass the state that `eqx.nn.make_with_state` made",
    ),
    "the state of more layers": (
        lambda: counting(3)[0][:2](X, counting(3)[1]),
        ValueError,
        "StackedLayers: the arrays of the state must have an entry for each of the 2 "
        "layers, along a leading axis, but it is\n  State(",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_errors_in_a_layer_say_what_was_being_traced():
    def layer(scale, x, shift, *, key):
        raise KeyError("mine")

    with pytest.raises(KeyError) as info:
        call(layer, {"h": X, "s": "static"}, 1.0, key=KEY)
    note = "\n".join(info.value.__notes__)
    assert (
        "This was raised while StackedLayers traced `layer(x, *args, key=key)`" in note
    )
    assert "x = {'h': f32[3], 's': 'static'}" in note
