"""Plans that are measured: what is tried for them, what is remembered, what decides."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jaxlib.version
import pytest

import eqloop as el
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine._pace import (
    ADVANCE,
    RESIDUALS,
    Pace,
    piece_of,
)
from eqloop.checkpointing.engine.orders._all_at_once import AllAtOnce
from eqloop.checkpointing.engine.orders._levels import Nest
from eqloop.checkpointing.engine.orders._nested import Nested
from eqloop.checkpointing.engine.reversals._block_reversals import ByResiduals
from eqloop.checkpointing.engine.reversals._together import Together
from eqloop.checkpointing.planning import (
    _choice,
    _facts,
    _memory,
    _notice,
    _paces,
    _trials,
)
from eqloop.checkpointing.planning._cost import step_cost
from eqloop.checkpointing.planning._paces import paces
from eqloop.checkpointing.planning._trials import StepsAlone, Trial
from eqloop.checkpointing.planning._work import CPU

from ...compiling import programs_compiled
from ..noted import Noted
from ..steps import recurrent

# Long enough to be worth it: of a light step, thousands.
LENGTH = 4096
BUDGET = el.Budget("256KiB")
MANY = el.Budget("1MiB")


def word_for(loop: Any) -> str:
    """What kind of piece a short loop consists of, in a word."""
    if isinstance(loop, StepsAlone):
        return "steps"
    if loop.stores_residuals:
        return "everything"
    return "together" if isinstance(loop.reversal, Together) else "carries"


# What a step of each kind of piece takes, in nanoseconds.
TIMES = {
    "steps": 100.0,
    "everything": 1000.0,
    "together": 1000.0,
    "carries": 1100.0,
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Which pieces are run, at times that are made up, the same each time."""
    seen: list[list[str]] = []

    def best_times(programs: Any, _: Any) -> Any:
        loops = [one.loop for one in programs]
        names = list(map(word_for, loops))
        seen.append(names)
        length = lambda loop: (
            loop.length if isinstance(loop, StepsAlone) else loop.order.length
        )
        return [
            (length(one) * runs.times[name], runs.scatter)
            for one, name in zip(loops, names, strict=True)
        ]

    runs = Runs(seen)
    monkeypatch.setattr(_trials, "_best_times", best_times)
    el.measurements(None)
    yield runs
    el.measurements(None)


class Runs(list[list[str]]):
    """What was run, and how long that is said to take."""

    def __init__(self, seen: list[list[str]]):
        self.seen, self.times, self.scatter = seen, dict(TIMES), 0.0

    @property
    def pieces(self) -> list[str]:
        return sorted(name for names in self.seen for name in names)


def plan(
    schedule: Any = BUDGET, length: int = LENGTH, step: Any = None, **settings: Any
) -> el.Plan:
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
    def gradient(f: Any, init: Any) -> Any:
        return jax.grad(lambda f: jnp.sum(el.Scan(f, schedule=BUDGET)(init, xs)[0]))(f)

    # The same plan where the loop is traced, of which nothing is a part of the program.
    jaxpr = str(jax.make_jaxpr(gradient)(f, init))
    assert jaxpr.count("_trials") == 0
    ours = gradient(f, init).weight
    plain = jax.grad(lambda f: jnp.sum(jax.lax.scan(lambda h, x: f(h, x), init, xs)[0]))
    assert jnp.allclose(ours, plain(f).weight, rtol=1e-3, atol=1e-4)
    assert scan.plan(init, xs).pinned == found.pinned


def test_what_was_measured_is_remembered(runs: Runs):
    first = plan()
    assert runs.seen[0] == ["steps", "everything", "together"]
    assert first.is_measured
    # Each other piece was tried once, beside the steps alone.
    others = lambda: [name for name in runs.pieces if name != "steps"]
    rounds = len(runs.seen)
    assert plan().pinned == first.pinned
    assert len(runs.seen) == rounds
    # Another length may have other pieces, and has the times of these.
    plan(length=2 * LENGTH)
    assert len(others()) == len(set(others()))


