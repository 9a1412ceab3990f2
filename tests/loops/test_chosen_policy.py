"""`policy="auto"`: a budget chooses what each step keeps."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..marks import slow
from ..weights import normal

DEPTH, WIDTH = 4, 64
X = normal(1, (32, WIDTH))


class Layer(eqx.Module):
    """Two dots. A user has named what the larger of them gives."""

    inner: jax.Array
    outer: jax.Array

    def __init__(self, *, key):
        up, down = jax.random.split(key)
        self.inner = jax.random.normal(up, (WIDTH, 4 * WIDTH)) / WIDTH
        self.outer = jax.random.normal(down, (4 * WIDTH, WIDTH)) / WIDTH

    def __call__(self, x):
        mixed = jnp.tanh(x @ self.inner[:, :WIDTH])
        hidden = el.name(mixed @ self.inner, "hidden")
        return x + jnp.sin(hidden) @ self.outer


def stacked(depth, **settings):
    key = jax.random.key(0)
    return el.StackedLayers.init(Layer, depth, key=key, **settings), X


def budget(nbytes):
    return el.Budget(nbytes, measure=False)


def chosen(nbytes, depth=DEPTH):
    return stacked(depth, schedule=budget(nbytes), policy="auto")


def loss(layers, x):
    return jnp.mean(jnp.sin(layers(x)))


def gradient(layers, x):
    return eqx.filter_grad(lambda both: loss(*both))((layers, x))


class Wide(eqx.Module):
    """Two dots, of which the first gives four times as much as the second."""

    up: jax.Array
    down: jax.Array

    def __init__(self, *, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (WIDTH, 4 * WIDTH)) / WIDTH
        self.down = jax.random.normal(down, (4 * WIDTH, WIDTH)) / WIDTH

    def __call__(self, x):
        hidden = el.name(x @ self.up, "hidden")
        return x + jnp.tanh(el.name(jnp.sin(hidden) @ self.down, "out"))


@pytest.mark.parametrize("nbytes", [slow(590_000), 890_000])
def test_to_choose_is_not_worse_than_to_keep_all_or_nothing(nbytes):
    """What a step computes again counts as run: of two plans that take as long, one
    that stores some of the steps in full is not put behind one that does it for all."""
    key = jax.random.key(0)
    chosen, full = (
        el.StackedLayers.init(
            lambda key: Wide(key=key), 8, key=key, schedule=budget(nbytes), policy=way
        ).plan(X)
        for way in ("auto", None)
    )
    assert chosen.relative_time <= full.relative_time + 1e-9
    assert chosen.evaluations <= full.evaluations


@pytest.mark.slow
def test_budgets_hold_and_more_memory_keeps_more():
    kept, times = [], []
    for nbytes in (300_000, 420_000, 2**30):
        layers, x = chosen(nbytes)
        plan = layers.plan(x)
        params, static = eqx.partition(layers, eqx.is_array)
        run = lambda p, x, s=static: gradient(eqx.combine(p, s), x)
        assert temp_bytes(run, params, x) <= plan.peak_bytes <= nbytes
        kept.append(plan.kept)
        times.append(plan.relative_time)
    assert times == sorted(times, reverse=True)
    # Where there is room for everything, nothing is to be chosen.
    assert (kept[0], kept[-1]) == ((), None)
    assert kept[1]


def test_the_plan_says_what_is_kept():
    layers, x = chosen(500_000)
    plan = layers.plan(x)
    assert plan.kept is not None
    assert "hidden" in plan.kept
    assert f"each step keeps    {', '.join(plan.kept)}" in str(plan)
    fixed, _ = stacked(DEPTH, schedule=budget(500_000), policy="save_dots")
    assert fixed.plan(x).kept is None
    assert "each step keeps" not in str(fixed.plan(x))


def near(actual, expected):
    """Numbers are close, whatever schedule the layers have."""
    assert_close(*map(jax.tree.leaves, (actual, expected)), rtol=2e-4)


MODES = {
    "gradient": gradient,
    "jvp": lambda f, x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](jnp.cos(x)),
    "vmap of grad": lambda f, x: jax.vmap(jax.grad(lambda x: loss(f, x)))(x),
    "grad of vmap": lambda f, x: jax.grad(lambda x: loss(jax.vmap(f), x))(x),
    "forward over reverse": lambda f, x: jax.jvp(
        jax.grad(lambda x: loss(f, x)), (x,), (jnp.cos(x),)
    ),
    "reverse over reverse": lambda f, x: jax.grad(
        lambda x: jnp.sum(jnp.cos(jax.grad(lambda x: loss(f, x))(x)))
    )(x),
    "in remat": lambda f, x: jax.grad(jax.checkpoint(lambda x: loss(f, x)))(x),
}
_OFTEN = ("vmap of grad",)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[] if mode in _OFTEN else pytest.mark.slow)
        for mode in MODES
    ],
)
def test_modes(mode):
    layers, x = chosen(420_000)
    assert layers.plan(x).kept
    expected = eqx.filter_jit(MODES[mode])(*stacked(DEPTH))
    near(eqx.filter_jit(MODES[mode])(layers, x), expected)


@pytest.mark.slow
def test_a_batch_has_the_budget_of_the_batch():
    layers, x = chosen(600_000)
    batch = jnp.stack([x] * 4)
    run = lambda xs: jax.grad(lambda xs: loss(jax.vmap(layers), xs))(xs)
    assert temp_bytes(run, batch) <= 600_000


def step(h, x):
    return jnp.tanh(el.name(h @ h, "square") + x), jnp.sum(h)


H, XS = jnp.eye(8) / 2, jnp.linspace(0, 1, 6)


@pytest.mark.parametrize(
    "run",
    [
        lambda **how: el.Scan(step, **how)(H, XS),
        lambda **how: el.CheckpointedScan(step, **how)(H, XS),
        lambda **how: el.SlicedScan(step, step=2, **how)(H, XS),
        lambda **how: el.ForLoop(lambda x: step(H, x)[0], **how)(XS),
        lambda **how: el.ScanWhile(lambda h: h[0, 0] < 2, step, max_steps=6, **how)(
            H, XS
        ),
    ],
    ids=["Scan", "CheckpointedScan", "SlicedScan", "ForLoop", "ScanWhile"],
)
def test_every_loop_of_known_length_takes_it(run):
    near(run(schedule=budget("1MiB"), policy="auto"), run())


def test_scans_of_length_0_and_1():
    scan = el.Scan(step, schedule=budget("1MiB"), policy="auto")
    plain = el.Scan(step)
    for length in (0, 1):
        total = lambda h, f, n=length: jnp.sum(f(h, XS[:n])[0])
        near(jax.grad(total)(H, scan), jax.grad(total)(H, plain))


def test_a_step_without_anything_to_keep():
    bare = lambda h, x: (jnp.sin(h + x), None)
    scan = el.Scan(bare, schedule=budget("1MiB"), policy="auto")
    assert scan.plan(H, XS).kept in (None, ())
    total = lambda h, f: jnp.sum(f(h, XS)[0])
    near(jax.grad(total)(H, scan), jax.grad(total)(H, el.Scan(bare)))


def test_a_step_with_effects_keeps_everything(capfd):
    def tells(h, x):
        jax.debug.print("at {}", x)
        return step(h, x)

    total = lambda h, f: jnp.sum(f(h, XS)[0])
    scan = el.Scan(tells, schedule=budget("1MiB"), policy="auto")
    near(jax.grad(total)(H, scan), jax.grad(total)(H, el.Scan(step)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("at ") == len(XS)


def test_complex_values_are_not_kept():
    turn = lambda h, _: (jnp.tanh(el.name(h @ h, "square") @ h), None)
    scan = el.Scan(turn, schedule=budget("1MiB"), policy="auto")
    total = lambda h, f: jnp.sum(jnp.abs(f(h, XS)[0]))
    h = jnp.eye(8, dtype=jnp.complex64) * (1 + 1j) / 2
    assert scan.plan(h, XS).kept in (None, ())
    near(jax.grad(total)(h, scan), jax.grad(total)(h, el.Scan(turn)))


def test_a_pinned_plan_keeps_the_same():
    scan = el.Scan(step, schedule=budget("1MiB"), policy="auto")
    plan = scan.plan(H, XS)
    pinned = el.Scan(step, schedule=plan.pinned).plan(H, XS)
    assert pinned.kept == plan.kept
    assert pinned.peak_bytes == plan.peak_bytes


def test_plans_lists_what_is_run():
    layers, x = chosen(420_000)
    plan = layers.plan(x)
    (loop,) = el.plans(gradient)(layers, x).loops
    assert (loop.plan.kept, loop.plan.peak_bytes) == (plan.kept, plan.peak_bytes)
    assert loop.plan.relative_time == plan.relative_time


def test_carries_may_be_stored_elsewhere():
    here, x = chosen(420_000)
    far, _ = stacked(DEPTH, schedule=el.Offload(budget(420_000)), policy="auto")
    plans = here.plan(x), far.plan(x)
    assert plans[0].kept == plans[1].kept
    assert plans[1].kept
    near(gradient(far, x), gradient(here, x))


@pytest.mark.slow
def test_the_frontier_has_what_is_kept():
    scan = el.Scan(step, schedule=budget("1MiB"), policy="auto")
    found = scan.frontier(H, XS)
    assert {plan.kept for plan in found} - {None}
    some = next(plan for plan in found if plan.kept is not None)
    again = el.Scan(step, schedule=some.schedule).plan(H, XS)
    assert again.peak_bytes <= some.peak_bytes


# Wrong calls

NEEDS_A_BUDGET = "with `policy='auto'` a budget chooses what each step keeps"


@pytest.mark.parametrize(
    "schedule", [None, el.Recursive(4), el.Offload(el.Binomial(4))]
)
def test_it_needs_a_budget(schedule):
    with pytest.raises(ValueError, match=f"^Scan: {NEEDS_A_BUDGET}, but the schedule"):
        el.Scan(step, schedule=schedule, policy="auto")
    with pytest.raises(ValueError, match=f"^StackedLayers: {NEEDS_A_BUDGET}"):
        stacked(2, schedule=schedule, policy="auto")


def test_it_needs_a_budget_when_it_was_put_in_later():
    scan = eqx.tree_at(
        lambda scan: scan.policy, el.Scan(step), "auto", is_leaf=lambda x: x is None
    )
    with pytest.raises(ValueError, match=NEEDS_A_BUDGET):
        scan(H, XS)


@pytest.mark.parametrize(
    "call",
    [
        lambda: el.Remat(jnp.sin, policy="auto"),
        lambda: el.ChunkedVmap(jnp.sin, el.Budget(100), policy="auto"),
        lambda: el.policies.either("auto", "save_dots"),
    ],
    ids=["Remat", "ChunkedVmap", "either"],
)
def test_elsewhere_there_is_nothing_to_choose(call):
    with pytest.raises(ValueError, match=r"`policy='auto'` is for scans and `Stacked"):
        call()


def test_a_name_that_is_almost_it():
    with pytest.raises(ValueError, match=r"named 'Auto'\. Did you mean 'auto'"):
        el.Scan(step, schedule=budget("1MiB"), policy="Auto")
