"""Loops that are reversed by an inverse and by what it lacks, which each step saves."""

import functools
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..derivatives import (
    batch_of,
    forward_over_reverse,
    grad,
    hessian,
    jacfwd,
    name,
    of_batch,
    reverse_over_reverse,
)
from ..marks import slow

pytestmark = pytest.mark.sampled

WIDTH, RIM = 6, 2


def step(w, carry, x):
    """The first entries of `a` are damped; what `b` was is rounded to a few values."""
    a, b, kind, key, seen = carry
    key, now = jax.random.split(key)
    a = a + w * jnp.sin(b) + x.astype(a.dtype)
    a = a.at[:RIM].multiply(0.5) + 0.01 * jax.random.normal(now, a.shape)
    b = jnp.where(kind == 2, jnp.cos(b), b + w * jnp.cos(a))
    return (a, b, jnp.where(a[0] > 0, (kind + 1) % 3, kind), key, ~seen), a * b


def save(carry, x):
    a, b, kind, key, seen = carry
    lost = jnp.where(kind == 2, b, 0)
    return {"rim": a[:RIM], "b": (lost, kind), "key": key, "flag": ~seen, "none": None}


def undo(w, carry, x, saved):
    a, b, *_ = carry
    lost, kind = saved["b"]
    _, now = jax.random.split(saved["key"])
    b = jnp.where(kind == 2, lost, b - w * jnp.cos(a))
    a = a - 0.01 * jax.random.normal(now, a.shape)
    a = (a - w * jnp.sin(b) - x).at[:RIM].set(saved["rim"])
    return a, b, kind, saved["key"], saved["flag"]


def run(schedule, w, h, xs, **settings):
    init = h, jnp.sin(3 * h), jnp.int8(1), jax.random.key(2), jnp.array(True)
    schedule = schedule and schedule(functools.partial(undo, w))
    scan = el.Scan(functools.partial(step, w), schedule=schedule, **settings)
    (a, b, _, _, _), ys = scan(init, xs)
    return jnp.sum(jnp.sin(a) * b) + jnp.sum(jnp.cos(ys))


ARGS = jnp.float32(0.3), jnp.linspace(-1, 1, WIDTH), jnp.linspace(-0.2, 0.3, 9)
saving = functools.partial(el.Reversible, save=save)
SCHEDULES = {
    "one part": saving,
    "parts": lambda f: saving(f, checkpoints=4),
    "every step": lambda f: saving(f, checkpoints=99),
    "on the host": lambda f: el.Offload(saving(f, checkpoints=2)),
    "in files": lambda f: el.Spill(saving(f, checkpoints=2), tempfile.gettempdir()),
    "not the last": lambda f: el.StoreLast(saving(f, checkpoints=2), 3),
}
MODES = [
    grad,
    jacfwd,
    hessian,
    reverse_over_reverse,
    forward_over_reverse,
    batch_of(grad, 0),
    batch_of(grad, 1),
    of_batch(grad, 1),
]
# Forward over reverse is in `test_reversible.py`.
AT_REST = [("parts", batch_of(grad, 1))]
AT_REST += [(name, grad) for name in ("on the host", "in files", "not the last")]
CASES = [
    (name, mode) if (name, mode) in AT_REST else slow(name, mode)
    for name in SCHEDULES
    for mode in MODES
]


