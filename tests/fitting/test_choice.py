"""Choices among the options of parts, in integers alone."""

import dataclasses
import itertools

import hypothesis.strategies as st
from hypothesis import given

from eqloop.fitting import _decision
from eqloop.fitting._choice import Choice, Option

SIZES = {0: 3, 1: 5, 2: 8}


@st.composite
def parts(draw):
    """The options of a part, the fastest first."""
    options = draw(
        st.lists(
            st.builds(
                Option,
                nanoseconds=st.integers(1, 50).map(float),
                stored=st.integers(0, 20),
                shared=st.frozensets(st.sampled_from(sorted(SIZES))),
                working=st.integers(0, 10),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return sorted(options, key=lambda option: option.nanoseconds)


choices = st.builds(Choice, parts=st.lists(parts(), max_size=4), sizes=st.just(SIZES))
budgets = st.integers(0, 120)


def every(choice: Choice):
    return list(itertools.product(*(range(len(part)) for part in choice.parts)))


def simulated_peak(choice: Choice, chosen) -> int:
    """What is alive, step by step: forward, and back again."""
    alive, there = 0, set()
    undo, peaks = [], [0]
    for part, i in zip(choice.parts, chosen, strict=True):
        new = part[i].shared - there
        there |= new
        added = part[i].stored + sum(SIZES[value] for value in new)
        alive += added
        undo.append((added, part[i].working))
    for added, working in reversed(undo):
        peaks.append(alive + working)
        alive -= added
    return max(peaks)


@given(choices)
def test_the_peak_is_that_of_a_simulation(choice):
    for chosen in every(choice):
        assert choice.peak(chosen) == simulated_peak(choice, chosen)


@given(choices, budgets)
def test_what_is_chosen_fits_and_is_no_slower_than_single_changes(choice, nbytes):
    chosen = choice.within(nbytes)
    fitting = [other for other in every(choice) if choice.peak(other) <= nbytes]
    if chosen is None:
        # None is found where none is, or where it takes several changes at once.
        smallest = choice.smallest()
        assert choice.peak(smallest) > nbytes
        around = map(choice.peak, one_away(choice, smallest))
        assert all(peak >= choice.peak(smallest) for peak in around)
        return
    assert chosen in fitting
    time = choice.nanoseconds(chosen)
    assert time >= min(map(choice.nanoseconds, fitting))
    for other in one_away(choice, chosen):
        assert other not in fitting or choice.nanoseconds(other) >= time


def one_away(choice: Choice, chosen):
    return [
        other
        for other in every(choice)
        if sum(a != b for a, b in zip(other, chosen, strict=True)) == 1
    ]


@given(choices)
def test_with_room_for_all_nothing_is_given_up(choice):
    fastest = (0,) * len(choice.parts)
    assert choice.within(choice.peak(fastest)) == fastest


def layers(count: int) -> Choice:
    """Layers that are alike: everything, products, or nothing is stored."""
    part = [
        Option(30.0, 12, frozenset(), 4),
        Option(34.0, 4, frozenset(), 12),
        Option(40.0, 1, frozenset(), 15),
    ]
    return Choice([part] * count, {})


def test_more_memory_takes_hardly_more_time():
    for count in range(1, 6):
        choice, before = layers(count), float("inf")
        for nbytes in range(20, 12 * count + 5):
            chosen = choice.within(nbytes)
            if chosen is None:
                assert before == float("inf")
                continue
            time = choice.nanoseconds(chosen)
            assert time <= 1.05 * before
            fitting = [c for c in every(choice) if choice.peak(c) <= nbytes]
            best = min(map(choice.nanoseconds, fitting))
            assert time <= 1.1 * best
            before = min(before, time)


def test_no_more_is_stored_on_the_host_than_may_be():
    part = [
        Option(30.0, 12, frozenset(), 4),
        Option(33.0, 2, frozenset(), 4, on_host=12),
        Option(34.0, 4, frozenset(), 4, on_host=5),
        Option(45.0, 2, frozenset(), 4),
    ]
    for count, host in itertools.product(range(1, 4), range(0, 40, 4)):
        choice = Choice([part] * count, {}, host)
        assert choice.on_host(choice.smallest()) <= host
        for nbytes in range(6, 12 * count + 5):
            fitting = [
                c
                for c in every(choice)
                if choice.peak(c) <= nbytes and choice.on_host(c) <= host
            ]
            chosen = choice.within(nbytes)
            if chosen is None:
                assert len(fitting) <= 4**count // 4
                continue
            assert chosen in fitting
            best = min(map(choice.nanoseconds, fitting))
            assert choice.nanoseconds(chosen) <= 1.2 * best


def test_shared_values_are_counted_once():
    part = [Option(1.0, 2, frozenset({0, 1}), 0)]
    choice = Choice([part, part], SIZES)
    assert choice.stored((0, 0)) == [10, 2]
    assert choice.peaks((0, 0)) == [10, 12]


@dataclasses.dataclass
class Told:
    """A whole gradient of which it is told what it takes, in place of a compiler."""

    choice: Choice
    sizes: dict[tuple[int, ...], int]
    tried: list[_decision.Decision] = dataclasses.field(default_factory=list)

    def is_known(self, chosen):
        return False

    def decision(self, chosen, is_exact=True):
        found = _decision.Decision(self, (), self.sizes[chosen], True, chosen)
        self.tried.append(found)
        return found


def test_what_should_be_much_faster_is_tried_though_it_is_estimated_to_be_too_large():
    option = lambda time, nbytes: Option(time, 0, frozenset(), nbytes)
    slow = option(90.0, 90)
    sizes = {(0,): 300, (1,): 80, (2,): 95}
    for time, found in ((20.0, [(2,), (1,)]), (80.0, [(2,)])):
        choice = Choice([[option(10.0, 300), option(time, 140), slow]], {})
        fits = _decision._that_fit([Told(choice, sizes)], 100, [])
        assert [decision.chosen for decision in fits] == found


def test_it_is_tried_before_what_is_a_little_faster():
    options = [(10.0, 300), (66.0, 152), (72.0, 130), (78.0, 90)]
    choice = Choice([[Option(t, 0, frozenset(), n) for t, n in options]], {})
    # All are estimated to take more than they do.
    sizes = {(1,): 66, (2,): 94, (3,): 50}
    fits = _decision._that_fit([Told(choice, sizes)], 100, [])
    assert [decision.chosen for decision in fits] == [(3,), (1,)]
