"""Plans that are measured: what is run for them, what is remembered, what decides."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqloop as el
from eqloop.checkpointing.engine._costs import StepCost
from eqloop.checkpointing.engine._pace import Estimated
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning import (
    _measured_pace,
    _paces,
    _search,
    _stopwatch,
)
from eqloop.checkpointing.planning._measured_pace import Measured, StepsAlone, pace
from eqloop.checkpointing.planning._pace_of_known import with_pace_of_known
from eqloop.checkpointing.planning._work import CPU

from ..noted import Noted
from ..steps import recurrent

# Long enough to be worth it: of a light step, thousands.
LENGTH = 4096
BUDGET = el.Budget("256KiB")


@pytest.fixture
def pieces_alone(monkeypatch):
    """No segments are run side by side."""
    monkeypatch.setattr(_search, "_ABREAST", ())


@pytest.fixture
def runs(monkeypatch, pieces_alone):
    """How many programs were run, with times that are made up, the same each time."""
    counts = []

    def nanoseconds(programs):
        counts.append(len(programs))
        return [1e6 * (1 + i) for i in range(len(programs))]

    monkeypatch.setattr(_measured_pace, "nanoseconds", nanoseconds)
    el.measurements(None)
    yield counts
    el.measurements(None)


def plan(schedule=BUDGET, length=LENGTH, step=None, **settings):
    f, init, xs = recurrent(length)
    return el.Scan(step or f, schedule=schedule, **settings).plan(init, xs)


def test_a_step_is_run_to_plan_it_and_only_once():
    el.measurements(None)
    found = plan()
    assert found.is_measured
    assert "measured" in str(found)
    f, init, xs = recurrent(LENGTH)
    scan = el.Scan(f, schedule=BUDGET)

    @jax.jit
    def gradient(f, init):
        return jax.grad(lambda f: jnp.sum(el.Scan(f, schedule=BUDGET)(init, xs)[0]))(f)

    # The same plan where the loop is traced, of which nothing is a part of the program.
    jaxpr = str(jax.make_jaxpr(gradient)(f, init))
    assert jaxpr.count("_stopwatch") == 0
    ours = gradient(f, init).weight
    plain = jax.grad(lambda f: jnp.sum(jax.lax.scan(lambda h, x: f(h, x), init, xs)[0]))
    assert jnp.allclose(ours, plain(f).weight, rtol=1e-3, atol=1e-4)
    assert scan.plan(init, xs).pinned == found.pinned


def test_what_was_measured_is_remembered(runs):
    first = plan()
    assert runs == [7]  # the step alone, everything, three blocks, two batches
    assert plan(el.Budget("1MiB")).is_measured
    assert plan().pinned == first.pinned
    assert runs == [7]
    plan(length=2 * LENGTH)
    assert len(runs) <= 2


def test_what_cannot_fit_is_not_run(runs, tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    el.measurements(path)
    with monkeypatch.context() as patch:
        # As if there were next to no room, as where parameters are large.
        patch.setattr(_paces, "_SURELY_TOO_MUCH", 0.3)
        plan(el.Budget(24_321))
    assert runs == [5]  # no blocks or batches of 64 steps
    before = json.loads(path.read_text())["nanoseconds"]
    plan()
    # The step alone is run again, as the machine may be slower now: here three times.
    assert runs == [5, 3]
    after = json.loads(path.read_text())["nanoseconds"]
    assert before.items() < after.items()
    new = sorted(after[key] for key in after.keys() - before.keys())
    assert new == pytest.approx([1e6 / 3, 2e6 / 3])
    plan(el.Budget(24_321))
    assert len(runs) == 2


def test_measured_where_a_loop_is_batched_or_nested(runs):
    f, init, xs = recurrent(4 * LENGTH)
    scan = el.Scan(f, schedule=BUDGET)
    loss = lambda init: jnp.sum(scan(init, xs)[0])
    outer = lambda h: jax.lax.scan(lambda h, _: (scan(h, xs)[0], None), h, None, 2)
    for gradient, args in (
        (jax.grad(lambda h: jnp.sum(jax.vmap(loss)(h))), jnp.zeros((2, 32))),
        (jax.vmap(jax.grad(loss)), jnp.zeros((2, 32))),
        (jax.grad(lambda h: jnp.sum(outer(h)[0])), init),
    ):
        runs.clear()
        el.measurements(None)
        jax.jit(gradient).lower(args)
        assert runs


@pytest.mark.parametrize(("milliseconds", "taken"), [(1, True), (60, False)])
def test_known_products_are_measured_where_they_may_pay(
    monkeypatch, pieces_alone, milliseconds, taken
):
    runs = []

    def nanoseconds(programs):
        # The step, everything, blocks, and batches, which are fast; and then the same
        # with known products.
        first = 1, 40, 30, 30, 30, 5, 5
        times = (1, 40, 30, milliseconds, milliseconds) if runs else first
        runs.append(len(programs))
        return [1e6 * time for time in times]

    monkeypatch.setattr(_measured_pace, "nanoseconds", nanoseconds)
    el.measurements(None)
    found = plan()._layout
    assert runs == [7, 5]  # of blocks one of a single step alone, and both batches
    assert found.order.asks_for_products(found.reversal) == taken
    el.measurements(None)


@pytest.mark.parametrize(("milliseconds", "taken"), [(0.3, True), (3, False)])
def test_steps_are_run_side_by_side_where_it_may_pay(monkeypatch, milliseconds, taken):
    runs = []

    def nanoseconds(programs):
        # The step, everything, blocks, and batches; and then the steps in 8 and in 32
        # segments, beside the steps alone.
        first = 1, 40, 3, 30, 30, 3, 3
        times = (milliseconds, milliseconds, 1) if runs else first
        runs.append(len(programs))
        return [1e6 * time for time in times]

    monkeypatch.setattr(_measured_pace, "nanoseconds", nanoseconds)
    monkeypatch.setattr(_paces, "with_pace_of_known", lambda p, a, base, _: base)
    el.measurements(None)
    found = plan()
    assert runs == [7, 3]
    assert (found._layout.order.side_by_side > 1) == taken
    assert ("side by side" in str(found)) == taken
    el.measurements(None)


def test_known_products_are_guessed_where_it_would_not_pay_to_measure(runs):
    asked = []
    plan(Noted(el.Chunked(1), asked))
    ((problem, active, _),) = asked
    # As long as it takes for the step, but not for one that does not multiply.
    estimated = pace(problem, active, measure=False)
    length = int(_measured_pace._WORTH_MEASURING / estimated.everything) + 1
    loop = dataclasses.replace(problem.loop, length=length)
    problem = dataclasses.replace(problem, loop=loop)
    base = pace(problem, active, measure=True)
    assert len(runs) == 1
    found = with_pace_of_known(problem, active, base, (Together(8).kind, 8))
    assert len(runs) == 1
    assert base.is_measured
    assert found.of_known.is_measured
    assert found.of_known.advance < 0.9 * base.advance
    assert found.of_known.cost.evaluation < 0.9 * base.cost.evaluation
    assert found.of_known.cost.ct_x == base.cost.ct_x


def with_callback(h, x):
    same = jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x))
    return jnp.tanh(h + same), None


def with_while(h, x):
    h = jax.lax.stop_gradient(h)
    return x + jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, h), None


@pytest.mark.parametrize("step", [with_callback, with_while], ids=lambda f: f.__name__)
def test_a_step_that_might_do_anything_is_not_run(runs, step):
    assert not plan(step=step).is_measured
    assert not runs


def test_nothing_is_run_where_it_would_not_pay(runs):
    assert not plan(el.Budget("64KiB"), length=16).is_measured
    assert not plan(el.Budget("256KiB", measure=False)).is_measured
    assert not plan(el.Recursive(16)).is_measured
    assert "estimated" in str(plan(el.Recursive(16)))
    assert not runs


@pytest.mark.slow
def test_a_large_program_is_run_only_for_long_loops(runs):
    """To compile it takes longer than in proportion, and so must the loop."""

    def plan_of_terms(count, length):
        def step(h, x):
            for _ in range(count):
                h = jnp.sin(h)  # one equation
            return h + x, None

        scan = el.Scan(step, schedule=BUDGET)
        return scan.plan(jnp.zeros(32), jnp.ones((length, 32)))

    assert plan_of_terms(15, 4 * LENGTH).is_measured
    assert runs == [7]
    runs.clear()
    # As many operations altogether, with sixteen times as many equations to compile.
    assert not plan_of_terms(255, LENGTH // 4).is_measured
    assert not runs
    assert plan_of_terms(255, 4 * LENGTH).is_measured
    assert runs == [5]  # no blocks or batches of 64 steps


def test_several_processes_measure_nothing(runs, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not plan().is_measured
    assert not runs
    # But they read what one process has written.
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    el.measurements(tmp_path / "times.json")
    alone = plan()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    el.measurements(None)
    el.measurements(tmp_path / "times.json")
    assert plan().pinned == alone.pinned
    assert len(runs) == 1


def test_what_cannot_be_compiled_alone_is_estimated():
    mean = lambda h, x: (jax.lax.pmean(jnp.tanh(h + x), "batch"), None)
    scan = el.Scan(mean, schedule=BUDGET)
    loss = lambda h: jnp.sum(scan(h, jnp.ones((50_000, 16)))[0])
    gradient = jax.vmap(jax.grad(loss), axis_name="batch", axis_size=1, in_axes=None)
    assert jax.eval_shape(gradient, jnp.ones(16)).shape == (1, 16)


@pytest.mark.slow
def test_not_disturbed_by_checks_for_nan():
    el.measurements(None)
    with jax.debug_nans(True):
        scan = el.Scan(lambda h, x: (jnp.log(-h) * x, None), schedule=BUDGET)
        assert scan.plan(jnp.ones(64), jnp.ones((20_000, 64))).is_measured


@pytest.mark.slow
def test_keys_and_integers_in_what_is_run():
    el.measurements(None)

    def step(carry, x):
        h, key, n = carry
        return (
            jnp.tanh(h + x.astype(h.dtype) * jr.normal(key, h.shape)),
            key,
            n + 1,
        ), None

    init = (jnp.ones(64), jr.key(0), jnp.int32(0))
    scan = el.Scan(step, schedule=el.Budget("64KiB"))
    assert scan.plan(init, jnp.ones(5000, jnp.bfloat16)).is_measured


def test_a_file_is_written_and_read(runs, tmp_path):
    path = tmp_path / "times.json"
    el.measurements(path)
    first = plan()
    written = json.loads(path.read_text())
    assert len(written["nanoseconds"]) == 7
    el.measurements(None)
    el.measurements(str(path))
    assert plan().pinned == first.pinned
    assert plan().relative_time == first.relative_time
    assert runs == [7]
    assert [p.name for p in tmp_path.iterdir()] == ["times.json"]


def test_the_file_decides(runs, tmp_path):
    """If it says that batches are slow they are not taken, and the other way round."""
    path = tmp_path / "times.json"
    el.measurements(path)
    plan()
    keys = list(json.loads(path.read_text())["nanoseconds"])
    found = {}
    for fast in (ByResiduals, Together):
        times = dict.fromkeys(keys, 1000000.0)
        for key, reversal in _keys_of_pieces().items():
            times[key] = 1e6 if reversal in (None, fast) else 1e9
        path.write_text(json.dumps({"eqloop measurements": 1, "nanoseconds": times}))
        el.measurements(None)
        el.measurements(path)
        found[fast] = plan(el.Budget("96KiB"))._layout.reversal
    assert isinstance(found[ByResiduals], ByResiduals)
    assert isinstance(found[Together], Together)
    assert len(runs) == 1


def _keys_of_pieces():
    """The names under which times are remembered, with the kind of reversal."""
    seen = {}
    true = _measured_pace.key_of

    def note(parts):
        parts = list(parts)
        key, layout = true(parts), parts[-1]
        # Of a block of many steps nothing is asked here.
        alone = isinstance(layout, StepsAlone) or layout.stores_residuals
        seen[key] = None if alone else type(layout.reversal)
        return key

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_measured_pace, "key_of", note)
        plan()
    return seen


def test_a_frontier_is_measured(runs):
    f, init, xs = recurrent(LENGTH)
    plans = el.frontier(el.Scan(f), init, xs)
    assert all(one.is_measured for one in plans)
    assert plans.chosen.is_measured
    times = [one.relative_time for one in plans]
    assert times == sorted(times, reverse=True)


def test_a_pinned_plan_is_that_plan():
    f, init, xs = recurrent(200)
    found = el.Scan(f, schedule=el.Budget("16KiB")).plan(init, xs)
    pinned = el.Scan(f, schedule=found.pinned)
    assert pinned.plan(init, xs).pinned == found.pinned
    assert found.pinned == found.pinned
    loss = lambda f, scan: jnp.sum(scan(f)(init, xs)[0])
    ours = jax.grad(loss)(f, lambda f: el.Scan(f, schedule=found.pinned))
    plain = jax.grad(loss)(f, el.Scan)
    assert jnp.allclose(ours.weight, plain.weight, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="for a loop of 200 steps, and the loop has"):
        pinned.plan(init, xs[:100])
    with pytest.raises(TypeError, match="must be the layout of a plan"):
        el.Pinned("16KiB")


def test_wrong_settings(tmp_path):
    with pytest.raises(TypeError, match="`measure` must be True or False, not 1"):
        el.Budget(100, measure=1)
    with pytest.raises(TypeError, match="`path` must be a path or None, not 3"):
        el.measurements(3)
    for content in ("", "[]", "{}", '{"eqloop measurements": 99}'):
        path = tmp_path / "other.json"
        path.write_text(content)
        with pytest.raises(ValueError, match="does not hold measurements"):
            el.measurements(path)
        assert path.read_text() == content


def test_between_the_sizes_that_were_run_times_are_told():
    work = dict(evaluation=10.0, shared=5.0, dots=0, spared=0.0, reversal=20.0)
    work |= dict(started_once=5.0, dots_once=0, reads=0)
    cost = StepCost(*[100] * 3, (), *[100] * 8, 1, 100, **work)
    kinds = ByResiduals().kind, Together(8).kind
    seen = (
        (kinds[0], 1, 2.0),
        (kinds[0], 8, 1.0),
        (kinds[0], 64, 4.0),
        (kinds[1], 8, 0.5),
    )
    pace = Measured(cost, CPU, 11.0, 44.0, seen)
    estimated = Estimated(cost, CPU)
    factor = lambda reversal, count: (
        pace.block(reversal, count) / estimated.block(reversal, count)
    )
    assert factor(ByResiduals(), 1) == pytest.approx(2)
    assert factor(ByResiduals(), 64) == pytest.approx(4)
    assert factor(ByResiduals(), 1000) == pytest.approx(4)
    # One step alone tells nothing of blocks.
    assert factor(ByResiduals(), 2) == factor(ByResiduals(), 8) == pytest.approx(1)
    assert 1 < factor(ByResiduals(), 20) < 4
    assert factor(Together(32), 1) == factor(Together(8), 16) == pytest.approx(0.5)
    assert (pace.advance, pace.everything) == (11, 44)
    # What it takes to run steps again is told like this, too.
    assert pace.advance_side_by_side(1) == 11
    assert 5 < pace.advance_side_by_side(4) < 11
    seen = pace.with_side_by_side([(8, 0.5), (32, 0.25)])
    times = [seen.advance_side_by_side(count) for count in (1, 8, 16, 32, 64)]
    assert times[::2] == pytest.approx([11, 11 * 0.5**1.5, 2.75])
    assert times[1::2] == pytest.approx([5.5, 2.75])


def test_programs_take_their_time():
    short = lambda x: x + 1
    long = lambda x: jax.lax.fori_loop(0, 2000, lambda _, x: jnp.sin(x @ x), x)
    types = (jax.ShapeDtypeStruct((32, 32), jnp.float32),)
    times = _stopwatch.nanoseconds([(short, types), (long, types)])
    assert times is not None
    assert 0 < times[0] < times[1]
