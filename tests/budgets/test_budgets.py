"""Some of the random budgets; the weekly run has an hour of others.

A seed that fails: `python -m tests.budgets SEED` shows its program, smaller.
"""

import dataclasses

import pytest

import eqloop as el

from ..marks import slow
from ..random_programs.bodies import Body, Op
from ..random_programs.judging import Skipped
from ..random_programs.programs import Scanned
from ..random_programs.shrinking import shrink
from ..random_programs.transforms import Transform
from ..random_programs.values import Precision, Type
from . import plain
from .budgeted import Budgeted
from .choice import random_case
from .judging import judge


@pytest.mark.parametrize("seed", [3, *map(slow, [5, *range(10, 40)])])
def test_a_random_budget_is_kept(seed):
    try:
        finding = judge(random_case(seed))
    except Skipped as skipped:
        pytest.skip(str(skipped))
    assert finding is None, str(finding)


def test_a_seed_is_a_case():
    cases = [str(random_case(seed)) for seed in range(50)]
    assert cases == [str(random_case(seed)) for seed in range(50)]
    assert len(set(cases)) == 50


def test_all_that_can_have_a_budget_is_tried():
    cases = [random_case(seed) for seed in range(300)]
    assert {case.program.transform.name for case in cases} == set(plain.MADE)
    others = [dict(case.others) for case in cases]
    assert set().union(*others) == {"measure", "host", "disk", "directory"}
    assert {other["measure"] for other in others} == {False, True}
    bodies = [body.show() for case in cases for body in case.program.bodies]
    assert any("Budget" in body for body in bodies)


@pytest.fixture
def case():
    """A scan of `sin(h) + x`, with an operation that does nothing for its result."""
    vector = Type("f", (64,))
    ops = (
        Op("sin", (0,), (vector,)),
        Op("cube", (1,), (vector,)),
        Op("add", (2, 1), (vector,)),
    )
    program = Scanned(
        inputs=(vector, Type("f", (50, 64))),
        bodies=(Body((vector, vector), ops, (4,)),),
        transform=Transform("Scan", (("reverse", True),), 50),
        trees=((0,), (0,), ()),
        x_axes=(0,),
    )
    return Budgeted(
        seed=0,
        program=program,
        mode="grad",
        place="plain",
        vmap="none",
        is_jitted=True,
        is_strict=False,
        precision=Precision(x64=False, real="float32"),
        width=64,
        differentiated=(0, 1),
        batched=(True, True),
        has_axis=False,
    )


@pytest.mark.parametrize(
    "backward", [el.Truncate(7), slow(None), slow(el.ClipCotangent(0.5))]
)
def test_nothing_is_found_where_a_budget_is_kept(case, backward):
    transform = Transform("Scan", (("reverse", True), ("backward", backward)), 50)
    program = dataclasses.replace(case.program, transform=transform)
    assert judge(dataclasses.replace(case, program=program)) is None


@pytest.fixture
def ignored(monkeypatch):
    """Budgets that are too small are refused, and others are not kept."""
    of = lambda case, nbytes: el.Budget(1) if nbytes == 1 else el.StoreAll()
    monkeypatch.setattr(Budgeted, "budget", of)


def test_a_budget_that_is_not_kept_is_found(case, ignored):
    finding = judge(case)
    assert finding.kind == "more than its budget: Scan"
    taken, _, nbytes, *_ = finding.detail.split()
    assert int(taken) > 2 * int(nbytes)


@pytest.mark.slow
def test_its_program_is_made_smaller(case, ignored):
    finding = judge(case)
    small = shrink(finding, judge).case
    assert small.program.transform.settings == ()
    assert len(small.differentiated) == 1
    assert judge(small).kind == finding.kind


def test_a_wrong_gradient_is_found(case, monkeypatch):
    def loses_reverse(transform, step):
        settings = [s for s in transform.settings if s[0] != "reverse"]
        return _SCAN(dataclasses.replace(transform, settings=tuple(settings)), step)

    monkeypatch.setitem(plain.MADE, "Scan", loses_reverse)
    assert judge(case).kind == "another gradient: Scan"


def test_an_error_is_found(case, monkeypatch):
    def fails(step, **settings):
        raise RuntimeError("no scan 17")

    monkeypatch.setattr(el, "Scan", fails)
    assert judge(case).kind == "RuntimeError: no scan #"


_SCAN = plain.MADE["Scan"]
