"""Plans: what runs, exactly counted, and how it is shown."""

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing import _frontier
from eqloop.checkpointing.engine.orders._levels import nests
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.orders._revolved import Revolved
from eqloop.checkpointing.engine.orders._segmented import Segmented

from ..compiling import temp_bytes
from ..marks import slow
from .memory import gradient
from .steps import STEPS, recurrent

pytestmark = pytest.mark.sampled

QUICK = [
    el.StoreAll(),
    el.Recursive(4),
    el.Chunked(6),
    el.Binomial(3),
    el.Binomial(3, block=4),
    el.Budget("2KiB"),
    el.Budget("1MiB"),
]
SCHEDULES = [*QUICK[:4], slow(el.Binomial(30)), *QUICK[4:]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_evaluations_are_those_of_a_gradient(schedule):
    count = 0

    def tick(h):
        nonlocal count
        count += 1
        return h

    def step(h, x):
        # A callback whose value is used is run as often as the step is evaluated.
        once = jax.pure_callback(tick, h, jax.lax.stop_gradient(h))
        return jnp.sin(h + 0 * jax.lax.stop_gradient(once)) * x, None

    scan = el.Scan(step, schedule=schedule)
    xs = jnp.ones(31)
    plan = scan.plan(jnp.ones(()), xs)
    grad = jax.grad(lambda h: scan(h, xs)[0])(jnp.ones(()))
    grad.block_until_ready()
    jax.effects_barrier()
    assert count == plan.evaluations


# Policies take turns; each week both are tried under all schedules, and with budgets.
OF_POLICIES = [
    (schedule, policy) if (i + j) % 2 and i < 5 else slow(schedule, policy)
    for i, schedule in enumerate(QUICK)
    for j, policy in enumerate([el.policies.save_everything, el.policies.save_dots])
]


@pytest.mark.parametrize(("schedule", "policy"), OF_POLICIES, ids=repr)
def test_evaluations_count_what_a_policy_has_run_again(schedule, policy):
    calls = []

    def step(h, x):
        jax.debug.callback(lambda _: calls.append(None), h)
        return jnp.sin(h) * x, None

    scan = el.Scan(step, schedule=schedule, policy=policy)
    h, xs = jnp.ones(()), jnp.ones(31)
    gradient = jax.jit(jax.grad(lambda h: scan(h, xs)[0]))
    jax.block_until_ready(gradient(h))
    jax.effects_barrier()
    (listed,) = el.plans(gradient)(h)
    assert len(calls) == scan.plan(h, xs).evaluations == listed.plan.evaluations


@pytest.mark.parametrize(
    ("policy", "computed_again"),
    [
        (None, 0),
        (el.policies.save_everything, 0),
        (el.policies.save_dots, 31),
        (el.policies.save_nothing, 31),
    ],
)
def test_a_policy_costs_an_evaluation_only_if_something_is_lost(policy, computed_again):
    step, *args = STEPS["recurrent"](31)
    of = lambda schedule: el.Scan(step, schedule=schedule, policy=policy).plan(*args)
    assert of(el.StoreAll()).evaluations == 31 + computed_again
    # A step that is reversed by itself computes its values once, whatever is kept.
    alone = el.Binomial(5)
    assert (
        of(alone).evaluations == el.Scan(step, schedule=alone).plan(*args).evaluations
    )


@pytest.mark.parametrize("schedule", SCHEDULES[:-2], ids=repr)
@pytest.mark.parametrize("name", [slow("recurrent"), "field"])
def test_memory_is_as_predicted(name, schedule):
    args = STEPS[name](96)
    plan = el.Scan(args[0], schedule=schedule).plan(*args[1:])
    temp = temp_bytes(gradient(schedule), *args)
    assert abs(plan.peak_bytes - temp) <= max(0.15 * temp, 16 * 1024)


def test_a_plan_says_why_it_has_fewer_levels_than_by_its_base():
    of = lambda step, steps, **how: str(
        el.Scan(step, schedule=el.Recursive(16, **how)).plan(
            jnp.ones(64), jnp.ones(steps)
        )
    )
    sine = lambda h, x: (jnp.sin(h) + x, None)
    w = jnp.eye(64)
    matrix = lambda h, x: (jnp.tanh(w @ h) + x, None)
    assert "10, as so short a loop stores every carry" in of(sine, 10)
    assert "1000, as storing carries takes no memory" in of(
        lambda h, x: (2 * h + x, None), 1000
    )
    assert ", as many as pay where steps are reversed together" in of(matrix, 300)
    assert ", as" not in of(sine, 1000) + of(matrix, 300, batch=4)


def test_a_plan_says_what_happens_on_the_way_back_and_that_a_loop_may_end():
    step = lambda h, x: (jnp.sin(h) + x, None)
    cut = el.Scan(step, backward=el.Truncate(4)).plan(0.0, jnp.ones(10))
    assert cut.length == 2
    assert re.search(r"backward +Truncate\(every=4\): steps that it cuts off", str(cut))
    clipped = el.Scan(step, backward=jnp.clip).plan(0.0, jnp.ones(10))
    assert clipped.backward == "clip"
    far, halve = lambda h: h > 1, lambda h: h / 2
    bounded = el.BoundedWhileLoop(far, halve, max_steps=50, schedule=el.Chunked(8))
    ends = el.ScanWhile(far, step, max_steps=50)
    for plan in (
        el.plans(jax.grad(bounded))(9.0)[0].plan,
        ends.plan(9.0, jnp.ones(50)),
    ):
        assert plan.columns[0] == "<= 50"
        assert plan.columns[3] == f"<= {plan.evaluations}"
        assert re.search(r"steps +<= 50\n", str(plan))
    assert "<=" not in str(cut)


def monitored(carry, x):
    h, monitor = carry
    return (jnp.sin(h) * x, 0.9 * monitor + jnp.sum(h)), None


def wave(carry, x):
    now, before = carry
    around = jnp.roll(now, 1) + jnp.roll(now, -1) - 2 * now
    return (2 * now - before + 0.25 * around + x, now), None


@pytest.mark.parametrize("schedule", [el.Recursive(4), el.Budget("64KiB")], ids=repr)
@pytest.mark.parametrize("step", [monitored, wave])
def test_what_no_cotangent_needs_is_not_planned(step, schedule):
    sizes = {monitored: (10, 2000), wave: (200, 200)}[step]
    f = jax.tree_util.Partial(step)
    init, xs = tuple(map(jnp.ones, sizes)), jnp.ones(300)
    plan = el.Scan(step, schedule=schedule).plan(init, xs)
    temp = temp_bytes(gradient(schedule), f, init, xs)
    assert temp <= plan.peak_bytes
    # A plan counts the cotangents of the last carry, as they may be constants.
    last = sum(leaf.nbytes for leaf in init)
    # Of residuals it may count two arrays where XLA needs one.
    factor = 1.15 if plan.slots else 2
    assert plan.peak_bytes <= factor * temp + 1024 + last


@pytest.mark.parametrize("schedule", QUICK[:4], ids=repr)
def test_a_step_may_add_to_a_reference(schedule):
    total = jax.new_ref(jnp.zeros(()))

    def step(h, _):
        total[...] += h
        return jnp.sin(h), None

    assert el.Scan(step, schedule=schedule).plan(1.0, length=6).evaluations >= 6
    assert total[...] == 0


def test_types_will_do_for_arrays():
    f, init, xs = recurrent(50)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (init, xs))
    scan = el.CheckpointedScan(f, base=5)
    assert scan.plan(*types).pinned == scan.plan(init, xs).pinned