def test_few_programs_are_compiled():
    el.measurements(None)
    before = programs_compiled()
    f, init, xs = recurrent(LENGTH // 2)
    plan_of = lambda: el.Scan(lambda h, x: f(h, 2 * x), schedule=BUDGET).plan(init, xs)
    found = plan_of()
    assert found.is_measured
    assert 0 < programs_compiled() - before <= 6
    before = programs_compiled()
    assert plan_of() == found
    assert programs_compiled() == before


def test_measured_where_a_loop_is_batched_or_nested(runs: Runs):
    f, init, xs = recurrent(4 * LENGTH)
    scan = el.Scan(f, schedule=BUDGET)
    loss = lambda init: jnp.sum(scan(init, xs)[0])
    outer = lambda h: jax.lax.scan(lambda h, _: (scan(h, xs)[0], None), h, None, 2)
    for gradient, args in (
        (jax.grad(lambda h: jnp.sum(jax.vmap(loss)(h))), jnp.zeros((2, 32))),
        (jax.vmap(jax.grad(loss)), jnp.zeros((2, 32))),
        (jax.grad(lambda h: jnp.sum(outer(h)[0])), init),
    ):
        runs.seen.clear()
        el.measurements(None)
        jax.jit(gradient).lower(args)
        assert runs.seen


@pytest.mark.parametrize(("time", "taken"), [(1.0, True), (30_000.0, False)])
def test_what_may_pay_is_tried_and_taken_if_it_does(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, time: float, taken: bool
):
    monkeypatch.setattr(_choice, "_PROMISING", 2.0)
    runs.times |= {"together": time}
    found = plan(MANY)._layout
    assert "together" in runs.pieces
    assert isinstance(found.reversal, Together) == taken


def test_the_steps_alone_are_run_again_beside_what_is_tried_later(
    runs: Runs, tmp_path: Any
):
    path = tmp_path / "times.json"
    el.measurements(path)
    plan()
    facts = lambda: json.loads(path.read_text())["facts"]
    before = {k: fact for k, fact in facts().items() if "nanoseconds" in fact}
    # Now the machine is three times as slow, the loop is longer, and carries may go to
    # the host as well.
    runs.times = {name: 3 * time for name, time in runs.times.items()}
    runs.seen.clear()
    compiled = _trials._compiled.cache_info().misses
    plan(el.Budget("16KiB", host="1MiB"), length=2 * LENGTH)
    assert runs.seen
    assert all(names[0] == "steps" for names in runs.seen)
    after = {k: fact for k, fact in facts().items() if "nanoseconds" in fact}
    assert before.items() <= after.items()
    new = sum(len(names) - 1 for names in runs.seen)
    assert len(after) == len(before) + new
    # Each new piece is a program, and that of the steps alone was there.
    assert _trials._compiled.cache_info().misses == compiled + new


def with_callback(h: Any, x: Any) -> Any:
    same = jax.pure_callback(lambda x: x, x, jax.lax.stop_gradient(x))
    return jnp.tanh(h + same), None


def with_while(h: Any, x: Any) -> Any:
    h = jax.lax.stop_gradient(h)
    return x + jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h + 1, h), None


@pytest.mark.parametrize("step", [with_callback, with_while], ids=lambda f: f.__name__)
def test_a_step_that_might_do_anything_is_not_run(runs: Runs, step: Any):
    assert not plan(step=step).is_measured
    assert not runs.seen


def test_nothing_is_run_where_it_would_not_pay(runs: Runs):
    assert not plan(el.Budget("64KiB"), length=16).is_measured
    assert not plan(el.Budget("256KiB", measure=False)).is_measured
    assert not plan(el.Recursive(16)).is_measured
    assert "estimated" in str(plan(el.Recursive(16)))
    assert not runs.seen


def test_nothing_is_run_that_takes_much_memory(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
):
    """Its time is told from the program that was compiled."""
    monkeypatch.setattr(_trials, "_MOST_BYTES", 1000)
    found = plan()
    assert not found.is_measured
    assert not runs.seen
    assert found.pinned == plan(el.Budget(BUDGET.nbytes, measure=False)).pinned


def test_several_processes_measure_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert not plan().is_measured
    assert not runs.seen
    # But they read what one process has written.
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    el.measurements(tmp_path / "times.json")
    alone, rounds = plan(), len(runs.seen)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    el.measurements(None)
    el.measurements(tmp_path / "times.json")
    assert plan().pinned == alone.pinned
    assert len(runs.seen) == rounds


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

    def step(carry: Any, x: Any) -> Any:
        h, key, n = carry
        return (
            jnp.tanh(h + x.astype(h.dtype) * jr.normal(key, h.shape)),
            key,
            n + 1,
        ), None

    init = (jnp.ones(64), jr.key(0), jnp.int32(0))
    scan = el.Scan(step, schedule=el.Budget("64KiB"))
    assert scan.plan(init, jnp.ones(5000, jnp.bfloat16)).is_measured


