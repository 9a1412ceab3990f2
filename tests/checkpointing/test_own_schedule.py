"""A schedule from outside: it cuts the loop, and runs in every mode."""

import dataclasses
import itertools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import eqloop as el

from .. import derivatives
from ..asserts import assert_raises
from ..derivatives import CONTEXTS, MODES, assert_agrees, name, scan
from ..marks import slow_if
from .counting import count_gradient

pytestmark = pytest.mark.sampled


@dataclasses.dataclass(frozen=True)
class At(el.AbstractSchedule):
    """Stores carries at some positions."""

    positions: tuple[int, ...]
    within: el.AbstractSchedule = el.Chunked(1)

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        inside = [p for p in sorted(set(self.positions)) if 0 < p < loop.length]
        edges = [0, *inside, loop.length]
        return loop.cut((b - a, self.within) for a, b in itertools.pairwise(edges))


@dataclasses.dataclass(frozen=True)
class AtMost(el.AbstractSchedule):
    """The docs' own; its fields have the names of those of a `Budget`."""

    nbytes: int
    measure: bool = True

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return el.Chunked(self.nbytes // loop.slot_bytes).layout(loop)


@dataclasses.dataclass(frozen=True)
class WrappedStep(el.AbstractSchedule):
    """A schedule around another one, which may have a budget."""

    within: el.AbstractSchedule
    most: int | None = None

    @property
    def budgeted_bytes(self) -> int | None:
        return self.most

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return self.within.layout(loop)


@dataclasses.dataclass(frozen=True)
class Seen(el.AbstractSchedule):
    """Notes the loops that it is asked for."""

    loops: list[el.LoopSpec] = dataclasses.field(compare=False)

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        self.loops.append(loop)
        return el.Chunked(1).layout(loop)


@dataclasses.dataclass(frozen=True)
class Cut(el.AbstractSchedule):
    """Whatever is passed to `loop.cut`."""

    segments: tuple[Any, ...]

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return loop.cut(self.segments)


WITHIN = (
    el.Chunked(1),
    el.Chunked(2),
    el.StoreAll(),
    el.Recursive(2),
    el.Binomial(2),
    el.Binomial(2, block=2),
    At((1, 2)),
)


# What this schedule adds is how it cuts the loop; segments are reversed twice below.
QUICK_MODES = (
    derivatives.jvp,
    derivatives.forward_over_reverse,
)


@pytest.mark.parametrize(
    "mode", slow_if(lambda mode: mode not in QUICK_MODES, MODES), ids=name
)
def test_modes(mode):
    assert_agrees(mode, derivatives.plain, scan(At((2, 3), el.Binomial(2))))


QUICK = (derivatives.shard_map, derivatives.nested)


@pytest.mark.parametrize(
    "context", slow_if(lambda c: c not in QUICK, CONTEXTS), ids=name
)
def test_contexts(context):
    assert_agrees(derivatives.grad, context, scan(At((1, 3))))


# One of each order; blocks are binomial.
@pytest.mark.parametrize(
    "within",
    slow_if(
        (el.Chunked(1), el.Chunked(2), el.Recursive(2), el.Binomial(2)).__contains__,
        WITHIN,
    ),
    ids=repr,
)
def test_schedules_of_segments(within):
    mode = derivatives.reverse_over_reverse
    assert_agrees(mode, derivatives.plain, scan(At((2,), within)))


@pytest.mark.parametrize("schedule", [At((2, 3)), el.Offload(At((2, 3)))], ids=repr)
def test_with_a_bar_and_backwards(schedule, capfd):
    step, xs = lambda h, x: (jnp.sin(h * x), h), jnp.linspace(0.1, 1.0, 5)
    scans = [
        el.Scan(step, schedule=s, reverse=True, progress=progress)
        for s, progress in ((schedule, 2), (None, None))
    ]
    losses = [lambda h, scan=scan: sum(map(jnp.sum, scan(h, xs))) for scan in scans]
    ours, theirs = (el.Grad(loss)(0.5) for loss in losses)
    assert jnp.allclose(ours, theirs, rtol=1e-5)
    assert "5/5" in capfd.readouterr().err


@hypothesis.given(
    st.integers(1, 40), st.sets(st.integers(1, 40), max_size=3), st.sampled_from(WITHIN)
)
@hypothesis.settings(max_examples=3)
def test_the_plan_says_how_often_the_step_is_evaluated(length, positions, within):
    schedule = At(tuple(positions), within)
    step = lambda h, x: (jnp.sin(h + x), None)
    plan = el.Scan(step, schedule=schedule).plan(0.5, jnp.ones(length))
    assert len(count_gradient(schedule, length)) == plan.evaluations


def test_a_loop_of_no_steps():
    scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), schedule=At((2,)))
    assert el.Grad(lambda h: scan(h, jnp.zeros(0))[0])(0.5) == 1.0


