"""A fitted function in whatever may be around it, and with whatever may be in it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close, assert_same_types
from ..compiling import temp_bytes
from .functions import TIGHT, W, X, layers, over_time

pytestmark = pytest.mark.sampled

name = lambda value: getattr(value, "__name__", str(value))
total = lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
parts = lambda f: lambda w, x: jax.grad(f, (0, 1))(w, x)


# What is around it.


def in_jit_in_jit(f):
    return parts(jax.jit(lambda w, x: 2 * jax.jit(f)(w, x)))


def vmap_outside(f):
    return jax.vmap(parts(f), (None, 0))


def vmap_inside(f):
    return parts(lambda w, x: jnp.sum(jax.vmap(f, (None, 0))(w, x) ** 2))


def vmap_of_weights(f):
    return lambda w, x: parts(lambda w, x: total(jax.vmap(f, (0, None))(w, x)))(
        jnp.stack([w, w / 2]), x[0]
    )


def jvp(f):
    return lambda w, x: jax.jvp(f, (w, x), (w, x))


def jvp_of_gradient(f):
    return lambda w, x: jax.jvp(parts(f), (w, x), (x[:8] @ w, x))


def gradient_of_jvp(f):
    return parts(lambda w, x: total(jvp(f)(w, x)))


def gradient_of_gradient(f):
    return parts(lambda w, x: total(parts(f)(w, x)))


def in_scan(f):
    def run(w, x):
        return lax.scan(lambda h, t: (h + f(w, t * x), h), 0.0, jnp.ones(3))

    return parts(lambda w, x: total(run(w, x)))


def in_checkpointed_scan(f):
    def run(w, x):
        step = lambda h, t: (h + f(w, t * x), None)
        return el.CheckpointedScan(step, 2)(0.0, jnp.ones(4))[0]

    return parts(run)


def in_checkpoint(f):
    return parts(jax.checkpoint(lambda w, x: f(w, jnp.sin(x))))


def in_cond(f):
    return parts(lambda w, x: lax.cond(w[0, 0] < 9, f, lambda w, x: w[0, 0], w, x))


def in_fit(f):
    return parts(el.Fit(lambda w, x: 2 * f(jnp.sin(w), x), "1MiB"))


def accumulated(f):
    in_chunks = el.ChunkedVmap(f, 2, in_axes=(None, 0), reduce="sum")
    return parts(lambda w, x: in_chunks(w, x))


def linearized(f):
    return lambda w, x: jax.linearize(f, w, x)[1](w, x)


def in_shard_map(f):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    mean = lambda w, x: lax.pmean(f(w, x), "i")
    specs = dict(in_specs=(P(), P("i")), out_specs=P())
    return parts(jax.shard_map(mean, mesh=mesh, **specs))


def gradient_in_shard_map(f):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])

    def on_device(w, x):
        by_w, by_x = parts(f)(w, x)
        return lax.pmean(by_w, "i"), by_x

    specs = dict(in_specs=(P(), P("i")), out_specs=(P(), P("i")), check_vma=False)
    return jax.shard_map(on_device, mesh=mesh, **specs)


BATCHED = vmap_outside, vmap_inside, vmap_of_weights, accumulated
AROUND = (
    in_jit_in_jit,
    jvp,
    linearized,
    jvp_of_gradient,
    gradient_of_jvp,
    gradient_of_gradient,
    in_scan,
    in_checkpointed_scan,
    in_checkpoint,
    in_cond,
    in_fit,
    in_shard_map,
    gradient_in_shard_map,
)


@pytest.mark.parametrize("around", [*BATCHED, *AROUND], ids=name)
def test_what_is_around(around: Any):
    x = jnp.stack([X, X[::-1]]) if around in BATCHED else X
    budget = 6 * TIGHT if around in BATCHED else TIGHT
    # Derivatives of a gradient have budgets of their own, and need more than it.
    budget = 3 * TIGHT if "of_" in around.__name__ else budget
    actual = jax.jit(around(el.Fit(layers, budget)))(W, x)
    assert_close(actual, jax.jit(around(layers))(W, x), 1e-3, 1e-4)


@pytest.mark.parametrize("around", [vmap_inside, gradient_of_jvp], ids=name)
def test_a_loop_with_something_around(around: Any):
    x = jnp.stack([X[:6], X[6:12]]) if around in BATCHED else X[:6]
    actual = jax.jit(around(el.Fit(over_time, 7_000)))(W, x)
    assert_close(actual, jax.jit(around(over_time))(W, x), 1e-3, 1e-4)


def test_replicated_values_stay_so():
    def cast(w, x):
        w = jnp.tanh(jnp.sin(w) * w)
        return layers(w, x * jnp.sum(w))

    for around in (in_shard_map, gradient_in_shard_map):
        actual = jax.jit(around(el.Fit(cast, TIGHT)))(W, X)
        assert_close(actual, jax.jit(around(cast))(W, X), 1e-3, 1e-4)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev], ids=name)
def test_hessians(mode: Any):
    f = lambda w: layers(W, w * X)
    fit = el.Fit(f, TIGHT)
    hessian = lambda f: jax.jit(mode(jax.jacrev(f)))(jnp.float32(0.5))
    assert_close(hessian(fit), hessian(f), 1e-3, 1e-4)


# Where its arrays are.


def test_automatic_shardings_are_planned_for_one_device():
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("i"))
    x = jax.ShapeDtypeStruct((4 * 32, 8), jnp.float32, sharding=split)
    whole = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P()))
    plan = el.Fit(layers, TIGHT).plan(whole, x)
    assert plan.is_compiled
    assert plan.peak_bytes <= TIGHT
    gradient = lambda w, x: jax.value_and_grad(plan.pinned, (0, 1))(w, x)
    assert temp_bytes(gradient, whole, x) <= TIGHT


def test_a_total_is_that_of_one_device():
    mesh = jax.make_mesh((4,), ("i",), (AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("i"))
    x = jax.ShapeDtypeStruct((4 * 32, 8), jnp.float32, sharding=split)
    whole = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P()))
    total = 2 * (W.nbytes + X.nbytes) + TIGHT + 4
    plan = el.Fit(layers, total=total).plan(whole, x)
    assert plan.peak_bytes <= TIGHT


def test_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Explicit,), devices=jax.devices()[:2])
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    w = jax.device_put(W, NamedSharding(mesh, P()))
    actual = jax.jit(parts(el.Fit(layers, TIGHT)))(w, x)
    assert_close(actual, parts(layers)(W, X), 1e-3, 1e-4)


# What is in it.


@jax.custom_jvp
def ruled_forwards(x):
    return jnp.tanh(x)


@ruled_forwards.defjvp
def _(primals, tangents):
    return ruled_forwards(*primals), 2 * tangents[0]


@jax.custom_vjp
def ruled_backwards(x):
    return jnp.sin(x)


ruled_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (3 * ct * x,))


@jax.custom_batching.custom_vmap
def ruled_in_batches(x):
    return jnp.sin(x)


@ruled_in_batches.def_vmap
def _(size, batched, x):
    return 2 * jnp.sin(x), batched[0]


def with_custom_rules(w, x):
    for act in (ruled_forwards, ruled_backwards, jnp.sin, ruled_forwards):
        x = act(x @ w) * jnp.tanh(x)
    return jnp.sum(x**2)


def with_dropout(w, x):
    for key in jax.random.split(jax.random.key(0), 3):
        x = jnp.tanh(jnp.sin(x @ w) * x)
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, jnp.zeros_like(x))
    return jnp.sum(x**2)


def test_masks_are_the_same_ones():
    def f(x: Any, key: Any) -> Any:
        for part in jax.random.split(key, 3):
            mask = jax.random.bernoulli(part, 0.8, x.shape)
            x = jnp.where(mask, jnp.sin(jnp.sin(x) + 1), jnp.zeros_like(x))
        return jnp.sum(x)

    # An entry is zero where the last mask is, and there alone.
    gradient = lambda f: jax.jit(jax.grad(f))(X, jax.random.key(7)) == 0
    actual, expected = gradient(el.Fit(f, 9_000)), gradient(f)
    np.testing.assert_array_equal(actual, expected)
    assert 0 < jnp.sum(actual) < X.size


def with_checkpoints_in_it(w, x):
    layer = jax.checkpoint(lambda x: el.name(jnp.tanh(jnp.sin(x @ w)), "y") * x)
    for _ in range(3):
        x = jnp.sin(layer(x)) + jnp.cos(x)
    return jnp.sum(x**2)


def with_branches(w, x):
    for i in range(3):
        x = lax.cond(x[0, 0] < i, lambda x: jnp.sin(x @ w), lambda x: jnp.cos(x), x)
    return jnp.sum(x**2)


def with_a_shard_map(w, x):
    mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
    layer = lambda w, x: jnp.tanh(jnp.sin(x @ w) * x)
    specs = dict(in_specs=(P(), P("i")), out_specs=P("i"))
    layer = jax.shard_map(layer, mesh=mesh, **specs)
    return jnp.sum(layer(w, jnp.sin(layer(w, x))) ** 2)


def with_loops_of_jax(w, x):
    h, _ = lax.scan(lambda h, u: (jnp.tanh(h @ w + u), None), x[0], x[:6])
    return jnp.sum(lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), h) ** 2)


def with_a_while_loop(w, x):
    body = lambda state: (state[0] + 1, jnp.sin(state[1] @ w))
    loop = el.CheckpointedWhileLoop(lambda state: state[0] < 4, body)
    return jnp.sum(loop((0, jnp.tanh(x[0])))[1] ** 2)


def with_a_loop_of_no_steps(w, x):
    h, ys = el.Scan(lambda h, u: (jnp.tanh(h @ w + u), h))(jnp.sin(x[0]), x[:0])
    return jnp.sum(h**2) + jnp.sum(ys)


def with_a_loop_in_a_loop(w, x):
    inner = lambda h, u: (jnp.tanh(h @ w + u), None)
    outer = lambda h, _: (el.Scan(inner)(h, x[:3])[0], None)
    return jnp.sum(el.Scan(outer)(x[0], length=3)[0] ** 2)


def mixed_precision(w, x):
    w, x = w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    for _ in range(4):
        x = jnp.tanh(jnp.sin(x @ w) * x)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def complex_numbers(w, x):
    z = lax.complex(x, jnp.cos(x))
    for _ in range(4):
        z = jnp.sin(z @ w.astype(jnp.complex64)) * z / 4
    return jnp.sum(jnp.abs(z) ** 2)


def independent_of_one(w, x):
    return layers(w, jnp.ones_like(x)) + jnp.sum(lax.stop_gradient(x))


def independent_of_all(w, x):
    return jnp.float32(3)


INSIDE = (
    with_custom_rules,
    with_dropout,
    with_checkpoints_in_it,
    with_branches,
    with_a_shard_map,
    with_loops_of_jax,
    with_a_while_loop,
    with_a_loop_of_no_steps,
    with_a_loop_in_a_loop,
    mixed_precision,
    complex_numbers,
    independent_of_one,
    independent_of_all,
)

# The least that each can do with, but for some bytes; all take less than the full one.
LEAST = {
    with_custom_rules: 9_000,
    with_dropout: 12_000,
    with_checkpoints_in_it: 12_500,
    with_branches: 9_000,
    with_a_shard_map: 10_300,
    complex_numbers: 39_000,
}


@pytest.mark.parametrize("f", INSIDE, ids=name)
def test_what_is_inside(f: Any):
    """The value is the same but for how a sum is fused, the gradient to rounding."""
    compiled = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(W, X)
    value, gradient = compiled(el.Fit(f, LEAST.get(f, TIGHT)))
    plain, expected = compiled(f)
    np.testing.assert_allclose(value, plain, 2e-6)
    assert_same_types(value, plain)
    # Numbers of 16 bits are rounded anew in each fusion.
    rough = f is mixed_precision
    assert_close(gradient, expected, 1e-1 if rough else 1e-3, 1e-1 if rough else 1e-4)


def test_batches_have_their_own_rule():
    f = lambda x: jnp.sum(jnp.tanh(ruled_in_batches(jnp.sin(x)) * x))
    batch = lambda f: jax.jit(jax.vmap(f))(X)
    assert_close(batch(el.Fit(f, TIGHT)), batch(f))


@pytest.mark.parametrize("place", ["code", "loop"])
def test_effects_happen_as_often_as_without(place: str, capfd: Any):
    def f(w, x):
        def step(h, u):
            jax.debug.print("seen {}", jnp.sum(u))
            return jnp.tanh(jnp.sin(h @ w) + u), None

        if place == "loop":
            return jnp.sum(el.Scan(step)(x[0], x[:4])[0])
        for row in x[:4]:
            x = jnp.sin(step(x, jnp.broadcast_to(row, x.shape))[0]) * x
        return jnp.sum(x)

    for one in (f, el.Fit(f, 12_800 if place == "code" else 2_400)):
        jax.block_until_ready(jax.jit(parts(one))(W, X))
        jax.effects_barrier()
        assert capfd.readouterr().out.count("seen") == 4


def test_a_loop_with_callbacks_is_not_run_again():
    seen = []

    def step(h, u):
        last = io_callback(lambda x: seen.append(x) or x, X[0], lax.stop_gradient(u))
        return jnp.tanh(jnp.sin(h) + u * last), None

    f = lambda x: jnp.sum(el.Scan(step)(x[0], x[:6])[0])
    fit = el.Fit(f, 1_500)
    assert_close(jax.jit(jax.grad(fit))(X), jax.jit(jax.grad(f))(X))
    assert len(seen) == 12


def test_references_are_refused():
    ref = jax.new_ref(jnp.zeros(()))

    def f(x):
        ref[...] = jnp.sum(x)
        return jnp.sum(jnp.sin(x))

    with pytest.raises(TypeError, match="closes over a reference"):
        el.Fit(f, TIGHT)(X)


def test_references_within_are_its_own_affair():
    def f(x):
        ref = jax.new_ref(jnp.zeros(()))
        ref[...] = jnp.sum(jnp.sin(x))
        return ref[...]

    assert_close(jax.jit(jax.grad(el.Fit(f, TIGHT)))(X), jnp.cos(X))


@pytest.mark.usefixtures("either_width")
def test_types_of_outputs():
    def f(x, n):
        return {
            "weak": x * 0 + jnp.asarray(2.0),
            "of Python": 2.0,
            "int": n + 1,
            "bool": n > 0,
            "key": jax.random.key(3),
            "static": "name",
            "array": jnp.sum(jnp.sin(x)),
        }

    args = jnp.ones(3), jnp.arange(2)
    assert_same_types(el.Fit(f, TIGHT)(*args), f(*args))
    jitted = eqx.filter_jit(el.Fit(f, TIGHT))(*args)
    assert_same_types(jitted, eqx.filter_jit(f)(*args))


def test_weak_arguments():
    f = lambda x: x * jnp.ones(3, jnp.bfloat16)
    assert_same_types(el.Fit(f, TIGHT)(2.0), f(2.0))
    gradient = jax.grad(lambda x: jnp.sum(el.Fit(f, TIGHT)(x)).astype(jnp.float32))
    assert_close(gradient(2.0), jnp.float32(3))


@pytest.mark.usefixtures("either_width")
def test_both_widths():
    w, x = W.astype(float), X.astype(float)
    budget = TIGHT * w.dtype.itemsize // 4
    value = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(w, x)
    assert_close(value(el.Fit(layers, budget)), value(layers), 1e-3, 1e-4)


def test_nothing_is_differentiated():
    fit = el.Fit(lambda n: jnp.sum(n * n), 1)
    assert fit(jnp.arange(3)) == 5
    plan = fit.plan(jnp.arange(3))
    assert plan.peak_bytes == 0


def test_no_array_at_all():
    fit = el.Fit(lambda name: name.upper(), TIGHT)
    assert fit("abc") == "ABC"
    assert fit.plan("abc").parts == ()


def test_cotangents_that_are_numbers():
    def f(h: Any, xs: Any) -> Any:
        step = lambda h, x: (jnp.tanh(h + x), h)
        return jnp.sum(jnp.sin(el.Scan(step)(h, xs)[0]) ** 2)

    args = jnp.float32(1), X[0]
    gradient = lambda f: jax.jit(jax.grad(f, (0, 1)))(*args)
    assert_close(gradient(el.Fit(f, TIGHT)), gradient(f))


@pytest.mark.parametrize("f", [lambda x: x, lambda x: (x, x)], ids=["one", "two"])
def test_what_comes_back_as_it_was(f: Any):
    fit = el.Fit(f, 1)
    pulled = lambda f: jax.vjp(f, X)[1](f(X))
    assert_close(pulled(fit), pulled(f))