def test_a_file_is_written_and_read(runs: Runs, tmp_path: Any):
    path = tmp_path / "times.json"
    el.measurements(path)
    first = plan()
    facts = json.loads(path.read_text())["facts"]
    measured = sum("nanoseconds" in fact for fact in facts.values())
    rounds = len(runs.seen)
    assert measured == len(runs.pieces) - (rounds - 1)
    el.measurements(None)
    el.measurements(str(path))
    assert plan().pinned == first.pinned
    assert plan().relative_time == first.relative_time
    assert len(runs.seen) == rounds
    assert [p.name for p in tmp_path.iterdir()] == ["times.json"]


def test_a_file_is_in_use_within_a_with(runs: Runs, tmp_path: Any):
    found, (first, second) = plan(), (tmp_path / name for name in ("a", "b"))
    for before in (None, first):
        el.measurements(before)
        plan()
        runs.seen.clear()
        with el.measurements(second):
            plan()
            assert bool(runs.seen) == (before is None)
        assert second.exists()
        runs.seen.clear()
        assert plan().pinned == found.pinned
        assert not runs.seen, "what was known before is known again"
        plan(el.Budget("1MiB"))
        kept = len(second.read_text())
    assert len(first.read_text()) >= kept


@pytest.mark.parametrize("fast", ["together", "everything"])
def test_what_was_seen_decides(runs: Runs, fast: str):
    """If batches were slow they are not taken, and the other way round."""
    runs.times |= {"together": 2500.0, "everything": 2500.0, fast: 300.0}
    kind = Together if fast == "together" else ByResiduals
    assert isinstance(plan(MANY)._layout.reversal, kind)


def test_of_plans_that_are_as_fast_the_one_that_runs_less_is_taken(runs: Runs):
    """So noise does not decide, up to twice of what times were seen to scatter."""
    everything = el.Budget("64MiB")
    # Larger batches than those that are tried take less time, and steps are run again.
    for time in range(1500, 1000, -25):
        runs.times |= {"together": float(time)}
        el.measurements(None)
        if (found := plan(everything)).evaluations > LENGTH:
            break
    # It is as soon as it pays, and not before.
    assert 0.93 < found.relative_time < 0.97
    runs.scatter = 0.06
    el.measurements(None)
    found = plan(everything)
    assert found.evaluations == LENGTH


@pytest.mark.slow
def test_a_frontier_is_measured(runs: Runs):
    f, init, xs = recurrent(LENGTH)
    plans = el.Scan(f).frontier(init, xs)
    assert all(one.is_measured for one in plans)
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


def test_wrong_settings(tmp_path: Any):
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


def test_what_is_seen_of_a_piece_multiplies_its_estimate():
    asked: list[Any] = []
    plan(Noted(el.Chunked(1), asked))
    ((problem, active, _),) = asked
    estimated = Pace(step_cost(problem, active), CPU)
    pace = estimated.with_seen(ADVANCE, 3.0)
    assert pace.advance == pytest.approx(3 * estimated.advance)
    assert pace.everything == estimated.everything
    # What is taken back by residuals is one piece: single steps, blocks, all steps.
    pace = pace.with_seen(RESIDUALS, 5.0)
    assert pace.everything == pytest.approx(5 * estimated.everything)
    for reversal in (ByResiduals(), Together(8)):
        for count in (1, 8, 64):
            plain = estimated.block(reversal, count)
            assert pace.block(reversal, count) == pytest.approx(5 * plain)
    # Batches take as many times as long until they are seen; but what single steps are
    # slow by for reasons of their own is not told of them.
    slow = pace.with_seen(RESIDUALS, 50.0)
    assert slow.block(ByResiduals(), 64) > 49 * estimated.block(ByResiduals(), 64)
    assert slow.block(Together(8), 64) == pytest.approx(6 * plain)
    seen = pace.with_seen(piece_of(Together(8)), 0.5)
    assert seen.block(reversal, 64) == pytest.approx(plain / 2)


