"""One figure for one problem, though several groups measure it.

Groups run the same loops, each beside other ones: a ratio is one of two times that were
taken in turn. The page shows the figures of a loop once, in the first group that has
them. The groups that follow refer to it, and pictures draw the figures that are shown.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from ._report import milliseconds
from ._results import Outcome, Record, Row
from .groups import GROUPS

# Times of one program in two groups that differ by more are worth a look.
_ALIKE = 1.25


@dataclasses.dataclass(frozen=True)
class Shown:
    """A comparison as it is shown.

    Attributes:
        outcome: The comparison, with the figures that are shown of each row.
        rows: The rows of its table: those that no group before it has.
        elsewhere: The titles of the groups that have the others.
    """

    outcome: Outcome
    rows: tuple[Row, ...]
    elsewhere: tuple[str, ...]


def shown(groups: Mapping[str, Record]) -> Mapping[str, Sequence[Shown]]:
    """The comparisons of all groups, which are in the order of the page."""
    first: dict[tuple[str, str], tuple[str, Row]] = {}
    return {
        name: [_shown(name, outcome, first) for outcome in record.outcomes]
        for name, record in groups.items()
    }


def _shown(
    group: str, outcome: Outcome, first: dict[tuple[str, str], tuple[str, Row]]
) -> Shown:
    if (other := GROUPS[group].figures_in) is not None:
        return Shown(outcome, (), (GROUPS[other].title,))
    of_rows = [
        first.setdefault((outcome.title, row.name), (group, row))
        for row in outcome.rows
    ]
    others = dict.fromkeys(name for name, _ in of_rows if name != group)
    return Shown(
        dataclasses.replace(outcome, rows=tuple(row for _, row in of_rows)),
        tuple(row for name, row in of_rows if name == group),
        tuple(GROUPS[name].title for name in others),
    )


def differing(groups: Mapping[str, Record]) -> Iterator[str]:
    """What one group measured, and another one quite differently."""
    for name, comparisons in shown(groups).items():
        for one, measured in zip(comparisons, groups[name].outcomes, strict=True):
            for row, again in zip(one.outcome.rows, measured.rows, strict=True):
                low, high = sorted((row.seconds, again.seconds))
                if high > _ALIKE * low:
                    yield (
                        f"{name}: {measured.title}: {row.name} took "
                        f"{milliseconds(again.seconds)}, and "
                        f"{milliseconds(row.seconds)} where it is shown"
                    )
