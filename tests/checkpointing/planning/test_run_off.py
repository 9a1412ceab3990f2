"""Whole gradients that are run, to choose between layouts that seem equally fast."""

import pytest

import eqloop as el
from eqloop.checkpointing.planning import _measured, _run_off

from ..steps import recurrent

LENGTH = 4096
# Room for all that some kinds of layouts store, and not for all residuals.
BUDGET = el.Budget("1MiB")


class Runs:
    """What is run for plans, with times that are made up.

    Attributes:
        whole: How long the whole gradients of the first run-off take: the steps alone,
            everything stored, the layout that seemed to be the fastest, and another.
        calls: How many programs were run at a time.
    """

    def __init__(self):
        self.whole = [1, 10, 5, 5]
        self.calls = []

    def __call__(self, programs):
        self.calls.append(len(programs))
        # The step, everything, blocks of 1, 8 and 64 steps, and batches of 8 and 64.
        pieces = [1, 40, 30, 30, 30, 32, 32]
        times = self.whole if len(programs) == len(self.whole) else pieces
        return [1e6 * time for time in times[: len(programs)]]


@pytest.fixture
def runs(monkeypatch):
    found = Runs()
    monkeypatch.setattr(_measured, "nanoseconds", found)
    el.measurements(None)
    yield found
    el.measurements(None)


def plan(schedule=BUDGET, length=LENGTH):
    f, init, xs = recurrent(length)
    return el.Scan(f, schedule=schedule).plan(init, xs)


def again(runs, whole):
    el.measurements(None)
    runs.whole = whole
    return plan()


def test_of_two_that_seem_equal_the_faster_is_taken(runs):
    first = again(runs, [1, 10, 5, 6])
    assert runs.calls[-1] == 4
    other = again(runs, [1, 10, 6, 5])
    assert first.layout.kind != other.layout.kind
    assert again(runs, [1, 10, 5, 6]).layout == first.layout
    for found in (first, other):
        assert found.is_measured
        assert found.relative_time == pytest.approx(0.5)
        assert found.peak_bytes <= 2**20


def test_each_is_run_once(runs):
    first = plan()
    count = len(runs.calls)
    assert plan().layout == first.layout
    assert len(runs.calls) == count


def test_what_takes_long_is_not_run(runs, monkeypatch):
    monkeypatch.setattr(_run_off, "_QUICK", 1e7)
    plan()
    assert 4 not in runs.calls


def test_what_has_large_inputs_is_not_run(runs, monkeypatch):
    monkeypatch.setattr(_run_off, "_MOST_BYTES", 2**10)
    found = plan()
    assert 4 not in runs.calls
    assert found.is_measured


def test_nothing_is_run_without_measuring(runs):
    plan(el.Budget("1MiB", measure=False))
    assert not runs.calls
