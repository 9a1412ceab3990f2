"""Convolutions and products in loops are laid out for the library of a CPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el
from eqloop._device import PlannedDevice
from eqloop._programs import _layouts

from ..marks import slow


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    # The tests run with several devices, among which products would be left alone, and
    # their convolutions are so small that they would be.
    monkeypatch.setattr(_layouts, "_is_alone", lambda: True)
    monkeypatch.setattr(_layouts, "_gains", lambda eqn: True)


PLAIN = {
    1: "[b, 0, f]x[0, i, o]->[b, 0, f]",
    2: "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]",
}


def layouts(f, *args):
    """How the convolutions of a program are laid out."""
    return set(re.findall(r"dim_numbers = (\S.*?), window", lowered(f, *args)))


def lowered(f, *args):
    return jax.jit(f).lower(*args).as_text()


def numbers(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1,) * (x.ndim - 2), "SAME")


def recurrent(space=2):
    """A convolutional cell, and its inputs."""
    sizes = (6,) * space
    w = numbers((4, 2, *[3] * space), 0) / 4
    xs = numbers((9, 2, 2, *sizes), 1)
    init = jnp.zeros((2, 2, *sizes)), jnp.zeros((2, 2, *sizes))

    def step(w, state, x):
        h, c = state
        i, o = jnp.split(conv(h + x, w), 2, 1)
        c = jax.nn.sigmoid(i) * c + jax.nn.relu(i)
        h = jnp.tanh(c) * jax.nn.sigmoid(o)
        return (h, c), h.mean()

    return step, w, init, xs


def losses(schedule, space=2):
    """The loss of such a loop, by `lax.scan` and by ours; and their arguments."""
    step, w, init, xs = recurrent(space)

    def loss(scan):
        def of(w, init, xs):
            (h, _), ys = scan(lambda s, x: step(w, s, x), init, xs)
            return jnp.sum(h**2) + jnp.sum(ys)

        return of

    ours = lambda f, init, xs: el.Scan(f, schedule=schedule)(init, xs)
    return loss(lax.scan), loss(ours), (w, init, xs)


SCHEDULES = {
    "all": el.StoreAll(),
    "recursive": el.Recursive(3),
    "chunked": el.Chunked(4),
    "binomial": el.Binomial(2),
    "budget": el.Budget("32KiB", measure=False),
}
MODES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 2)),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, args)[1],
    "forward over reverse": lambda f: (
        lambda *args: jax.jvp(jax.grad(f, (0, 2)), args, args)[1]
    ),
    "reverse over reverse": lambda f: jax.grad(
        lambda *args: jnp.sum(jax.grad(f)(*args) ** 2)
    ),
}


def assert_close(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, 1e-3, 1e-4 * (1 + np.abs(b).max()))


def compiled(f, *args):
    return jax.jit(f)(*args)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_gradient_by_each_schedule(kind):
    theirs, ours, args = losses(SCHEDULES[kind])
    theirs, ours = jax.grad(theirs, (0, 2)), jax.grad(ours, (0, 2))
    assert_close(compiled(ours, *args), compiled(theirs, *args))
    assert layouts(ours, *args) == {PLAIN[2]}


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["all", slow("recursive"), slow("chunked")])
def test_every_mode_of_differentiation(kind, mode):
    theirs, ours, args = losses(SCHEDULES[kind])
    theirs, ours = MODES[mode](theirs), MODES[mode](ours)
    assert layouts(ours, *args) == {PLAIN[2]}
    assert_close(compiled(ours, *args), compiled(theirs, *args))


@pytest.mark.parametrize("kind", [slow("all"), "recursive"])
def test_a_batch_of_weights(kind):
    theirs, ours, (w, *args) = losses(SCHEDULES[kind])
    batch = lambda f: jax.vmap(jax.grad(f), (0, None, None))
    ws = jnp.stack([w, -w])
    assert_close(compiled(batch(ours), ws, *args), compiled(batch(theirs), ws, *args))


@pytest.mark.parametrize("kind", [slow("all"), "recursive"])
def test_one_dimension(kind):
    theirs, ours, args = losses(SCHEDULES[kind], space=1)
    assert layouts(jax.grad(ours), *args) == {PLAIN[1]}
    assert_close(compiled(jax.grad(ours), *args), compiled(jax.grad(theirs), *args))


def row(w, x):
    """A network for one image."""
    for _ in range(2):
        x = jax.nn.relu(conv(x[None], w)[0])
    return jnp.mean(x**2)


W, IMAGES = numbers((2, 2, 3, 3), 0), numbers((8, 2, 6, 6), 1)


def rows_by_scan(w, xs):
    return el.Scan(lambda s, x: (s + row(w, x), None))(0.0, xs)[0]


def until(w, xs):
    move = lambda s: (s[0] + 1, conv(s[1], w))
    return el.WhileLoop(lambda s: s[0] < 3, move)((0, xs))[1].sum()


LOOPS = {
    "map in chunks": lambda w, xs: el.ChunkedVmap(row, 3, in_axes=(None, 0))(w, xs),
    "map": lambda w, xs: el.Map(lambda x: row(w, x))(xs),
    "parallel map": lambda w, xs: el.ParallelMap(
        row, in_axes=(None, 0), chunk_size=2, devices=jax.devices()[:1]
    )(w, xs),
    "rows in the carry": rows_by_scan,
    "rescheduled": el.Reschedule(
        lambda w, xs: lax.scan(lambda s, x: (s + row(w, x), None), 0.0, xs)[0],
        el.Recursive(2),
    ),
    "in a checkpoint": jax.checkpoint(rows_by_scan),
    "loop that stops": until,
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", LOOPS)
def test_every_loop_of_ours(case):
    f = lambda w, xs: jnp.sum(LOOPS[case](w, xs))
    runs = f if case == "loop that stops" else jax.grad(f)
    assert layouts(runs, W, IMAGES) == {PLAIN[2]}
    plain = until_by_jax if case == "loop that stops" else jax.grad(plain_rows)
    assert_close(compiled(runs, W, IMAGES), compiled(plain, W, IMAGES))


def plain_rows(w, xs):
    return jax.vmap(row, (None, 0))(w, xs).sum()


def until_by_jax(w, xs):
    return conv(conv(conv(xs, w), w), w).sum()


def test_a_map_with_a_policy():
    policy = jax.checkpoint_policies.everything_saveable
    f = el.ChunkedVmap(row, 3, in_axes=(None, 0), policy=policy)
    gradient = jax.grad(lambda w, xs: f(w, xs).sum())
    assert layouts(gradient, W, IMAGES) == {PLAIN[2]}
    expected = compiled(jax.grad(plain_rows), W, IMAGES)
    assert_close(compiled(gradient, W, IMAGES), expected)


@pytest.mark.parametrize("kind", ["all", "recursive"])
def test_products_with_transposed_operands(kind):
    w, xs = numbers((6, 6), 0) / 3, numbers((7, 6), 1)
    step = lambda h, x: (jnp.tanh(w.T @ (w @ h) + x), None)
    loop = el.Scan(step, schedule=SCHEDULES[kind])
    f = lambda xs: loop(xs[0], xs)[0].sum()
    assert "stablehlo.transpose" not in lowered(f, xs)
    plain = lambda xs: lax.scan(step, xs[0], xs)[0].sum()
    assert_close(compiled(jax.grad(f), xs), compiled(jax.grad(plain), xs))


@pytest.fixture
def on_another_device(monkeypatch):
    monkeypatch.setattr(PlannedDevice, "platform", "gpu")


def test_other_devices_have_it_from_their_compilers(on_another_device):
    theirs, ours, args = losses(el.StoreAll())
    assert layouts(ours, *args) == layouts(theirs, *args) != {PLAIN[2]}


def test_a_plan_says_it():
    step, w, init, xs = recurrent()
    plan = el.Scan(lambda s, x: step(w, s, x), schedule=el.Recursive(3)).plan(init, xs)
    (note,) = (n for n in plan.rewritten if "laid out" in n)
    assert note in str(plan).replace("\n" + " " * 21, " ")
    cell = lambda h, x: (jnp.tanh(h + x), None)
    plan = el.Scan(cell, schedule=el.Recursive(3)).plan(jnp.zeros(3), jnp.ones((9, 3)))
    assert not any("laid out" in n for n in plan.rewritten)


def test_without_jit():
    theirs, ours, args = losses(el.Recursive(3))
    with jax.disable_jit():
        found = jax.grad(ours)(*args)
    assert_close(found, compiled(jax.grad(theirs), *args))


@pytest.mark.parametrize("kind", [slow("all"), "recursive"])
def test_a_gradient_that_is_not_compiled_as_a_whole(kind, monkeypatch):
    theirs, ours, args = losses(SCHEDULES[kind])
    seen = []
    laid_out = lambda program: seen.append(program) or own(program)
    own = _layouts.laid_out
    monkeypatch.setattr(_layouts, "laid_out", laid_out)
    found = jax.grad(ours)(*args)
    assert seen
    assert_close(found, compiled(jax.grad(theirs), *args))
