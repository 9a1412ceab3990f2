"""What the pages for those who come from elsewhere say to be the same, is the same.

Equinox is always there. The other libraries are in the extra `bench`, save for haliax;
where one is not installed, its tests are left out.
"""

import functools
import operator

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from .names import NAMES

XS = jnp.sin(jnp.arange(23.0))


def step(h, x):
    return jnp.tanh(0.5 * h + x), h * x


def agree(theirs, ours, *args):
    """Raises unless values and gradients of all arguments agree."""

    def loss(f, args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves), leaves

    run = eqx.filter_jit(jax.value_and_grad(loss, argnums=1, has_aux=True))
    expected, result = (jax.tree.leaves(run(f, args)) for f in (theirs, ours))
    for a, b in zip(expected, result, strict=True):
        assert a.shape == b.shape
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)


def check_names(page, **modules):
    """Raises unless the library has the names that its page says it has."""
    for name in NAMES[page].split():
        prefix, _, rest = name.partition(".")
        operator.attrgetter(rest)(modules[prefix])


def linear(layer):
    """A layer of Equinox with the weights of one of Flax."""
    weight, bias = layer["kernel"], layer["bias"]
    shapes = eqx.filter_eval_shape(eqx.nn.Linear, 1, 1, key=jax.random.key(0))
    where = lambda layer: (layer.weight, layer.bias)
    return eqx.tree_at(where, shapes, (jnp.swapaxes(weight, -1, -2), bias))


def test_equinox_and_jax_have_the_names():
    check_names("equinox", eqx=eqx, eqxi=eqxi)
    policies = jax.checkpoint_policies
    for name in NAMES["jax_checkpoint"].split():
        module, rest = (jax, name[4:]) if name.startswith("jax.") else (policies, name)
        operator.attrgetter(rest)(module)


@pytest.mark.slow  # so that the weekly run tells when there are new ones
def test_equinox_and_jax_have_no_others():
    filters = {f"eqx.{name}" for name in vars(eqx) if name.startswith("filter_")}
    assert filters <= set(NAMES["equinox"].split())
    policies = {name for name in dir(jax.checkpoint_policies) if name[0] != "_"}
    assert policies <= set(NAMES["jax_checkpoint"].split())


@pytest.mark.parametrize(
    ("checkpoints", "schedule"),
    [
        (4, el.Binomial(4)),
        pytest.param(None, el.Recursive(), marks=pytest.mark.slow),
        pytest.param("all", el.Chunked(1), marks=pytest.mark.slow),
    ],
)
def test_equinox_scan(checkpoints, schedule):
    kind = {"kind": "checkpointed", "checkpoints": checkpoints}
    weighed = lambda w: lambda h, x: step(w * h, x)
    theirs = lambda w, h, xs: eqxi.scan(weighed(w), h, xs, **kind)
    ours = lambda w, h, xs: el.Scan(weighed(w), schedule=schedule)(h, xs)
    agree(theirs, ours, 0.8, 0.3, XS)


@pytest.mark.parametrize(
    ("kind", "make", "max_steps"),
    [
        ("checkpointed", el.CheckpointedWhileLoop, 40),
        pytest.param(
            "checkpointed", el.CheckpointedWhileLoop, 3, marks=pytest.mark.slow
        ),
        pytest.param("bounded", el.BoundedWhileLoop, 40, marks=pytest.mark.slow),
        pytest.param("bounded", el.BoundedWhileLoop, 3, marks=pytest.mark.slow),
    ],
)
def test_equinox_while_loop(kind, make, max_steps):
    cond, body = lambda c: c[0] < 5, lambda c: (c[0] + c[1] ** 2, jnp.sin(c[1]) + 1)
    loop = functools.partial(eqxi.while_loop, cond, body, max_steps=max_steps)
    ours, init = make(cond, body, max_steps=max_steps), (0.0, 0.7)
    agree(functools.partial(loop, kind=kind), ours, init)
    for a, b in zip(loop(init, kind="lax"), ours(init), strict=True):
        assert jnp.allclose(a, b)


def test_equinox_scan_trick_and_unvmap():
    f, between = lambda x: 2 * x, [jnp.sin, jnp.cos, lambda x: x]
    repeat = el.Scan(lambda x, i: (el.Switch(between)(i, f(x)), None))
    trick = eqxi.scan_trick(f, between[:2], jnp.float32(1.0))
    assert jnp.allclose(trick, repeat(1.0, jnp.arange(3))[0])

    @jax.jit
    @jax.vmap
    def each(x):
        theirs = eqxi.unvmap_any(x > 0.5), eqxi.unvmap_all(x > 0.5), eqxi.unvmap_max(x)
        ours = el.unvmap(x > 0.5), el.unvmap(x > 0.5, "all"), el.unvmap(x, "max")
        return theirs, ours

    assert eqx.tree_equal(*each(XS))


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_powerpax(reverse):
    ppx = pytest.importorskip("powerpax")
    assert set(NAMES["powerpax"].split()) == set(ppx.__all__)
    for how in ({"step": 4}, {"start": 3, "stop": -2}, {"step": -5}):
        theirs = functools.partial(ppx.sliced_scan, step, reverse=reverse, **how)
        agree(theirs, el.SlicedScan(step, reverse=reverse, **how), 0.3, XS)
    theirs = functools.partial(ppx.checkpoint_chunked_scan, step, reverse=reverse)
    agree(theirs, el.Remat(el.Scan(step, reverse=reverse)), 0.3, XS)
    for policy in (None, el.policies.save_everything):
        ours = el.Scan(step, reverse=reverse, schedule=el.Chunked(5), policy=policy)
        agree(functools.partial(theirs, chunk_size=5), ours, 0.3, XS)


