"""Loops that are reversed by an inverse of the step."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..derivatives import (
    batch_of,
    forward_over_reverse,
    grad,
    hessian,
    name,
    of_batch,
    reverse_over_reverse,
)
from ..marks import slow
from ..weights import normal

pytestmark = pytest.mark.sampled

WIDTH = 4


def leapfrog(w, carry, x):
    q, p, count, total = carry
    dt, _ = x
    q = q + 0.5 * dt * p
    p = p - dt * w * jnp.sin(q)
    q = q + 0.5 * dt * p
    return (q, p, count + 1, total + jnp.sum(q)), q * p


def undo(w, carry, x):
    (q, p, count, total), (dt, kick) = carry, x
    (q, p, _, _), _ = leapfrog(w, (q, p, count, total), (-dt, kick))
    return q, p, count - 1, total


def heun(w, carry, dt):
    """Reversible Heun (Kidger et al. 2021), of dy = tanh(w y) dt."""
    y, z, rate = carry
    z = 2 * y - z + dt * rate
    after = jnp.tanh(w * z)
    return (y + 0.5 * dt * (rate + after), z, after), None


def undo_heun(w, carry, dt):
    y, z, rate = carry
    z = 2 * y - z - dt * rate
    before = jnp.tanh(w * z)
    return y - 0.5 * dt * (before + rate), z, before


def run(schedule, w, h, dts):
    init = (h, jnp.cos(h), jnp.zeros((), jnp.int32), jnp.zeros(()))
    schedule = schedule and schedule(functools.partial(undo, w))
    scan = el.Scan(functools.partial(leapfrog, w), schedule=schedule)
    (q, p, _, total), ys = scan(init, (dts, jnp.arange(dts.size)))
    return jnp.sum(jnp.sin(q) * p) + 0.1 * total + jnp.sum(jnp.cos(ys))


ARGS = jnp.linspace(0.5, 1.5, WIDTH), jnp.linspace(-1, 1, WIDTH), jnp.full(11, 0.1)


MODES = [
    grad,
    hessian,
    reverse_over_reverse,
    forward_over_reverse,
    batch_of(grad, 0),
    batch_of(grad, 1),
    of_batch(grad, 1),
]
SCHEDULES = {
    "one part": el.Reversible,
    "parts": lambda f: el.Reversible(f, checkpoints=3),
    "every step": lambda f: el.Reversible(f, checkpoints=99),
    "unchecked": lambda f: el.Reversible(f, check=False),
    "on the host": lambda f: el.Offload(el.Reversible(f, checkpoints=2)),
}
# A batch of gradients is in `test_reversible_saved.py`.
AT_REST = [("parts", forward_over_reverse)]
AT_REST += [("every step", grad), ("on the host", grad)]
CASES = [
    (name, mode) if (name, mode) in AT_REST else slow(name, mode)
    for name in SCHEDULES
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), CASES, ids=name)
def test_every_mode(name, mode):
    found = jax.jit(functools.partial(mode, functools.partial(run, SCHEDULES[name])))
    expected = jax.jit(functools.partial(mode, functools.partial(run, None)))
    assert_close(found(*ARGS), expected(*ARGS), rtol=2e-4, atol=2e-4)


def test_keys_and_captured_arrays():
    """The inverse gets the keys of the steps, and closes over what it likes."""

    def loss(schedule, w, h):
        def step(h, _, *, key):
            return (h[1] + w * jax.random.normal(key, h[0].shape), h[0]), None

        def back(h, _, *, key):
            return (h[1], h[0] - w * jax.random.normal(key, h[0].shape))

        scan = el.Scan(step, schedule=schedule and el.Reversible(back))
        (a, b), _ = scan((h, jnp.sin(h)), length=6, key=jax.random.key(2))
        return jnp.sum(a * b)

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    found, expected = (gradient(s, jnp.float32(0.3), ARGS[1]) for s in (True, None))
    assert_close(found, expected, rtol=1e-5, atol=0)


def heun_loss(schedule, w, y, dts):
    scan = el.Scan(functools.partial(heun, w), schedule=schedule)
    return jnp.sum(scan((y, y, jnp.tanh(w * y)), dts)[0][0] ** 2)


@pytest.mark.parametrize("steps", [1000, slow(10_000), slow(100_000)])
def test_rounding_and_memory_of_long_loops(steps):
    w, h, _ = ARGS
    dts = jnp.full(steps, 1e-2)
    parts = max(steps // 1000, 1)

    def loss(schedule, w):
        scan = el.Scan(functools.partial(leapfrog, w), schedule=schedule)
        zero = jnp.zeros((), jnp.int32)
        xs = (dts, jnp.zeros(steps))
        return jnp.sum(scan((h, jnp.cos(h), zero, 0.0), xs)[0][0] ** 2)

    schedule = el.Reversible(functools.partial(undo, w), checkpoints=parts)
    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, s)))(w) for s in (schedule, None)
    )
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= 1e-3
    temp = temp_bytes(jax.grad(functools.partial(loss, schedule)), w)
    # The two `xs`, and a few numbers for each part.
    assert temp <= 3000 + 64 * parts + 8 * steps


def test_reversible_heun():
    w, h, _ = ARGS
    dts = jnp.full(200, 0.01)
    inverse = functools.partial(undo_heun, w)
    found, expected = (
        jax.jit(jax.grad(functools.partial(heun_loss, s, w)))(h, dts)
        for s in (el.Reversible(inverse), None)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_plan():
    step = functools.partial(leapfrog, ARGS[0])
    inverse = functools.partial(undo, ARGS[0])
    scan = el.Scan(step, schedule=el.Reversible(inverse, checkpoints=3))
    init = (jnp.ones(WIDTH), jnp.ones(WIDTH), jnp.zeros((), jnp.int32), jnp.zeros(()))
    short, long = (scan.plan(init, (jnp.ones(n), jnp.zeros(n))) for n in (100, 10_000))
    assert (short.slots, short.evaluations) == (3, 300)
    assert (long.slots, long.evaluations) == (3, 30_000)
    assert long.peak_bytes - short.peak_bytes <= 64
    # Nobody has to know the total on the way back, or count.
    held = dict(long.holds)
    assert held == dict.fromkeys(("carry[0]", "carry[1]"), True) | dict.fromkeys(
        ("carry[2]", "carry[3]"), False
    )
    events = list(short._layout.order.history())
    assert len(events) == short.evaluations
    reversed_steps = [e.position for e in events if e.kind == "reversal"]
    assert reversed_steps == list(reversed(range(100)))


WRONG = {
    "nothing undone": lambda carry, x: carry,
    "a slip": lambda carry, x: undo(0.9 * ARGS[0], carry, x),
    "no number": lambda carry, x: undo(jnp.nan * ARGS[0], carry, x),
}


def test_an_inverse_that_is_none_is_found_at_a_leaf_with_a_name():
    step = lambda h, x: ({"a": jnp.sin(h["a"]) + 2, "n": h["n"] + 1}, None)
    inverse = lambda h, x: {"a": h["a"], "n": h["n"] - 1}
    how = el.Reversible(inverse)
    loop = el.ScanWhile(lambda h: h["n"] < 3, step, max_steps=4, schedule=how)
    f = lambda a: loop({"a": a, "n": 0})[0]["a"]
    batch, one = jnp.ones(2), jnp.float32(1.0)
    calls = {
        "batch": lambda: jax.grad(lambda a: jnp.sum(jax.vmap(f)(a)))(batch),
        "forward over reverse": lambda: jax.jvp(jax.grad(f), (one,), (one,)),
    }
    for call in calls.values():
        with pytest.raises(Exception, match=r"At carry\['a'\]"):
            jax.block_until_ready(call())


@pytest.mark.parametrize("name", ["a slip", "no number", slow("nothing undone")])
def test_an_inverse_that_is_none(name):
    f = functools.partial(run, lambda _: el.Reversible(WRONG[name]))
    with pytest.raises(ValueError, match=r"does not undo the first step. At carry\["):
        jax.grad(f)(*ARGS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it is off by"):
        jax.block_until_ready(jax.jit(jax.grad(f))(*ARGS))
    with pytest.raises(jax.errors.JaxRuntimeError, match="it is off by"):
        jax.block_until_ready(jax.jit(functools.partial(batch_of(grad, 1), f))(*ARGS))
    unchecked = lambda _: el.Reversible(WRONG[name], check=False)
    jax.jit(jax.grad(functools.partial(run, unchecked)))(*ARGS)


def test_an_inverse_in_another_schedule_is_checked_on_the_values():
    wrong = el.Cast(el.Reversible(WRONG["nothing undone"]), "float16")
    with pytest.raises(ValueError, match="does not undo the first step"):
        jax.grad(functools.partial(run, lambda _: wrong))(*ARGS)


def test_carries_are_compared_on_the_device():
    """The host is told of each leaf by how much it is off, and how large it is."""
    f = functools.partial(run, lambda _: el.Reversible(WRONG["a slip"]))
    program = jax.jit(jax.grad(f)).lower(*ARGS).as_text()
    told = [line for line in program.splitlines() if "python_cpu_callback" in line]
    assert len(told) == 2  # of the first step, and of the way back
    for line in told:
        assert re.search(r"\(tensor<[1-4]xf32>, tensor<[1-4]xf32>\) -> ", line)


def test_64_bits_are_compared_where_they_are_enabled_in_one_thread():
    """An inverse that is off by less than numbers of 32 bits can tell."""

    def step(carry, x):
        q, p = carry
        p = p - jnp.sin(w @ q) + x
        return (q + p, p), None

    def undo(carry, x):
        q, p = carry
        q = q - p
        return q, p + jnp.sin(w @ q) - x + 1e-10

    def last(h):
        scan = el.Scan(step, schedule=el.Reversible(undo))
        return jnp.sum(scan((h, h), jnp.ones(3))[0][0])

    with jax.enable_x64(True):
        w = jnp.ones((300, 300)) / 300
        with pytest.raises(jax.errors.JaxRuntimeError, match="off by 1e-10"):
            jax.block_until_ready(jax.jit(jax.grad(last))(jnp.ones((300, 300))))


class Coupling(eqx.Module):
    w: jax.Array

    def __call__(self, x, scale, *, key):
        a, b = x
        a = a + jnp.tanh(self.w @ b) * jax.random.uniform(key)
        return a, b - jnp.sin(scale * a)


def uncouple(x, layer, scale, *, key):
    a, b = x
    b = b + jnp.sin(scale * a)
    return a - jnp.tanh(layer.w @ b) * jax.random.uniform(key), b


def test_layers():
    """The inverse of a layer gets what the layer gets."""

    def loss(schedule, w, x, scale):
        layers = el.StackedLayers(Coupling(w), schedule=schedule)
        a, b = layers((x, jnp.cos(x)), scale, key=jax.random.key(1))
        return jnp.sum(a * b)

    args = normal(0, (6, 4, 4), scale=0.3), ARGS[1], 0.7
    found = grad(functools.partial(loss, el.Reversible(uncouple)), *args)
    expected = grad(functools.partial(loss, None), *args)
    assert_close(found, expected, rtol=2e-4, atol=2e-4)
    wrong = el.Reversible(lambda x, layer, scale, *, key: x)
    with pytest.raises(ValueError, match=r"At x\[0\]"):
        grad(functools.partial(loss, wrong), *args)
    layers = el.StackedLayers(Coupling(args[0]), schedule=el.Reversible(uncouple))
    plan = layers.plan((args[1], args[1]), 1.0, key=jax.random.key(0))
    assert plan.evaluations == 18


def test_loops_that_carry_nothing():
    for schedule in (el.Reversible(undo), el.Offload(el.Reversible(undo))):
        for loop in (el.ForLoop, el.CheckpointedForLoop):
            with pytest.raises(ValueError, match="steps have no carry to undo"):
                loop(jnp.sin, schedule=schedule)


def test_what_reversible_takes():
    with pytest.raises(TypeError, match="Reversible: `inverse` must be a function"):
        el.Reversible(3)
    with pytest.raises(ValueError, match="`checkpoints` must be at least 1, not 0"):
        el.Reversible(undo, checkpoints=0)
    with pytest.raises(TypeError, match="Reversible: `check`"):
        el.Reversible(undo, check=1)


def test_an_inverse_that_gives_something_else():
    step = lambda h, x: (h + x, None)
    args = jnp.ones(3), jnp.ones((5, 3))
    of = lambda inverse: el.Scan(step, schedule=el.Reversible(inverse))
    with pytest.raises(TypeError, match="but `inverse` changed it"):
        of(lambda h, x: (h - x, x))(*args)
    with pytest.raises(TypeError, match="but `inverse` changed it"):
        of(lambda h, x: (h - x)[0])(*args)
    halved = el.Reversible(lambda h, x: jnp.float32(0.5))
    double = el.Scan(lambda h, x: (h * 2, None), schedule=halved)
    refused = pytest.raises(TypeError, match="a carry of the types")
    with jax.numpy_dtype_promotion("standard"), refused:
        double(1, jnp.ones(5))


def pushed(h, x):
    return jnp.tanh(h) + x, h


AT_REST = {
    "nothing is undone": lambda h, x: h,
    "x is forgotten": lambda h, x: jnp.arctanh(jnp.clip(h, -0.999, 0.999)),
}


@pytest.mark.parametrize("inverse", AT_REST.values(), ids=AT_REST)
@pytest.mark.parametrize("checkpoints", [1, 3])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_a_loop_that_starts_at_rest_is_checked_at_its_end(inverse, checkpoints, wrap):
    # Its first step moves nothing, so that any inverse undoes that.
    schedule = el.Reversible(inverse, checkpoints=checkpoints)
    scan = el.Scan(pushed, schedule=schedule)
    xs = jnp.zeros((20, 3)).at[5:].set(0.2)
    gradient = wrap(jax.grad(lambda h, xs: jnp.sum(scan(h, xs)[1] ** 2)))
    args = jnp.zeros(3), xs
    if wrap is jax.vmap:
        args = jnp.zeros((2, 3)), jnp.stack([xs, 2 * xs])
    with pytest.raises(Exception, match="does not come to the carry from which"):
        jax.block_until_ready(gradient(*args))


def test_errors_that_have_grown_too_large_are_told():
    contract = lambda c, _: ((0.5 * c[0] + 1, c[1] + c[0] ** 2), None)
    expand = lambda c, _: (2 * (c[0] - 1) + 1e-6, c[1])

    def gradient(**settings):
        scan = el.Scan(contract, schedule=el.Reversible(expand, **settings))
        return jax.grad(lambda h: scan((h, 0.0), length=40)[0][1])(1.0)

    with pytest.raises(ValueError, match=r"rounding errors have grown .*checkpoints="):
        gradient()
    assert jnp.isfinite(gradient(check=False))
    np.testing.assert_allclose(gradient(checkpoints=20), 16 / 3, rtol=1e-4)


def test_a_loop_that_comes_to_no_numbers_is_not_blamed():
    scan = el.Scan(
        lambda h, _: (h * 1e30, None), schedule=el.Reversible(lambda h, _: h / 1e30)
    )
    gradient = jax.grad(lambda h: jnp.sum(scan(h, length=4)[0]))
    assert not jnp.isfinite(gradient(jnp.ones(2))).all()
