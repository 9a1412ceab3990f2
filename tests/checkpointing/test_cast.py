"""Slots in a lower precision: what they take, and how far the gradient is off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..compiling import temp_bytes
from ..marks import slow

SCHEDULES = [el.Binomial(3), el.Recursive(3), el.Chunked(4, batch=4)]


def wave(carry, _):
    u, v, key = carry
    key, of_step = jax.random.split(key)
    force = jnp.roll(u, 1) + jnp.roll(u, -1) - 2 * u - 0.1 * u**3
    v = v + 0.1 * force * (1 + 0.1 * jax.random.uniform(of_step))
    return (u + 0.1 * v, v, key), None


def energy(schedule, u):
    init = (u, jnp.zeros_like(u), jax.random.key(0))
    (u, _, _), _ = el.Scan(wave, schedule=schedule)(init, length=20)
    return jnp.sum(u**2)


U = jnp.exp(-(jnp.linspace(-3, 3, 64) ** 2))


@pytest.mark.parametrize("offload", [slow(False), True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow("float16")])
@pytest.mark.parametrize("schedule", [SCHEDULES[0], *map(slow, SCHEDULES[1:])])
def test_gradients_are_good_to_the_digits_of_the_dtype(schedule, dtype, offload):
    cast = el.Cast(schedule, dtype)
    cast = el.Offload(cast) if offload else cast
    found = jax.value_and_grad(functools.partial(energy, cast))(U)
    expected = jax.value_and_grad(functools.partial(energy, schedule))(U)
    assert found[0] == expected[0]
    error = np.linalg.norm(found[1] - expected[1]) / np.linalg.norm(expected[1])
    assert 1e-7 < error < 10 * float(jnp.finfo(dtype).eps)


def test_a_dtype_that_is_as_wide_changes_nothing():
    cast = el.Cast(el.Binomial(3), jnp.float32)
    found, expected = (
        jax.grad(functools.partial(energy, schedule))(U)
        for schedule in (cast, el.Binomial(3))
    )
    assert jnp.array_equal(found, expected)


@pytest.mark.slow
def test_every_mode_of_differentiation():
    f = functools.partial(energy, el.Cast(el.Binomial(3), jnp.bfloat16))
    plain = functools.partial(energy, el.StoreAll())
    of_modes = (
        jax.hessian,
        lambda f: jax.jacrev(jax.grad(f)),
        lambda f: lambda u: jax.jvp(jax.grad(f), (u,), (jnp.cos(u),)),
        lambda f: lambda u: jax.vmap(jax.grad(f))(jnp.stack([u, 0.5 * u])),
        lambda f: jax.grad(lambda u: jnp.sum(jax.vmap(f)(jnp.stack([u, 0.5 * u])))),
    )
    for mode in of_modes:
        found, expected = (jax.jit(mode(g))(U) for g in (f, plain))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


@pytest.mark.parametrize("schedule", [SCHEDULES[0], slow(SCHEDULES[1])], ids=repr)
def test_half_the_memory_as_planned(schedule):
    init = (jnp.ones(4096), jnp.zeros(4096))
    step = lambda carry, x: (wave((*carry, jax.random.key(1)), x)[0][:2], None)
    xs = jnp.zeros(96)
    cast = el.Cast(schedule, jnp.bfloat16)
    full, half = (el.Scan(step, schedule=s).plan(init, xs) for s in (schedule, cast))
    assert half.slot_bytes * 2 == full.slot_bytes == 2 * 4 * 4096
    stored = full.slots * full.slot_bytes
    assert 0.4 * stored < full.peak_bytes - half.peak_bytes < 0.7 * stored
    loss = lambda init, xs: energy_of(el.Scan(step, schedule=cast), init, xs)
    temp = temp_bytes(jax.grad(loss), init, xs)
    assert temp <= half.peak_bytes <= 1.02 * temp + 16 * 1024


def energy_of(scan, init, xs):
    return sum(jnp.sum(leaf**2) for leaf in scan(init, xs)[0])


def test_what_cast_takes():
    with pytest.raises(TypeError, match="Cast: `schedule` must be a schedule"):
        el.Cast(16, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"Cast: StoreAll.. stores residuals"):
        el.Cast(el.StoreAll(), jnp.bfloat16)
    for wrong in ("half a float", None, 3.5):
        with pytest.raises(TypeError, match="must be a floating-point dtype"):
            el.Cast(el.Binomial(3), wrong)
    for wrong in (jnp.int8, "complex64", bool):
        with pytest.raises(ValueError, match="must be a floating-point dtype"):
            el.Cast(el.Binomial(3), wrong)
    twice = el.Cast(el.Offload(el.Cast(el.Binomial(3), "float16")), "bfloat16")
    with pytest.raises(ValueError, match="are cast already"):
        jax.grad(functools.partial(energy, twice))(U)