@pytest.mark.parametrize(("name", "mode"), CASES, ids=name)
def test_every_mode(name, mode):
    found = jax.jit(functools.partial(mode, functools.partial(run, SCHEDULES[name])))
    expected = jax.jit(functools.partial(mode, functools.partial(run, None)))
    assert_close(found(*ARGS), expected(*ARGS), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("is_wide", [False, slow(True)])
@pytest.mark.parametrize("reverse", [True, slow(False)])
def test_settings_of_the_loop(reverse, is_wide):
    """In reverse, unrolled, along another axis, with a bar, under another precision."""
    settings = dict(reverse=reverse, unroll=2, in_axes=-1)

    def of(schedule, progress):
        def loss(w, h, xs):
            more = dict(settings, progress=progress)
            return run(schedule, w, h, jnp.stack([xs] * WIDTH), **more)

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    with jax.enable_x64(is_wide), jax.numpy_dtype_promotion("strict"):
        args = [jnp.asarray(x, float) for x in ARGS]
        args = [*args[:2], args[2]]
        found, expected = of(SCHEDULES["parts"], 3)(*args), of(None, None)(*args)
    assert_close(found, expected, rtol=3e-4, atol=3e-4)


def test_what_is_stored_in_a_lower_precision():
    cast = el.Cast(saving(functools.partial(undo, ARGS[0])), jnp.bfloat16)
    f = functools.partial(run, lambda _: cast)
    found, expected = jax.grad(f, 1)(*ARGS), jax.grad(functools.partial(run, None), 1)
    assert_close(found, expected(*ARGS), rtol=0.05, atol=0.05)


def test_shard_map():
    """What is saved differs between devices, though what it starts from does not."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))

    def of(schedule):
        def loss(w, h, xs):
            total = run(schedule, w, h, xs)
            return jax.lax.psum(total, "rows")

        specs = P(), P("rows"), P()
        split = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
        return jax.jit(jax.grad(split, (0, 1)))

    args = ARGS[0], jnp.concatenate([ARGS[1], 0.3 * ARGS[1]]), ARGS[2]
    assert_close(of(SCHEDULES["parts"])(*args), of(None)(*args), rtol=3e-4, atol=3e-4)


def damped(carry, x):
    """A pair of 64 numbers, 16 of which are damped."""
    a, b = carry
    a = (a + jnp.sin(b) + x).at[:16].multiply(0.5)
    return (a, b + jnp.cos(a)), None


def restored(carry, x, rim):
    a, b = carry
    b = b - jnp.cos(a)
    return (a - jnp.sin(b) - x).at[:16].set(rim), b


def rim_of(carry, x):
    return carry[0][:16]


def loss_of_damped(schedule, h, xs):
    (a, _), _ = el.Scan(damped, schedule=schedule)((h, h), xs)
    return jnp.sum(a**2)


FORMS = {
    "device": (lambda s: s, 64),
    "cast": (lambda s: el.Cast(s, "float16"), 32),
    "host": (el.Offload, 64),
    "files": (lambda s: el.Spill(s, tempfile.gettempdir()), 0),
}


@pytest.mark.parametrize("form", ["device", "files", slow("cast"), slow("host")])
def test_memory_is_that_of_the_rows(form):
    """And plans tell it to the byte, wherever the rows are."""
    change, row = FORMS[form]
    schedule = change(el.Reversible(restored, save=rim_of, checkpoints=3))
    h, found = jnp.ones(64), []
    for steps in (100, 1000):
        xs = jnp.zeros(steps)
        plan = el.Scan(damped, schedule=schedule).plan((h, h), xs)
        f = functools.partial(loss_of_damped, schedule)
        found.append((temp_bytes(jax.grad(f), h, xs), plan))
    (short, few), (long, many) = found
    assert abs(long - short - 900 * row) <= 256
    for temp, plan in found:
        assert temp <= plan.peak_bytes <= 1.05 * temp + 2000
    elsewhere = 900 * 64 if form in ("host", "files") else 0
    assert many.bytes_elsewhere - few.bytes_elsewhere == elsewhere
    each = "32 B" if form == "cast" else "64 B"
    assert f"saved of steps     1000, {each} each" in str(many)
    assert few.slot_bytes == (256 if form == "cast" else 512)


def test_pictures_show_what_is_saved():
    pytest.importorskip("matplotlib").use("Agg")
    plain = el.Reversible(lambda carry, x: restored(carry, x, carry[0][:16]))
    args = (jnp.ones(64), jnp.ones(64)), jnp.zeros(50)
    heights = []
    for schedule in (plain, el.Reversible(restored, save=rim_of)):
        plan = el.Scan(damped, schedule=schedule).plan(*args)
        events = list(plan._layout.order.history())
        order, cost = plan._layout.order, plan._cost
        heights.append([order.event_bytes(cost, event) for event in events])
        assert plan.plot().lines
        far = el.Scan(damped, schedule=el.Offload(schedule)).plan(*args)
        assert max(far.plot().lines[1].get_ydata()) == max(heights[-1])
    more = [b - a for a, b in zip(*heights, strict=True)]
    assert more[:50] == [64 * (i + 1) for i in range(50)]
    assert more[50:52] == [64 * 50] * 2
    assert more[-2:] == [64] * 2


def test_nothing_is_stored_that_the_inverse_does_not_read():
    """Of what is saved only the leaves that matter to it have rows."""
    everything = lambda carry, x: {"rim": carry[0][:16], "all": carry, "x": x}
    of_rim = lambda carry, x, saved: restored(carry, x, saved["rim"])
    more = el.Reversible(of_rim, save=everything)
    few = el.Reversible(restored, save=rim_of)
    args = jnp.ones(64), jnp.zeros(200)
    temps = [
        temp_bytes(jax.grad(functools.partial(loss_of_damped, s)), *args)
        for s in (more, few)
    ]
    assert temps[0] == temps[1]
    plan = el.Scan(damped, schedule=more).plan((args[0], args[0]), args[1])
    assert [path for path, held in plan.holds if held] == [
        "carry[0]",
        "carry[1]",
        "saved['rim']",
    ]
    others = "saved['all'][0], saved['all'][1], saved['x']"
    assert f"and not            {others}" in str(plan)


def test_a_loop_that_is_not_differentiated_saves_nothing():
    schedule = el.Reversible(restored, save=rim_of)
    f = functools.partial(loss_of_damped, schedule)
    assert temp_bytes(f, jnp.ones(64), jnp.zeros(1000)) < 1000


def test_what_is_saved_is_not_differentiated():
    """A gradient through the carry is whole, and so is its derivative."""
    f = functools.partial(loss_of_damped, el.Reversible(restored, save=rim_of))
    g = functools.partial(loss_of_damped, None)
    args = jnp.linspace(0, 1, 64), jnp.linspace(0, 1, 7)
    found, expected = (jax.grad(f, (0, 1))(*args) for f in (f, g))
    assert_close(found, expected, rtol=1e-3, atol=1e-3)
    along = jnp.cos(args[0])
    of = lambda f: jax.jvp(lambda h: jax.grad(f)(h, args[1]), args[:1], (along,))
    assert_close(of(f), of(g), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", [300, slow(3000)])
def test_a_wave_with_an_absorbing_rim(steps):
    """Nothing but the rim is stored, in the precision of the wave."""
    size, rim = 24, 4
    sponge = jnp.full((size, size), 0.9).at[rim:-rim, rim:-rim].set(1.0)
    source = jnp.sin(0.3 * jnp.arange(1.0 * steps))

    def move(speed, carry, push):
        now, before = carry
        near = sum(jnp.roll(now, d, axis) for d in (1, -1) for axis in (0, 1)) - 4 * now
        after = 2 * now - before + speed**2 * near
        after = after.at[size // 2, size // 2].add(push)
        return (sponge * after, now), now[rim, rim]

    def cut(u):
        return u[:rim], u[-rim:], u[rim:-rim, :rim], u[rim:-rim, -rim:]

    def put(u, strips):
        top, bottom, left, right = strips
        u = u.at[:rim].set(top).at[-rim:].set(bottom)
        return u.at[rim:-rim, :rim].set(left).at[rim:-rim, -rim:].set(right)

    def back(speed, carry, push, strips):
        after, now = carry
        near = sum(jnp.roll(now, d, axis) for d in (1, -1) for axis in (0, 1)) - 4 * now
        before = 2 * now - after + speed**2 * near
        before = before.at[size // 2, size // 2].add(push)
        return now, put(before, strips)

    def misfit(schedule, speed):
        scan = el.Scan(functools.partial(move, speed), schedule=schedule(speed))
        zero = jnp.zeros((size, size))
        _, seen = scan((zero, zero), source)
        return jnp.sum(seen**2)

    speed = 0.5 + 0.1 * jnp.cos(jnp.arange(1.0 * size)[None]) * jnp.ones((size, 1))
    undone = lambda speed: el.Reversible(
        functools.partial(back, speed),
        save=lambda carry, _: cut(carry[1]),
        checkpoints=max(steps // 1000, 1),
    )
    of = lambda s: jax.jit(jax.grad(functools.partial(misfit, s)))(speed)
    found, expected = of(undone), of(lambda _: el.Recursive(16))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error <= 1e-3
    temp = temp_bytes(jax.grad(functools.partial(misfit, undone)), speed)
    rows = 4 * (size**2 - (size - 2 * rim) ** 2) * steps
    assert temp <= rows + 4 * steps + 32 * 4 * size**2


ENDS = jnp.array([4, 0, 9, 30, 1])


def stopping(schedule, end, w, h, xs):
    """A loop that ends when a counter does, which goes on by one or two."""

    def step(carry, x):
        (a, b), t = carry
        a = (a + w * jnp.sin(b) + x).at[:RIM].multiply(0.5)
        return ((a, b + w * jnp.cos(a)), t + jnp.where(b[0] > 0.5, 2, 1)), a * b

    def back(carry, x, saved):
        (a, b), _ = carry
        rim, t = saved
        b = b - w * jnp.cos(a)
        return ((a - w * jnp.sin(b) - x).at[:RIM].set(rim), b), t

    keep = lambda carry, x: (carry[0][0][:RIM], carry[1])
    undone = schedule and schedule(el.Reversible(back, save=keep, checkpoints=3))
    loop = el.ScanWhile(lambda c: c[1] < end, step, max_steps=9, schedule=undone)
    ((a, b), t), ys, _ = loop(((h, jnp.cos(h)), jnp.int32(0)), xs)
    return jnp.sum(jnp.sin(a) * b * t.astype(a.dtype)) + jnp.sum(jnp.cos(ys))


def of_one(f, *args):
    return jax.grad(functools.partial(f, 5), (0, 1, 2))(*args)


def of_none(f, *args):
    return jax.grad(functools.partial(f, 0), (0, 1, 2))(*args)


def twice(f, *args):
    return jax.jacfwd(jax.grad(functools.partial(f, 7), 1), 1)(*args)


def hs_of(h):
    return jnp.linspace(1, 2, 5)[:, None] * h[None]


def gradient_of_batch(f, w, h, xs):
    total = lambda w, hs, xs: jnp.sum(jax.vmap(f, (0, None, 0, None))(ENDS, w, hs, xs))
    return jax.grad(total, (0, 1, 2))(w, hs_of(h), xs)


def batch_of_gradients(f, w, h, xs):
    gradient = jax.grad(f, (1, 2, 3))
    return jax.vmap(gradient, (0, None, 0, None))(ENDS, w, hs_of(h), xs)


def gradient_of_batches(f, w, h, xs):
    one = lambda ends, w, hs, xs: jax.vmap(f, (0, None, 0, None))(ends, w, hs, xs)
    total = lambda w, hs, xs: jnp.sum(
        jax.vmap(one, (0, None, 0, None))(jnp.stack([ENDS, ENDS[::-1]]), w, hs, xs)
    )
    hs = jnp.stack([hs_of(h), -hs_of(h)])
    return jax.grad(total, (0, 1, 2))(w, hs, xs)


def tangents_of_batch(f, w, h, xs):
    return jax.jacfwd(lambda w: gradient_of_batch(f, w, h, xs))(w)


PLACES = {
    "device": lambda s: s,
    "host": el.Offload,
    "files": lambda s: el.Spill(s, tempfile.gettempdir()),
    "not the last": lambda s: el.StoreLast(s, 3),
}
HOW = [of_one, of_none, twice, gradient_of_batch, batch_of_gradients]
HOW += [gradient_of_batches, tangents_of_batch]
RUN = [("device", gradient_of_batch), ("files", batch_of_gradients)]


@pytest.mark.parametrize(
    ("place", "how"),
    [(p, h) if (p, h) in RUN else slow(p, h) for p in PLACES for h in HOW],
    ids=name,
)
def test_loops_that_end_early(place, how):
    """Each example of a batch goes back from its own last step, and no further."""
    found = functools.partial(how, functools.partial(stopping, PLACES[place]))
    expected = functools.partial(how, functools.partial(stopping, None))
    found, expected = (jax.jit(f)(*ARGS) for f in (found, expected))
    assert_close(found, expected, rtol=3e-4, atol=3e-4)


def test_the_plan_of_a_loop_that_ends_early():
    step = lambda carry, x: damped(carry, x)
    schedule = el.Reversible(restored, save=rim_of)
    loop = el.ScanWhile(lambda c: c[0][0] < 9, step, max_steps=100, schedule=schedule)
    plan = loop.plan((jnp.ones(64), jnp.ones(64)), jnp.zeros(100))
    assert plan.evaluations == 300
    assert "saved of steps     100, 64 B each" in str(plan)


class Halving(eqx.Module):
    w: jax.Array

    def __call__(self, x, scale, *, key):
        a, b = x
        a = a + jnp.tanh(self.w @ b) * jax.random.uniform(key)
        return a, 0.5 * b - jnp.sin(scale * a)


def keep(x, layer, scale, *, key):
    return x[1]


def restore(x, layer, b, scale, *, key):
    a, _ = x
    return a - jnp.tanh(layer.w @ b) * jax.random.uniform(key), b


def test_layers():
    """What is saved of a layer follows the layer, before the other arguments."""

    def loss(schedule, w, x, scale):
        layers = el.StackedLayers(Halving(w), schedule=schedule)
        a, b = layers((x, jnp.cos(x)), scale, key=jax.random.key(1))
        return jnp.sum(a * b)

    args = 0.3 * jnp.cos(jnp.arange(96.0).reshape(6, 4, 4)), jnp.ones(4), 0.7
    found = grad(functools.partial(loss, el.Reversible(restore, save=keep)), *args)
    expected = grad(functools.partial(loss, None), *args)
    assert_close(found, expected, rtol=2e-4, atol=2e-4)
    few = el.Reversible(lambda x, layer: x, save=keep)
    with pytest.raises(TypeError, match=r"as `inverse\(x, layer, saved, \*args, key="):
        loss(few, *args)
    lost = el.Reversible(restore, save=lambda x, layer, scale, *, key: 0 * x[1])
    with pytest.raises(ValueError, match=r"At x\[0\]"):
        jax.grad(functools.partial(loss, lost), 0)(*args)


def test_keys_of_the_steps():
    """`save` is given the key of its step, as the inverse is."""

    def step(h, _, *, key):
        return 0.5 * h + jax.random.normal(key, h.shape), None

    def loss(schedule, h):
        scan = el.Scan(step, schedule=schedule)
        return jnp.sum(scan(h, length=5, key=jax.random.key(0))[0] ** 2)

    def keep(h, _, *, key):
        return h + jax.random.normal(key)

    def back(h, _, saved, *, key):
        return saved - jax.random.normal(key)

    schedule = el.Reversible(back, save=keep, checkpoints=2)
    h = jnp.ones(3)
    found, expected = (jax.grad(loss, 1)(s, h) for s in (schedule, None))
    assert_close(found, expected)


@pytest.mark.slow
def test_segments_with_keys_of_their_own(tmp_path):
    """A loop in segments splits its key for all of them."""

    def step(h, x, *, key):
        return 0.5 * h + x + jax.random.normal(key, h.shape), None

    keep = lambda h, x, *, key: h + jax.random.normal(key)
    back = lambda h, x, saved, *, key: saved - jax.random.normal(key)
    values = []
    for i, schedule in enumerate((None, el.Reversible(back, save=keep))):
        scan = el.Scan(step, schedule=schedule)
        run = el.Resumable(scan, tmp_path / str(i), every=3)
        loss = lambda h, ys: jnp.sum(h**2)
        grad = run.value_and_grad(loss, argnums="init")
        values.append(grad(jnp.ones(3), jnp.ones((8, 3)), key=jax.random.key(0)))
    assert_close(values[1], values[0])


WRONG = {
    "ignores what is saved": lambda carry, x, rim: restored(carry, x, carry[0][:16]),
    "another": lambda carry, x, rim: restored(carry, x, 2 * rim),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_inverse_that_is_none(wrong):
    f = functools.partial(loss_of_damped, el.Reversible(wrong, save=rim_of))
    args = jnp.linspace(1, 2, 64), jnp.ones(3)
    with pytest.raises(ValueError, match=r"not undo the first step. At carry\[0\]"):
        jax.grad(f)(*args)
    with pytest.raises(jax.errors.JaxRuntimeError, match="it is off by"):
        jax.block_until_ready(jax.jit(jax.grad(f))(*args))


def test_what_reversible_takes():
    with pytest.raises(TypeError, match="Reversible: `save` must be a function"):
        el.Reversible(restored, save=3)
    args = (jnp.ones(64), jnp.ones(64)), jnp.ones(3)
    of = lambda inverse, save: el.Scan(
        damped, schedule=el.Reversible(inverse, save=save)
    )
    with pytest.raises(TypeError, match=r"(?s)called as `inverse\(carry, x, saved\)`"):
        of(lambda carry, x: carry, rim_of)(*args)
    with pytest.raises(TypeError, match=r"Without a `save`, it is called as `inverse"):
        of(restored, None)(*args)
    with pytest.raises(TypeError, match=r"`save` does not take .* too many positional"):
        of(restored, lambda carry: carry)(*args)
    names = lambda carry, x: {"a": carry[0], "b": ["left", None, 1.0]}
    with pytest.raises(TypeError, match=r"saved\['b'\]\[0\]: 'left'"):
        of(restored, names)(*args)


def test_errors_within_what_saves_say_where_they_are():
    schedule = el.Reversible(restored, save=lambda carry, x: carry["a"])
    with pytest.raises(TypeError) as caught:
        el.Scan(damped, schedule=schedule)((jnp.ones(64), jnp.ones(64)), jnp.ones(3))
    assert "while Reversible traced `save(carry, x)`" in caught.value.__notes__[0]
    schedule = el.Reversible(lambda c, x, saved: saved["a"], save=rim_of)
    with pytest.raises((TypeError, IndexError)) as caught:
        el.Scan(damped, schedule=schedule)((jnp.ones(64), jnp.ones(64)), jnp.ones(3))
    assert "traced `inverse(carry, x, saved)`" in caught.value.__notes__[0]


def test_a_pinned_plan_undoes_steps_as_well():
    forget = lambda h, x: ((h + x).at[0].set(0.0), h[1])
    recall = lambda h, x, first: (h - x).at[0].set(first)
    schedule = el.Reversible(recall, save=lambda h, x: h[0], checkpoints=2)
    h, xs = jnp.ones(4), jnp.linspace(0, 1, 9)
    plan = el.Scan(forget, schedule=schedule).plan(h, xs)
    scan = el.Scan(forget, schedule=plan.pinned)
    assert scan.plan(h, xs).pinned == plan.pinned
    loss = lambda scan: lambda h, xs: jnp.sum(scan(h, xs)[1] ** 2)
    actual = jax.grad(loss(scan), (0, 1))(h, xs)
    assert_close(actual, jax.grad(loss(el.Scan(forget)), (0, 1))(h, xs), 1e-5, 1e-5)
