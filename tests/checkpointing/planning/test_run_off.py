"""Whole gradients that are run, to choose between layouts that seem equally fast."""

import pytest

import eqloop as el
from eqloop.checkpointing.planning import _measured_pace, _run_off, _search

from ..steps import recurrent

LENGTH = 4096
# Room for all that some kinds of layouts store, and not for all residuals.
BUDGET = el.Budget("1MiB")


class Runs:
    """What is run for plans, with times that are made up.

    Attributes:
        whole: How long whole gradients take, one after the other, where the steps alone
            take 1 and storing everything takes 10.
        calls: How many programs were run at a time.
    """

    def __init__(self):
        self.whole = [5] * 5
        self.calls = []

    def __call__(self, programs):
        # The step, everything, blocks of 1, 8 and 64 steps, and batches of 8 and 64.
        times = [1, 40, 30, 30, 30, 32, 32]
        if len(programs) == 3:
            times = [1, 10, self.whole[0]]
        elif 3 in self.calls:  # then one by one, each beside the steps alone
            times = [self.whole[len(self.calls) - self.calls.index(3)], 1]
        self.calls.append(len(programs))
        return [1e6 * time for time in times[: len(programs)]]


@pytest.fixture
def runs(monkeypatch):
    found = Runs()
    monkeypatch.setattr(_measured_pace, "nanoseconds", found)
    monkeypatch.setattr(_search, "_ABREAST", ())
    el.measurements(None)
    yield found
    el.measurements(None)


def plan(schedule=BUDGET, length=LENGTH):
    f, init, xs = recurrent(length)
    return el.Scan(f, schedule=schedule).plan(init, xs)


def again(runs, whole):
    el.measurements(None)
    runs.calls.clear()
    runs.whole = whole
    return plan()


def test_of_two_that_seem_equal_the_faster_is_taken(runs):
    first = again(runs, [5, 6, 6, 6, 6])
    # One gradient, beside the steps alone and that of storing everything; then one of
    # another kind, beside the steps alone.
    assert runs.calls[-2:] == [3, 2]
    other = again(runs, [6, 5, 6, 6, 6])
    assert first._layout.kind != other._layout.kind
    assert again(runs, [5, 6, 6, 6, 6]).pinned == first.pinned
    for found in (first, other):
        assert found.is_measured
        assert found.relative_time == pytest.approx(0.5)
        assert found.peak_bytes <= 2**20


def test_more_are_run_if_it_takes_longer_than_it_seemed(runs):
    found = again(runs, [900, 800, 700, 600, 500])
    assert runs.calls[-5:] == [3, 2, 2, 2, 2]
    assert found.relative_time == pytest.approx(50)


def test_each_is_run_once(runs):
    first = plan()
    count = len(runs.calls)
    assert plan().pinned == first.pinned
    assert len(runs.calls) == count


def test_of_what_takes_long_a_shorter_loop_is_run(runs, monkeypatch):
    lengths = []

    def times_of(problem, active, layouts, length):
        lengths.append((length, [type(one).__name__ for one in layouts]))
        return [1e6 * length, (len(lengths) + 2) * 1e6 * length]

    monkeypatch.setattr(_run_off, "times_of", times_of)
    monkeypatch.setattr(_run_off, "_QUICK", 1e7)
    el.measurements(None)
    found = plan()
    assert found.is_measured
    assert lengths
    assert all(32 <= length < LENGTH for length, _ in lengths)
    assert all(names == ["StepsAlone", "Layout"] for _, names in lengths)


def test_what_has_large_inputs_is_not_run(runs, monkeypatch):
    monkeypatch.setattr(_run_off, "_BYTES_TO_RUN", 2**10)
    found = plan()
    assert 3 not in runs.calls
    assert found.is_measured


def test_nothing_is_run_without_measuring(runs):
    plan(el.Budget("1MiB", measure=False))
    assert not runs.calls
