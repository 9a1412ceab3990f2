"""Some of the random programs; the weekly run has an hour of others.

A seed that fails: `python -m tests.random_programs SEED` shows its program, smaller.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import eqloop as el

from ..marks import slow
from .bodies import Body, Op
from .cases import SETTINGS, Case
from .checked import checked_case, judge_checked
from .choice import random_case
from .foreign import rescheduled_case
from .grow import BY_JAX_ON_DEVICES, CUSTOM, NOTED, ON_DEVICES
from .judging import Skipped, judge, judge_slopes
from .programs import Scanned
from .searching import parser, search
from .seeing import judge_seeing, seeing_case
from .shrinking import shrink
from .transforms import Transform
from .values import Precision, Type


@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(2, 20))])
def test_a_random_program_is_as_written_out(seed):
    try:
        finding = judge(random_case(seed))
    except Skipped as skipped:
        pytest.skip(f"plain JAX does not evaluate it: {skipped}")
    assert finding is None, str(finding)


@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(2, 20))])
def test_what_sees_its_batch_is_run_again_as_before(seed):
    try:
        finding = judge_seeing(seeing_case(seed))
    except Skipped as skipped:
        pytest.skip(str(skipped))
    assert finding is None, str(finding)


@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(2, 20))])
def test_loops_that_stop_in_a_checked_shard_map(seed):
    try:
        finding = judge_checked(checked_case(seed))
    except Skipped as skipped:
        pytest.skip(str(skipped))
    assert finding is None, str(finding)


@pytest.mark.parametrize("seed", [*range(2), *map(slow, range(2, 20))])
def test_loops_of_jax_are_rescheduled(seed):
    try:
        finding = judge(rescheduled_case(seed))
    except Skipped as skipped:
        pytest.skip(f"plain JAX does not evaluate it: {skipped}")
    assert finding is None, str(finding)


MADE = [random_case, seeing_case, checked_case, rescheduled_case]


@pytest.mark.parametrize("made", MADE)
def test_a_seed_is_a_program(made):
    for seed in range(50):
        assert str(made(seed)) == str(made(seed))
    assert len({str(made(seed)) for seed in range(50)}) == 50


def test_every_setting_and_device_is_tried():
    cases = [random_case(seed) for seed in range(200)]
    assert {case.setting for case in cases} == {"none", *SETTINGS}
    assert {case.is_spread for case in cases} == {False, True}
    programs = "\n".join(str(case.program) for case in cases)
    assert all(f"{name}(" in programs for name in ON_DEVICES)


def test_every_loop_of_jax_is_tried():
    cases = [rescheduled_case(seed) for seed in range(200)]
    assert {case.rescheduled_at for case in cases} == {"call", "run", "whole"}
    programs = "\n".join(str(case.program) for case in cases)
    assert all(f"{name}(" in programs for name in (*NOTED, *CUSTOM, *BY_JAX_ON_DEVICES))
    assert "lax.while_loop(" in programs


def test_what_is_left_out_is_not_there():
    left_out = frozenset({"keeps", "vjp", "primal", "in_cond"})
    cases = [random_case(seed, left_out) for seed in range(100)]
    assert not {case.mode for case in cases} & left_out
    assert not {case.place for case in cases} & left_out
    assert not any(case.program.names() & left_out for case in cases)


def test_what_ends_the_process_is_not_judged():
    with pytest.raises(Skipped, match="would end the process"):
        judge(random_case(32000131))  # the gradient of a sort before a padded map


@pytest.mark.parametrize("seed", [*map(slow, (31000080, 31000124))])
def test_what_jax_refuses_in_shard_map_is_no_finding(seed):
    assert judge(random_case(seed)) is None


def test_a_search_that_is_ended_has_named_its_seed(capfd):
    def ends(case):
        raise SystemExit

    arguments = parser("").parse_args(["--from", "17"])
    with pytest.raises(SystemExit):
        search(arguments, random_case, ends)
    assert capfd.readouterr().err == "seed 17\r"


@pytest.fixture
def case():
    """A scan of `sin(h) * x`, with an operation that does nothing for its result."""
    real = Type("f")
    ops = (
        Op("sin", (0,), (real,)),
        Op("cube", (1,), (real,)),
        Op("mul", (2, 1), (real,)),
    )
    program = Scanned(
        inputs=(real, Type("f", (4,))),
        bodies=(Body((real, real), ops, (4,)),),
        transform=Transform("Scan", (("reverse", True), ("unroll", 2)), 4),
        trees=((0,), (0,), ()),
        x_axes=(0,),
    )
    return Case(
        seed=0,
        program=program,
        mode="grad",
        place="plain",
        vmap="inside",
        is_jitted=True,
        is_strict=False,
        precision=Precision(),
        width=2,
        differentiated=(0, 1),
        batched=(True, False),
        has_axis=False,
    )


def test_nothing_is_found_in_a_case_that_is_right(case):
    assert judge(case) is None


def test_a_wrong_number_is_found_and_its_program_made_smaller(case, monkeypatch):
    def loses_reverse(step, *, reverse=False, **settings):
        return _SCAN(step, **settings)

    monkeypatch.setattr(el, "Scan", loses_reverse)
    finding = judge(dataclasses.replace(case, mode="primal"))
    assert finding.kind == "other numbers: primal of Scan"
    small = shrink(finding).case
    assert (small.place, small.vmap) == ("plain", "none")
    assert small.program.transform.settings == (("reverse", True),)
    (body,) = small.program.bodies
    assert sorted(op.name for op in body.ops)[:2] == ["constant", "constant"]
    assert f"def f(v0: f, v1: f):\n    v2: f = {body.ops[0].name}(" in str(small)


def test_a_slope_of_another_function_is_found(case, monkeypatch):
    def stops(step, **settings):
        halved = lambda carry: jax.tree.map(lambda h: h / 2 + stopped(h) / 2, carry)
        return _SCAN(lambda carry, x: step(halved(carry), x), **settings)

    stopped = jax.lax.stop_gradient
    monkeypatch.setattr(el, "Scan", stops)
    settings = dict(mode="slopes", vmap="none")
    finding = judge_slopes(dataclasses.replace(case, **settings))
    assert finding.kind == "another slope: Scan"


def test_an_error_is_found(case, monkeypatch):
    def fails(step, **settings):
        raise RuntimeError("no scan 17")

    monkeypatch.setattr(el, "Scan", fails)
    assert judge(case).kind == "RuntimeError: no scan #"


def test_another_type_is_found(case, monkeypatch):
    def narrows(step, **settings):
        def run(init, xs, **keywords):
            (h,), ys = _SCAN(step, **settings)(init, xs, **keywords)
            return (h.astype(jnp.float32),), ys

        return run

    monkeypatch.setattr(el, "Scan", narrows)
    assert judge(dataclasses.replace(case, mode="primal")).kind == "another type"


def test_an_effect_that_is_repeated_is_found(case, monkeypatch):
    def twice(step, **settings):
        def again(carry, x):
            step(carry, x)
            return step(carry, x)

        return _SCAN(again, **settings)

    monkeypatch.setattr(el, "Scan", twice)
    (body,) = case.program.bodies
    for name in ("debug", "ordered"):
        noted = dataclasses.replace(body, ops=(*body.ops, Op(name, (0,), ())))
        program = dataclasses.replace(case.program, bodies=(noted,))
        settings = dict(program=program, mode="primal", place="plain", vmap="none")
        finding = judge(dataclasses.replace(case, **settings))
        assert finding.kind.endswith("ordered effects differ")


_SCAN = el.Scan
