"""Makes a finding smaller: whatever can be left out of its case is."""

import dataclasses
from collections.abc import Callable, Iterator

from .bodies import Body, Op
from .cases import Case
from .judging import Finding, Skipped, judge
from .modes import SLOPES
from .transforms import Transform

_MOST = 60
# A slope is one along all inputs.
_ALL_INPUTS = frozenset(mode.__name__ for mode in SLOPES)


Judge = Callable[[Case], Finding | None]


def shrink(finding: Finding, judge: Judge = judge) -> Finding:
    """The same kind of finding of a smaller case, by whoever found it."""
    tries = 0
    is_smaller = True
    while is_smaller and tries < _MOST:
        is_smaller = False
        for case in _smaller(finding.case):
            tries += 1
            again = _again(case, finding.kind, judge)
            if again is not None:
                finding, is_smaller = again, True
                break
            if tries >= _MOST:
                break
    return finding


def _again(case: Case, kind: str, judge: Judge) -> Finding | None:
    try:
        finding = judge(case)
    except Skipped:
        return None
    return finding if finding is not None and finding.kind == kind else None


def _smaller(case: Case) -> Iterator[Case]:
    replace = dataclasses.replace
    if case.place != "plain":
        yield replace(case, place="plain")
    if case.vmap != "none" and not case.has_axis:
        yield replace(case, vmap="none")
    if case.scalars:
        yield replace(case, scalars=())
    if case.is_strict:
        yield replace(case, is_strict=False)
    if case.setting != "none":
        yield replace(case, setting="none")
    if case.is_spread:
        yield replace(case, is_spread=False)
    if len(case.differentiated) > 1 and case.mode not in _ALL_INPUTS:
        for i in range(len(case.differentiated)):
            left = case.differentiated[:i] + case.differentiated[i + 1 :]
            yield replace(case, differentiated=left)
    if case.rescheduled is not None:
        if case.rescheduled_at != "call":
            yield replace(case, rescheduled_at="call")
        for less in _fewer_settings(case.rescheduled):
            yield replace(case, rescheduled=less)
    program = case.program
    for at, body in enumerate(program.bodies):
        for less in _less(body):
            bodies = (*program.bodies[:at], less, *program.bodies[at + 1 :])
            yield replace(case, program=replace(program, bodies=bodies))
    for transform in _fewer_settings(program.transform):
        yield replace(case, program=replace(program, transform=transform))


def _fewer_settings(transform: Transform) -> Iterator[Transform]:
    for i in range(len(transform.settings)):
        left = transform.settings[:i] + transform.settings[i + 1 :]
        yield dataclasses.replace(transform, settings=left)


def _less(body: Body) -> Iterator[Body]:
    """The body with one of its operations left out, or with a smaller one."""
    for at in reversed(range(len(body.ops))):
        op = body.ops[at]
        if op.name == "constant":
            continue
        given = tuple(Op("constant", (), (type,)) for type in op.results)
        ops = (*body.ops[:at], *given, *body.ops[at + 1 :])
        yield dataclasses.replace(body, ops=ops)
        for i, inner in enumerate(op.bodies):
            for less in _less(inner):
                bodies = (*op.bodies[:i], less, *op.bodies[i + 1 :])
                smaller = dataclasses.replace(op, bodies=bodies)
                ops = (*body.ops[:at], smaller, *body.ops[at + 1 :])
                yield dataclasses.replace(body, ops=ops)