def test_nothing_is_run():
    ran = []

    def step(h, x):
        jax.debug.callback(ran.append, h)
        return jnp.sin(h + x), None

    scan = el.Scan(step, schedule=el.Budget("1MiB"))
    scan.plan(0.0, jnp.ones(9))
    jax.effects_barrier()
    assert ran == []
    scan(0.0, jnp.ones(9))
    jax.effects_barrier()
    assert len(ran) == 9


def test_shapes_that_do_not_fit():
    scan = el.CheckpointedScan(lambda h, x: (h + x[0], x[1]))
    with pytest.raises(ValueError, match="xs"):
        scan.plan(0.0, (jnp.ones(3), jnp.ones(4)))
    with pytest.raises(TypeError, match="carry"):
        el.Scan(lambda h, x: (jnp.stack([h, h]), x)).plan(jnp.ones(2), jnp.ones(3))


def test_a_plan_is_printed_as_a_table():
    f, init, xs = recurrent(100)
    plan = el.Scan(f, schedule=el.Binomial(5, block=2)).plan(init, xs)
    title, *rows = str(plan).splitlines()
    assert title == "Binomial(checkpoints=5, block=2)"
    assert len({row[:21].rstrip() for row in rows}) == len(rows)
    assert "stored carries     5, 128 B each" in str(plan)
    assert f"evaluations        {plan.evaluations}" in str(plan)
    assert len(repr(plan)) < 120


