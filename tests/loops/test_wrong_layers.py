"""Wrong calls of `StackedLayers`, and what is said of them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_raises

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


def edit(where: Any, new: Any) -> Any:
    return eqx.tree_at(where, el.StackedLayers(Layer(X)), new)


def counting(depth: int) -> Any:
    build = lambda: el.StackedLayers.init(Counting, depth, key=KEY)
    return eqx.nn.make_with_state(build)()


WRONG = {
    "a layer in the place of what makes one": (
        lambda: el.StackedLayers.init(eqx.nn.MLP(3, 3, 3, 1, key=KEY), 4, key=KEY),
        "TypeError: StackedLayers.init: `make` … `lambda key: MLP(..., key=key)` … MLP "
        "itself … `StackedLayers.from_layers`",
    ),
    "a class that needs more than a key": (
        lambda: el.StackedLayers.init(eqx.nn.Linear, 4, key=KEY),
        "TypeError: StackedLayers.init: `make` … 'in_features' … `make(key=key)`",
    ),
    "what makes a layer without a key": (
        lambda: el.StackedLayers.init(lambda: Layer(X), 4, key=KEY),
        "TypeError: StackedLayers.init: `make` … too many … `make(key)`",
    ),
    "a key that is a number": (
        lambda: el.StackedLayers.init(lambda key: Layer(X), 4, key=0),
        "TypeError: StackedLayers.init: `key` … `jax.random.key(0)` makes it, not 0",
    ),
    "stacks of several depths": (
        lambda: from_layers(from_layers(*[Layer(X)] * 2), from_layers(Layer(X))),
        "TypeError: StackedLayers.from_layers: … layers[1].layers.weight … `[*a, *b]`",
    ),
    "a class and a depth": (
        lambda: el.StackedLayers(Layer, 3),
        "TypeError: StackedLayers(layers): too many … `el.StackedLayers.init(make, "
        "depth, key=key)`",
    ),
    # Layers that do not match
    "shape": (
        lambda: from_layers(Layer([X]), Layer([X]), Layer([jnp.ones(4)])),
        "TypeError: StackedLayers.from_layers: … layers[2].weight[0]: float32[4] … "
        "float32[3] … layers[0]",
    ),
    "dtype": (
        lambda: from_layers(Layer(X), Layer(X.astype(int))),
        "TypeError: StackedLayers.from_layers: … layers[1].weight: int32[3] … "
        "float32[3] … layers[0]",
    ),
    "no array": (
        lambda: from_layers(Layer(X), Layer(1.0)),
        "TypeError: StackedLayers.from_layers: … layers[1].weight: 1.0 … "
        "float32[3] … layers[0]",
    ),
    "None": (
        lambda: from_layers(Layer(X), Layer(X, option=X)),
        "TypeError: StackedLayers.from_layers: … layers[1].option: float32[3] … "
        "None … layers[0]",
    ),
    "structure": (
        lambda: from_layers(Layer({"a": X}), Layer({"b": X})),
        "TypeError: StackedLayers.from_layers: … layers[1].weight['a']: nothing … "
        "float32[3] … layers[0] … layers[1].weight['b']: float32[3] … nothing … "
        "layers[0]",
    ),
    "class": (
        lambda: from_layers(Layer(X), eqx.nn.PReLU()),
        "TypeError: StackedLayers.from_layers: … layers[1]: PReLU … Layer … layers[0]",
    ),
    "static field": (
        lambda: from_layers(Layer(X), Layer(X, size=1)),
        "TypeError: StackedLayers.from_layers: … layers[1]: … static fields … "
        "Layer differ … layers[0] … layers[1].size: 1 … 0 … layers[0]",
    ),
    "static leaf": (
        lambda: from_layers(Layer(X, option="a"), Layer(X, option="b")),
        "ValueError: StackedLayers.from_layers: … layers[1].option: 'b' … 'a' … "
        "layers[0] … Make",
    ),
    "number": (
        lambda: from_layers(Layer(X, 0.1), Layer(X, 0.1), Layer(X, 0.2)),
        "ValueError: StackedLayers.from_layers: … layers[2].option: 0.2 … 0.1 … "
        "layers[0]",
    ),
    "none at all": (
        lambda: from_layers(),
        "ValueError: StackedLayers.from_layers: … no layer",
    ),
    "no list": (
        lambda: el.StackedLayers.from_layers(Layer(X)),
        "TypeError: StackedLayers.from_layers: `layers` … list … tuple … layers … "
        "Layer(",
    ),
    # Construction
    "a list": (
        lambda: el.StackedLayers([Layer(X), Layer(X)]),
        "TypeError: … list … layers … `StackedLayers.from_layers`",
    ),
    "no leading axis": (
        lambda: el.StackedLayers(Layer((X, jnp.ones(())))),
        "ValueError: StackedLayers: … leading axis … layer … no axis: … "
        "layers.weight[1]: float32[] … `StackedLayers.init` … "
        "`StackedLayers.from_layers`",
    ),
    "leading axes differ": (
        lambda: el.StackedLayers(Layer((X, jnp.ones((2, 3))))),
        "ValueError: … axes differ: … layers.weight[0]: float32[3] … "
        "layers.weight[1]: float32[2,3] … `eqx.filter_vmap(make)(keys)`",
    ),
    "one layer taken for a stack": (
        lambda: el.StackedLayers(eqx.nn.Linear(3, 3, key=KEY))(X),
        "TypeError: StackedLayers: x … one of 3 layers changed it: … float32[3] came",
    ),
    "no arrays": (
        lambda: el.StackedLayers.init(lambda key: eqx.nn.Lambda(jnp.tanh), 2, key=KEY),
        "ValueError: StackedLayers: … layers … no … unknown … layers … Call … "
        "`el.Scan` … `length=`",
    ),
    # Indexing
    "out of range": (
        lambda: el.StackedLayers(Layer(X))[3],
        "IndexError: StackedLayers: … no layer 3 … 3 layers … 0",
    ),
    "index": (
        lambda: el.StackedLayers(Layer(X))["a"],
        "TypeError: StackedLayers: … int … slice … 'a'",
    ),
    "of a filter": (
        lambda: jax.tree.map(lambda _: False, el.StackedLayers(Layer(X)))[1:],
        "TypeError: StackedLayers: … 3 layers … no leaf … array … all layers … "
        "freeze … `first, last = layers[:1], layers[1:]`",
    ),
    "an edit of a layer": (
        lambda: edit(lambda stack: stack[1].weight, jnp.ones(())),
        "TypeError: StackedLayers: … 3 layers … `eqx.tree_at` … `layers.w.at[1].set("
        "new)`",
    ),
    # The call
    "a layer widens": (
        lambda: call(lambda scale, x: jnp.concatenate([x, scale])),
        "TypeError: StackedLayers: … layer … layer … layer … x: float32[3] … "
        "float32[6]",
    ),
    "a layer changes the dtype": (
        lambda: call(lambda scale, x: {"h": scale}, {"h": jnp.ones(3, jnp.bfloat16)}),
        "TypeError: StackedLayers: … layer … layer … layer … x['h']: bfloat16[3] … "
        "float32[3]",
    ),
    "a layer changes a static leaf": (
        lambda: call(lambda scale, x: ("b", scale), ("a", X)),
        "ValueError: StackedLayers: … layer … layer … layer … x[0]: 'a' … 'b'",
    ),
    "a key that layers do not take": (
        lambda: call(lambda scale, x: x, key=KEY),
        "TypeError: StackedLayers: … `key` … a layer has no parameter `key` … (x)",
    ),
    "many keys": (
        lambda: call(lambda scale, x, key: x, key=jax.random.split(KEY)),
        "ValueError: StackedLayers: `key` … key",
    ),
    # State
    "no state is returned": (
        lambda: call(lambda scale, x, state: x, X, counting(2)[1]),
        "TypeError: StackedLayers: … layer … state … `(x, state)` … f32[3]",
    ),
    "two states": (
        lambda: counting(2)[0](X, counting(2)[1], counting(2)[1]),
        "ValueError: StackedLayers: … state … 2",
    ),
    "the state of another model": (
        lambda: counting(2)[0](X, eqx.nn.State(eqx.nn.PReLU())),
        "ValueError: StackedLayers: … state … nothing … "
        "'StackedLayers.layers.calls' … layers. Pass … state … "
        "`eqx.nn.make_with_state`",
    ),
    "the state of more layers": (
        lambda: counting(3)[0][:2](X, counting(3)[1]),
        "ValueError: StackedLayers: … state … 2 layers … leading axis … State(",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    assert_raises(*WRONG[name])


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


def test_errors_in_make_say_what_was_called():
    def make(key):
        raise KeyError("mine")

    with pytest.raises(KeyError) as info:
        el.StackedLayers.init(make, 3, key=KEY)
    assert info.value.__context__ is None
    note = "\n".join(info.value.__notes__)
    assert "raised while StackedLayers.init traced `make(key=key)` with" in note
