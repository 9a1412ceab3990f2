"""The table: what each place makes of each operation."""

import collections
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .case import Case
from .judging import judge
from .places import PLACES, Expected, RefusedError

# So many cases are compiled together.
_TOGETHER = 24


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a place makes of a case: `right`, `refused`, `wrong`, or an `error`."""

    case: Case
    place: str
    kind: str
    why: str = ""


def outcomes(
    cases: Sequence[Case], places: Sequence[str], together: int = _TOGETHER
) -> Iterator[Outcome]:
    """What each of some places makes of each case."""
    for start in range(0, len(cases), together):
        expected = Expected(cases[start : start + together])
        some = expected.cases
        for place in places if some else []:
            yield from _outcomes(place, expected, some)


def _outcomes(
    place: str, expected: Expected, cases: Sequence[Case]
) -> Iterator[Outcome]:
    run: Callable[..., Any] = PLACES[place]
    try:
        found = run(expected, cases)
    except Exception as e:
        if len(cases) > 1:  # one of them: its half is looked at again
            half = len(cases) // 2
            yield from _outcomes(place, expected, cases[:half])
            yield from _outcomes(place, expected, cases[half:])
            return
        (case,) = cases
        if isinstance(e, RefusedError):
            yield Outcome(case, place, "refused", str(e))
        else:
            where = traceback.extract_tb(e.__traceback__)[-1]
            why = f"{type(e).__name__}: {e} ({where.filename}:{where.lineno})"
            yield Outcome(case, place, "error", why)
        return
    for case, pairs in zip(cases, found, strict=True):
        if not pairs:
            yield Outcome(case, place, "refused", "no rows")
            continue
        said = (judge(case, *pair) for pair in pairs)
        why = next((each for each in said if each), None)
        yield Outcome(case, place, "wrong" if why else "right", why or "")


def lines_of(found: Sequence[Outcome], places: Sequence[str]) -> Iterator[str]:
    """The table of operations by places: how many cases are right, and what not."""
    cells = collections.defaultdict[tuple[str, str], collections.Counter[str]](
        collections.Counter
    )
    for one in found:
        cells[one.case.operation, one.place][one.kind] += 1
    width = max([len(one.case.operation) for one in found], default=0) + 2
    yield "".ljust(width) + "".join(place.rjust(14) for place in places)
    for operation in sorted({one.case.operation for one in found}):
        line = operation.ljust(width)
        for place in places:
            count = cells[operation, place]
            marks = {"right": "", "refused": "-", "wrong": "!", "error": "?"}
            text = " ".join(f"{count[k]}{m}" for k, m in marks.items() if count[k])
            line += text.rjust(14)
        yield line
    yield "n: right, n-: refused, n!: wrong, n?: another error"