@pytest.mark.parametrize("length", [1, 2, 8])
def test_each_piece_of_large_steps_is_tried(
    length: int, monkeypatch: pytest.MonkeyPatch
):
    """A trial has few of them: with a single one, a block would be none."""
    monkeypatch.setattr(_paces, "_MOST_BYTES", 1)
    monkeypatch.setattr(_paces, "_is_quick", lambda *_: False)
    tried = list[Any]()

    def seen(problem: Any, active: Any, loops: Any, measure: bool) -> list[Trial]:
        tried.extend(loops)
        return [Trial(1000.0, 0.0, 64, False)] * len(loops)

    monkeypatch.setattr(_paces, "trials", seen)
    asked: list[Any] = []
    scan = el.Scan(
        lambda h, x: (jnp.tanh(h + x), h), schedule=Noted(el.Chunked(1), asked)
    )
    scan.plan(jnp.ones(3), jnp.ones((length, 3)))
    ((problem, active, _),) = asked
    times = paces(problem, active, measure=True)
    # Steps and blocks of each reversal.
    every = [Nested((Nest((length,)),))]
    every += [Nested((Nest((length // 2,), 2),))] * (length > 1)
    layouts = [Layout(AllAtOnce(length))]
    layouts += [
        Layout(o, reversal=r) for o in every for r in (ByResiduals(), Together(2))
    ]
    found = _paces.tried(problem, active, times, layouts)
    assert not any(map(found.unknown, layouts))
    assert len(set(tried)) == len(tried)


def test_steps_with_known_products_are_as_much_faster_as_others_of_their_kind():
    asked: list[Any] = []
    plan(Noted(el.Chunked(1), asked))
    ((problem, active, _),) = asked
    base = paces(problem, active, measure=False).base
    pace = base.with_seen(piece_of(Together(8)), 3.0)
    ratio = lambda one, other: one.block(Together(8), 1) / other.block(Together(8), 1)
    assert ratio(pace.of_known, base.of_known) == pytest.approx(3)
    assert ratio(base.of_known, base) < 1


@pytest.mark.slow
def test_layouts_say_of_which_pieces_their_time_is_made_up():
    f, init, xs = recurrent(64)
    layout = lambda schedule: el.Scan(f, schedule=schedule).plan(init, xs)._layout
    assert layout(el.StoreAll()).pieces == {RESIDUALS}
    assert layout(el.Binomial(4)).pieces == {ADVANCE, RESIDUALS}
    blocks = layout(el.Binomial(4, block=8))
    assert blocks.pieces == {ADVANCE, RESIDUALS}
    batches = Layout(blocks.order, reversal=Together(8))
    assert batches.pieces == {ADVANCE, Together(8).kind}


def test_programs_take_their_time():
    f, init, xs = recurrent(LENGTH)
    asked: list[Any] = []
    el.Scan(f, schedule=Noted(el.Chunked(1), asked)).plan(init, xs)
    ((problem, active, _),) = asked
    loops = [StepsAlone(64), StepsAlone(1024)]
    short, long = _trials.trials(problem, active, loops, measure=True)
    assert short.was_run
    assert 0 < short.nanoseconds < long.nanoseconds
    short, long = _trials.trials(problem, active, loops, measure=False)
    assert not short.was_run
    assert long.nanoseconds == pytest.approx(16 * short.nanoseconds, rel=0.1)


def test_facts_are_kept_beside_the_compilation_cache(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    folder = str(tmp_path / "cache")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        first = plan(length=LENGTH - 1)
        facts = json.loads((tmp_path / "cache" / "eqloop.json").read_text())["facts"]
        assert {"nanoseconds", "bytes"} <= set().union(*facts.values())
        # As another process would find it: nothing is tried or compiled.
        el.measurements(None)
        monkeypatch.setattr(_trials, "_tried", None)
        monkeypatch.setattr(_memory, "_temporary", None)
        again = plan(length=LENGTH - 1)
        assert again == first
        assert again.relative_time == first.relative_time
        # A file of somebody else is left alone, and is no error.
        el.measurements(None)
        (tmp_path / "cache" / "eqloop.json").write_text("something else")
        monkeypatch.undo()
        assert plan(length=LENGTH - 1).evaluations > 0
        assert (tmp_path / "cache" / "eqloop.json").read_text() == "something else"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_plan_that_takes_long_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_notice, "_LONG", 1e3)
    plan(length=100)
    assert not caplog.messages
    monkeypatch.setattr(_notice, "_LONG", 1e-3)
    el.measurements(None)
    plan(length=LENGTH - 2)
    assert caplog.messages
    assert all("planning a loop of 4094 steps" in line for line in caplog.messages)
    assert "jax_compilation_cache_dir" in caplog.messages[0]
    assert f"asked for at {__file__}" in caplog.messages[0]
    el.measurements(None)
    plan(length=LENGTH - 2)
    assert len(caplog.messages) == len(set(caplog.messages))
    # So does one in which nothing is searched for, such as that of a large kernel.
    scan = el.Scan(lambda h, _: (jnp.tanh(h), None), schedule=el.Recursive(7))
    scan.plan(jnp.zeros(33), length=LENGTH - 3)
    assert "Recursive(base=7) is planning a loop of 4093" in caplog.messages[-1]


def test_times_that_scatter_say_so(runs: Runs):
    assert "give or take" not in str(plan())
    runs.scatter = 0.25
    el.measurements(None)
    found = plan()
    assert found.scatter == 0.25
    assert "measured, give or take 25%" in str(found)


def test_a_loop_whose_steps_hand_nothing_on(monkeypatch: pytest.MonkeyPatch):
    """Run without outputs, they do nothing, and no kernel is started."""
    monkeypatch.setattr(_paces, "_is_quick", lambda *_: False)
    el.measurements(None)
    loop = el.ForLoop(jnp.sin, schedule=el.Budget("64KiB", measure=False))
    assert 0 < loop.plan(jnp.ones((300, 8))).relative_time < 10


def test_facts_are_of_this_package_and_of_these_flags(monkeypatch: pytest.MonkeyPatch):
    """Another version of it makes other programs, which take other memory."""
    key = _facts.key_of(["a step"])
    assert _facts.key_of(["a step"]) == key
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert _facts.key_of(["a step"]) != key
    monkeypatch.undo()
    monkeypatch.setattr(_facts, "_package", lambda: "another")
    assert _facts.key_of(["a step"]) != key
    monkeypatch.undo()
    monkeypatch.setattr(jaxlib.version, "__version__", "another")
    assert _facts.key_of(["a step"]) != key


@pytest.mark.parametrize(
    ("setting", "value", "is_told"),
    [
        ("jax_default_matmul_precision", "highest", True),
        ("jax_disable_most_optimizations", True, True),
        ("jax_enable_x64", True, True),
        ("jax_log_compiles", True, False),
        ("jax_traceback_filtering", "off", False),
        ("jax_compilation_cache_max_size", 10**9, False),
    ],
)
def test_facts_are_of_the_settings_of_the_compiler(setting, value, is_told):
    key, before = _facts.key_of(["a step"]), jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert (_facts.key_of(["a step"]) != key) == is_told
    finally:
        jax.config.update(setting, before)
    assert _facts.key_of(["a step"]) == key


def test_flags_of_a_tpu_are_told(monkeypatch: pytest.MonkeyPatch):
    key = _facts.key_of(["a step"])
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_something=true")
    assert _facts.key_of(["a step"]) != key


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        el.measurements(tmp_path / "nowhere" / "times.json")


def test_a_file_that_cannot_be_written_any_more_hinders_no_plan(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    el.measurements(folder / "times.json")
    folder.rmdir()
    try:
        with pytest.warns(UserWarning, match=r"measurements: .*times.json"):
            _facts.remember({"key": {"bytes": 1.0}})
    finally:
        el.measurements(None)


# Files that hold something else.

FORMAT = "eqloop measurements"


@pytest.fixture
def cache(tmp_path: Any) -> Any:
    """The file beside JAX's compilation cache."""
    el.measurements(None)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "eqloop.json"
    jax.config.update("jax_compilation_cache_dir", before)
    el.measurements(None)


def remember_twice() -> None:
    for key in ("one", "two"):
        assert _facts.recall(key) is None
        _facts.remember({key: {"bytes": 1.0}})


OLD = {FORMAT: 1, "facts": {"old": {"bytes": 1}}}


def test_an_old_file_is_begun_anew(tmp_path: Any, cache: Any):
    own = tmp_path / "own.json"
    for path in (own, cache):
        path.write_text(json.dumps(OLD))
        el.measurements(own if path == own else None)
        assert _facts.recall("old") is None
        _facts.remember({"new": {"bytes": 2.0}})
        el.measurements(None)
        content = json.loads(path.read_text())
        assert content == {FORMAT: 2, "facts": {"new": {"bytes": 2.0}}}
        path.unlink()


@pytest.mark.parametrize("content", ["", "[]", "{}", json.dumps({**OLD, FORMAT: 99})])
def test_what_is_put_in_the_place_of_a_file_hinders_no_gradient(
    content: str, tmp_path: Any
):
    path = tmp_path / "times.json"
    el.measurements(path)
    path.write_text(content)  # by another version, meanwhile
    try:
        with pytest.warns(UserWarning, match="does not hold .* is not kept") as said:
            remember_twice()
        assert len(said) == 1
        assert (_facts.recall("one"), path.read_text()) == ({"bytes": 1.0}, content)
    finally:
        el.measurements(None)


def test_what_else_is_beside_the_cache_is_said(cache: Any):
    cache.write_text("{}")
    with pytest.warns(UserWarning, match="does not hold .* is not kept") as said:
        remember_twice()
    assert len(said) == 1
    assert cache.read_text() == "{}"