def test_the_name_of_a_field_makes_no_budget():
    h, xs = jnp.ones(8), jnp.ones((4096, 8))
    step = lambda h, x: (jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, h + x), None)
    plan_by = lambda schedule: el.Scan(step, schedule=schedule).plan(h, xs)
    usual = plan_by(WrappedStep(AtMost(10**6)))
    schedule = AtMost(usual.peak_bytes - 1)
    found = plan_by(schedule)
    assert (found.slots, found.peak_bytes) == (usual.slots, usual.peak_bytes)
    assert not found.is_measured
    for one in (schedule, el.Cast(schedule, "bfloat16")):
        told = one.budgeted_bytes, one.measures_steps, one.can_choose_policy, one.undo
        assert told == (None, False, False, None)
        with pytest.raises(ValueError, match="a budget chooses what each step keeps"):
            el.Scan(step, schedule=one, policy="auto")


@pytest.mark.parametrize(
    "wrap", [lambda s: s, el.Offload, lambda s: el.Cast(s, "bfloat16")]
)
def test_a_schedule_around_a_budget_says_what_it_says(wrap):
    budget = wrap(el.Budget("1MiB"))
    assert budget.budgeted_bytes == 2**20
    assert budget.measures_steps
    assert budget.can_choose_policy
    assert not wrap(el.Budget("1MiB", measure=False)).measures_steps
    scan = el.Scan(lambda h, x: (jnp.sin(h), None), schedule=budget, policy="auto")
    assert scan.plan(0.0, jnp.ones(8)).schedule == budget


def test_the_parts_of_plans_are_not_public():
    plan = el.Scan(lambda h, x: (h * x, None)).plan(0.5, jnp.ones(4))
    loops = []
    el.Scan(lambda h, x: (h * x, None), schedule=Seen(loops)).plan(0.5, jnp.ones(4))
    public = {
        kind: {name for name in dir(one) if not name.startswith("_")}
        for kind, one in (("plan", plan), ("loop", loops[0]))
    }
    assert public == {
        "plan": {
            *(
                "backward",
                "bytes_elsewhere",
                "block",
                "columns",
                "computed_again",
                "device",
            ),
            "evaluations",
            *(
                "held_whole",
                "may_end",
                "holds",
                "is_measured",
                "kept",
                "kernel",
                "length",
                "levels",
                "output_bytes",
                "peak_bytes",
            ),
            *("pinned", "plot", "relative_time", "rewritten", "saved_once"),
            *("scatter", "schedule"),
            *("slot_bytes", "slots"),
        },
        "loop": {
            *("carry_bytes", "cut", "has_inverse", "has_policy", "has_slots"),
            *("length", "slot_bytes"),
        },
    }


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        (
            [(3, el.Chunked(1)), (3, el.Chunked(1))],
            "ValueError: Cut: … `loop.cut` … length of the loop, 7, … 3, 3",
        ),
        ([], "ValueError: Cut: … length of the loop, 7, … none"),
        (
            [(-1, el.Chunked(1)), (8, el.Chunked(1))],
            "ValueError: … int of at least 0, and a schedule … number of steps is -1",
        ),
        (
            [(7.0, el.Chunked(1))],
            "TypeError: … int of at least 0, and a schedule … number of steps is 7.0",
        ),
        ([3, 4], "TypeError: Cut: `loop.cut` … `(10, el.Chunked(1))` … not 3"),
        ([(7, 16)], "TypeError: … schedule, such as `el.Chunked(1)` … schedule is 16"),
        (
            [(7, el.Offload(el.Binomial(2)))],
            "ValueError: Cut: … device … Offload",
        ),
    ],
)
def test_wrong_segments(segments, said):
    scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), schedule=Cut(tuple(segments)))
    assert_raises(lambda: scan.plan(0.0, jnp.zeros(7)), said)