@pytest.mark.slow
def test_powerpax_map():
    ppx = pytest.importorskip("powerpax")
    agree(ppx.chunked_vmap(step, 5), el.ChunkedVmap(step, 5), XS, XS)


@pytest.mark.slow
def test_flax_has_the_names():
    pytest.importorskip("flax")
    from flax import linen, nnx

    check_names("flax", nn=linen, nnx=nnx)


@pytest.mark.slow
def test_flax_recurrent():
    nn = pytest.importorskip("flax.linen")

    class Cell(nn.Module):
        @nn.compact
        def __call__(self, h, x):
            h = nn.tanh(nn.Dense(4)(jnp.concatenate([h, x], -1)))
            return h, h

    class OurCell(eqx.Module):
        dense: eqx.nn.Linear

        def __call__(self, h, x):
            h = jnp.tanh(self.dense(jnp.concatenate([h, x])))
            return h, h

    shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
    scan = nn.scan(Cell, **shared, in_axes=1, out_axes=1)()
    h, xs = jnp.zeros((2, 4)), jnp.sin(jnp.arange(30.0)).reshape(2, 5, 3)
    params = scan.init(jax.random.key(0), h, xs)

    def ours(params, h, xs):
        loop = el.Scan(OurCell(linear(params["params"]["Dense_0"])))
        return jax.vmap(loop)(h, xs)

    agree(scan.apply, ours, params, h, xs)


@pytest.mark.slow
def test_flax_layers():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, *_):
            y = x + nn.tanh(nn.Dense(3)(x))
            return (y, None) if _ else y

    class OurBlock(eqx.Module):
        dense: eqx.nn.Linear

        def __call__(self, x):
            return x + jnp.tanh(self.dense(x))

    x = jnp.linspace(0.0, 1.0, 3)
    each = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    scan = nn.scan(Block, **each, length=6)()
    params = scan.init(jax.random.key(0), x, None)
    dense = lambda params: linear(params["params"]["Dense_0"])
    ours = lambda params, x: el.StackedLayers(OurBlock(dense(params)))(x)
    agree(lambda params, x: scan.apply(params, x, None)[0], ours, params, x)

    nested = nn.remat_scan(Block, lengths=(2, 3))()
    params = nested.init(jax.random.key(0), x)

    def recursive(params, x):
        flat = jax.tree.map(lambda leaf: leaf.reshape(6, *leaf.shape[2:]), params)
        return el.StackedLayers(OurBlock(dense(flat)), schedule=el.Recursive(3))(x)

    agree(nested.apply, recursive, params, x)


@pytest.mark.slow
def test_flax_nnx():
    pytest.importorskip("flax")
    from flax import nnx

    carried = nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    agree(carried, el.Scan(step), 0.3, XS)
    counted = lambda h: nnx.fori_loop(2, 5, lambda i, h: jnp.sin(h * i), h)
    ours = el.Scan(lambda h, i: (jnp.sin(h * i), None))
    agree(counted, lambda h: ours(h, jnp.arange(2, 5))[0], 0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "schedule"),
    [(False, el.StoreAll()), (True, el.Chunked(1)), ("nested", el.Chunked(3))],
)
def test_haliax(spec, schedule):
    hax = pytest.importorskip("haliax")
    hnn = hax.nn
    check_names("haliax", hax=hax, hnn=hnn)

    class Block(eqx.Module):
        linear: hnn.Linear

        @staticmethod
        def init(embed, *, key):
            return Block(hnn.Linear.init(embed, embed.alias("out"), key=key))

        def __call__(self, x):
            return x + hax.tanh(self.linear(x)).rename({"out": "embed"})

    class OurBlock(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return x + jnp.tanh(self.linear(x))

    depth, embed = hax.Axis("layers", 6), hax.Axis("embed", 3)
    make = hnn.Stacked.init(depth, Block, gradient_checkpointing=spec)
    layers = make(embed, key=jax.random.split(jax.random.key(0), 6))

    def ours(layers, x):
        weight, bias = layers.stacked.linear.weight, layers.stacked.linear.bias
        kernel = weight.rearrange((depth, embed, embed.alias("out"))).array
        block = OurBlock(linear({"kernel": kernel, "bias": bias.array}))
        return el.StackedLayers(block, schedule=schedule)(x)

    theirs = lambda layers, x: layers.fold(hax.named(x, (embed,))).array
    agree(theirs, ours, layers, jnp.linspace(0.0, 1.0, 3))