def test_a_frontier_goes_from_least_memory_to_least_time():
    f, init, xs = recurrent(64)
    plans = el.Scan(f, schedule=el.Recursive(4)).frontier(init, xs)
    sizes = [plan.peak_bytes for plan in plans]
    times = [plan.relative_time for plan in plans]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)
    assert plans.chosen == el.Scan(f, schedule=el.Recursive(4)).plan(init, xs)
    again = el.Scan(f, schedule=plans[0].schedule).plan(init, xs)
    assert again.pinned == plans[0].pinned
    with pytest.raises(ValueError, match="does not fit"):
        el.Scan(f, schedule=el.Budget(sizes[0] - 1)).plan(init, xs)


def test_a_frontier_has_no_plan_that_another_one_beats(monkeypatch):
    """Where what was found out last turns the order of plans round, too."""
    seen = iter(range(10_000))

    def told(*args):
        # Every third plan is faster than was thought.
        time = 1 / (1 + next(seen) % 3)
        return dataclasses.replace(plan_of(*args), relative_time=time)

    f, init, xs = recurrent(64)
    usual = el.Scan(f).frontier(init, xs)
    plan_of = _frontier.plan_of
    monkeypatch.setattr(_frontier, "plan_of", told)
    plans = el.Scan(f).frontier(init, xs)
    sizes = [plan.peak_bytes for plan in plans]
    times = [plan.relative_time for plan in plans]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)
    assert 1 < len(plans) < len(usual)
    assert plans[0].pinned == usual[0].pinned


def test_pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    f, init, xs = recurrent(40)
    scan = el.Scan(f, schedule=el.Binomial(4))
    plan = scan.plan(init, xs)
    ax = plan.plot()
    assert plan.plot(ax) is ax
    (line,) = ax.lines[:1]
    assert max(line.get_ydata()) == plan.peak_bytes
    frontier = scan.frontier(init, xs)
    curve, star = frontier.plot().lines
    assert len(curve.get_xdata()) == len(frontier)
    assert star.get_xdata() == [plan.peak_bytes]
    with pytest.raises(ValueError, match="Draw the plan of a shorter loop"):
        el.Scan(f).plan(init, jax.ShapeDtypeStruct((10**6, 32), jnp.float32)).plot()


@pytest.mark.parametrize(
    "order",
    [Revolved(40, 4), Nested(nests(40, 3)), Segmented(((4, Revolved(10, 3)),))],
    ids=repr,
)
def test_a_picture_of_carries_elsewhere(order, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    f, init, xs = recurrent(40)
    spilled = el.Scan(f, schedule=el.Spill(el.Binomial(4), tmp_path)).plan(init, xs)
    layout = dataclasses.replace(spilled._layout, order=order)
    plan = dataclasses.replace(spilled, _layout=layout, peak_bytes=10**5)
    ax = plan.plot()
    device, far = (line.get_ydata() for line in ax.lines[:2])
    assert max(device) == plan.peak_bytes
    assert max(far) == len(order.starts) * plan.slot_bytes
    events = list(order.history())
    total = [order.event_bytes(plan._cost, event) for event in events]
    on_device = [size - there for size, there in zip(total, far, strict=True)]
    assert min(on_device) >= 0
    assert list(device - device.min()) == [n - min(on_device) for n in on_device]
    assert ax.get_legend().texts[0].get_text() == layout.slots.place


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plan = el.Scan(lambda h, x: (h * x, None)).plan(1.0, jnp.ones(3))
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        plan.plot()


@pytest.mark.parametrize(("nbytes", "is_told"), [("64KiB", True), ("8MiB", False)])
def test_a_plan_says_that_outputs_exceed_its_budget(nbytes: str, is_told: bool):
    step = lambda h, x: (jnp.tanh(h + x), h)
    scan = el.Scan(step, schedule=el.Budget(nbytes, measure=False))
    plan = scan.plan(jnp.zeros(64), jnp.zeros((1000, 64)))
    assert plan.output_bytes == 2 * 1000 * 64 * 4
    told = "outputs            500 KiB more, with their cotangents"
    assert (told in str(plan)) == is_told
    few = el.SlicedScan(step, step=100, schedule=scan.schedule)
    assert (
        few.plan(jnp.zeros(64), jnp.zeros((1000, 64))).output_bytes == 2 * 10 * 64 * 4
    )