def test_a_segment_of_no_steps_is_left_out():
    every, step = el.Chunked(1), lambda h, x: (jnp.sin(h + x), None)
    plans = [
        el.Scan(step, schedule=Cut(segments)).plan(0.0, jnp.zeros(7))
        for segments in [((7, every),), ((0, every), (np.int64(7), every), (0, every))]
    ]
    assert len({str(plan).partition("\n")[2] for plan in plans}) == 1


@pytest.mark.parametrize("wrap", [lambda s: s, el.Cast])
def test_a_schedule_without_a_hash(wrap):
    @dataclasses.dataclass
    class Mutable(el.AbstractSchedule):
        segments: Any = ()

        def layout(self, loop):
            return loop.cut(self.segments)

    assert_raises(
        lambda: el.Scan(lambda h, x: (h + x, None), schedule=wrap(Mutable())),
        "TypeError: Mutable: … hashable … `@dataclasses.dataclass(frozen=True)`",
    )
    assert_raises(lambda: Cut([(7, el.Chunked(1))]), "TypeError: Cut: … list … tuples")


class Plain(el.AbstractSchedule):
    """It is no dataclass."""

    def __init__(self, size: int):
        self.size = size

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        return el.Chunked(self.size).layout(loop)


def test_a_plain_class_is_told_from_others_and_printed_by_what_it_holds():
    traced: list[int] = []

    def step(h: Any, x: Any) -> Any:
        traced.append(1)
        return jnp.sin(h + x), None

    gradient = jax.jit(
        lambda x, size: jax.grad(
            lambda x: el.Scan(step, schedule=size)(x, jnp.ones(6))[0]
        )(x),
        static_argnums=1,
    )
    counts = []
    for size in (2, 2, 3):
        gradient(0.5, Plain(size))
        counts.append(len(traced))
    assert counts[0] == counts[1] < counts[2]
    assert (Plain(2) == Plain(2), Plain(2) == Plain(3)) == (True, False)
    assert str(el.Scan(step, schedule=Plain(2)).plan(0.5, jnp.ones(6))).startswith(
        "Plain(size=2)"
    )


@dataclasses.dataclass(frozen=True)
class Giving(el.AbstractSchedule):
    """Its layout is whatever it was given."""

    made: Any

    def layout(self, loop):
        return self.made


@pytest.mark.parametrize("wrap", [lambda s: s, el.Offload])
@pytest.mark.parametrize("made", [3, None, el.Chunked(2)])
def test_a_layout_that_is_none(made, wrap):
    scan = el.Scan(lambda h, x: (h + x, None), schedule=wrap(Giving(made)))
    said = f"TypeError: Giving: `layout` … `loop.cut` … {made!r}"
    xs = jnp.ones(3)
    assert_raises(lambda: scan.plan(0.0, xs), said)
    assert_raises(lambda: jax.grad(lambda h: scan(h, xs)[0])(0.0), said)
    assert_raises(lambda: jax.jit(jax.grad(lambda h: scan(h, xs)[0]))(0.0), said)
