"""Loops in whatever may be around them: they are taken there, and compile there."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import eqloop as el

from ..asserts import assert_close

pytestmark = pytest.mark.sampled

W, XS = jnp.array([0.9, -0.4]), jnp.linspace(0.1, 1.0, 12)


def loop(w, xs):
    step = lambda h, x: (jnp.tanh(w * h + x), h * x)
    h, ys = lax.scan(step, jnp.ones_like(w), xs)
    return jnp.sum(h) + jnp.sum(ys**2)


def around_custom_vjp(w, xs):
    wave = jax.custom_vjp(jnp.sin)
    wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))
    h, _ = lax.scan(lambda h, x: (wave(w * h + x), None), jnp.ones_like(w), xs)
    return jnp.sum(h)


def in_loops(w, xs):
    def outer(total, x):
        once = lambda i, h: h + loop(w * x, xs) / (i + 2.0)
        return lax.fori_loop(0, 3, once, total), None

    return lax.scan(outer, 0.0, xs[:2])[0]


def donated(w, xs):
    return jax.jit(loop, donate_argnums=1)(w, jnp.sin(xs))


def checkpointed_by_name(w, xs):
    def step(h, x):
        return el.name(jnp.tanh(w * h + x), "state"), None

    def run(w, xs):
        policy = jax.checkpoint_policies.save_only_these_names("state")
        step_ = jax.checkpoint(step, policy=policy)
        return jnp.sum(lax.scan(step_, jnp.ones_like(w), xs)[0])

    return jax.checkpoint(run)(w, xs)


def in_vmap(w, xs):
    one = lambda w: loop(w, xs) + lax.psum(loop(2 * w, xs), "batch")
    return jnp.sum(jax.vmap(one, axis_name="batch")(w))


def with_a_collective(w, xs):
    def one(w):
        step = lambda h, x: (jnp.tanh(w * h + x + lax.pmean(h, "batch")), None)
        return lax.scan(step, w, xs)[0]

    return jnp.sum(jax.vmap(one, axis_name="batch")(w))


def in_shard_map(w, xs, check=True, mode=AxisType.Auto):
    mesh = jax.make_mesh((2,), ("i",), (mode,), devices=jax.devices()[:2])

    def on_device(w, xs):
        step = lambda h, x: (jnp.tanh(w * h + x + lax.pmean(h, "i")), None)
        h, _ = lax.scan(step, jnp.ones_like(w) * w, xs)
        return lax.psum(jnp.sum(h), "i")

    i, none = PartitionSpec("i"), PartitionSpec()
    specs = dict(in_specs=(i, none), out_specs=none, check_vma=check)
    return jax.shard_map(on_device, mesh=mesh, **specs)(w, xs)


PLACES = {
    "in jit": jax.jit(loop),
    "in jit in jit": jax.jit(lambda *args: jax.jit(loop)(*args) * 2),
    "in checkpoint": jax.checkpoint(loop),
    "in cond": lambda w, xs: lax.cond(w[0] > 0, loop, lambda w, xs: w[1], w, xs),
    "in switch": lambda w, xs: lax.switch(1, [lambda w, xs: w[0], loop], w, xs),
    "around custom_vjp": around_custom_vjp,
    "in loops": in_loops,
    "donated": donated,
    "checkpointed by name": checkpointed_by_name,
    "in vmap": in_vmap,
    "with a collective": with_a_collective,
    "in shard_map": in_shard_map,
    "in shard_map, unchecked": functools.partial(in_shard_map, check=False),
    "in a derivative": jax.grad(lambda *args: jnp.sum(jax.grad(loop)(*args))),
    "in a derivative of a checkpoint": jax.grad(jax.checkpoint(loop)),
    "in filter_jit": eqx.filter_jit(loop),
    "in filter_checkpoint": eqx.filter_checkpoint(loop),
}


@pytest.mark.parametrize("f", PLACES.values(), ids=PLACES)
def test_loops_are_taken_and_compiled_wherever_they_are(f):
    frugal = el.Reschedule(f, el.Recursive(3))
    assert frugal.plans(W, XS).taken
    total = lambda f, *args: jnp.sum(f(*args) ** 2)
    gradient = lambda f: jax.grad(functools.partial(total, f), (0, 1))
    both = lambda f: jax.jit(lambda *args: (f(*args), gradient(f)(*args)))(W, XS)
    assert_close(both(frugal), both(f), 1e-3, 1e-4)


def test_a_rule_stands_for_the_loops_of_its_function():
    ruled = jax.custom_jvp(loop)
    ruled.defjvp(lambda args, dots: jax.jvp(loop, args, dots))
    frugal = el.Reschedule(lambda w, xs: 2 * ruled(w, xs), el.Recursive(3))
    plans = frugal.plans(W, XS)
    assert not plans.taken
    ((_, why),) = plans.left
    assert "the rule of the `custom_jvp`" in why
    with pytest.warns(UserWarning, match="the rule of the `custom_jvp`"):
        assert_close(jax.jit(frugal)(W, XS), 2 * loop(W, XS))


def test_what_has_no_gradient_is_run():
    def looked_up(x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(lambda x: x / 2, shape, x, vmap_method="sequential")

    def f(xs):
        inner = lambda h, x: (looked_up(h) + x, None)
        outer = lambda h, x: (lax.scan(inner, h, xs * x)[0], None)
        return lax.scan(outer, 0.0, xs)[0]

    assert_close(el.Reschedule(f, el.Recursive(2))(XS), f(XS))
