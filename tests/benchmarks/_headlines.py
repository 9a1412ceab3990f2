"""The figures of the README and of the front page, which are those of the benchmarks.

A page has a headline and a table, each between two comments. `python -m
tests.benchmarks --write` fills them in, and a test compares them.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

from ._once import shown
from ._report import table
from ._results import Outcome, Record, Results, Row, Verdict, places

_ROOT = Path(__file__).parents[2]
PAGES = (_ROOT / "README.md", _ROOT / "docs" / "index.md")
_BLOCK = r"(?<=<!-- {0}: start -->\n).*(?=<!-- {0}: end -->)"

_PLAIN = "`lax.scan`"
_OF_REMAT = "`lax.scan`, `jax.checkpoint` on the step"


@dataclasses.dataclass(frozen=True)
class Headline:
    """A loop of the benchmarks, by `lax.scan`, `jax.checkpoint`, and eqloop.

    Attributes:
        loop: What the page calls it.
        group: The group of benchmarks that has it.
        title: The title of its comparison.
        ours: The row of eqloop.
        schedule: How one writes that row's schedule.
    """

    loop: str
    group: str
    title: str
    ours: str
    schedule: str

    def rows(self, groups: Mapping[str, Record]) -> tuple[Row, Row, Row]:
        """What `lax.scan` took, the same of a checkpointed step, and eqloop."""
        rows = {row.name: row for row in self._outcome(groups).rows}
        return rows[_PLAIN], rows[_OF_REMAT], rows[self.ours]

    def times(self, groups: Mapping[str, Record]) -> float:
        """How many times as long as `lax.scan` eqloop takes, by the times beside it."""
        theirs, _, ours = self.rows(groups)
        return ours.seconds / theirs.seconds

    def _outcome(self, groups: Mapping[str, Record]) -> Outcome:
        outcomes = [one.outcome for one in shown(groups)[self.group]]
        (found,) = (outcome for outcome in outcomes if outcome.title == self.title)
        return found


FIRST = Headline(
    "the loop above",
    "gigabytes",
    "Gradient of the weights: 32 sequences of 10,000 steps, GRU of width 256",
    "Budget('256MiB')",
    'Budget("256MiB")',
)
# What the picture calls it.
ELSEWHERE = "the loop of the front page"
OTHERS = (
    Headline(
        "a light recurrent step, 65,536 times",
        "length",
        "Gradient of W, h0 and xs: recurrent step, 65536 steps, width 64",
        "Budget('1MiB')",
        'Budget("1MiB")',
    ),
    Headline(
        "4 LSTMs of width 512, 200 steps",
        "cells",
        "Gradient of weights, h0 and xs: 4 LSTMs of width 512, 200 steps",
        "Chunked(200, 32)",
        "Chunked(200, batch=32)",
    ),
    Headline(
        "a wave on a 256 x 256 grid, 256 steps",
        "heavy",
        "Gradient of speed, fields and source: wave equation, 256 x 256, 256 steps",
        "Recursive(16)",
        "Recursive(16)",
    ),
    Headline(
        "a convolutional LSTM, 30 steps",
        "convolutions",
        "Gradient of all inputs: convolutional LSTM, 30 steps",
        "Recursive(8)",
        "Recursive(8)",
    ),
    Headline(
        "a loop that fills an array, 64,000 steps",
        "buffers",
        "Gradient of h0 and xs: a row written at each of 64000 steps",
        "Recursive(16)",
        "Recursive(16)",
    ),
)


def with_figures(page: str, results: Results) -> str:
    """A page, with these figures between its comments.

    Raises:
        ValueError: If the page has no such comments.
    """
    newest = results[places(results, "cpu")[0]]
    page = filled(page, "headline", headline(newest))
    return filled(page, "figures", figures(results))


def filled(page: str, name: str, written: str) -> str:
    """A page with a text between its two comments of this name.

    Raises:
        ValueError: If the page has no such comments.
    """
    block = re.compile(_BLOCK.format(name), re.DOTALL)
    page, count = block.subn(lambda _: written, page)
    if count != 1:
        raise ValueError(f"the page has no place for its {name}")
    return page


def headline(groups: Mapping[str, Record]) -> str:
    """The sentence for the first screen."""
    theirs, _, ours = FIRST.rows(groups)
    machine = groups[FIRST.group].environment.machine
    return (
        f"A GRU over 10,000 steps, with `{FIRST.schedule}`, on a CPU ({machine}): "
        f"**{_nbytes(theirs.temp_bytes)} with `jax.lax.scan`, "
        f"{_nbytes(ours.temp_bytes)} with eqloop, in "
        f"{100 * FIRST.times(groups):.0f}% of the time.**\n"
    )


def has_headlines(results: Results) -> bool:
    """Whether the loops of the front page were measured."""
    needed = {one.group for one in (FIRST, *OTHERS)}
    return any(needed <= groups.keys() for groups in results.values())


def figures(results: Results) -> str:
    """The table, and where it was measured."""
    newest = results[places(results, "cpu")[0]]
    return f"{_circumstances(newest)}\n{_table(newest)}"


def in_pictures(results: Results) -> list[Outcome]:
    """The loops of the table, each with the rows of `lax.scan` and of eqloop."""
    groups = results[places(results, "cpu")[0]]
    found: list[Outcome] = []
    for one in (FIRST, *OTHERS):
        theirs, _, ours = one.rows(groups)
        name = ELSEWHERE if one is FIRST else one.loop
        time = Verdict("time", one.times(groups), 1.0, "x")
        rows = theirs, ours
        found.append(Outcome(name, None, 1, 0.0, rows, verdicts=(time,)))
    return found


def _circumstances(groups: Mapping[str, Record]) -> str:
    where = groups[FIRST.group].environment
    jax = where.packages["jax"]
    return f"On a CPU ({where.machine}), with JAX {jax}:\n"


def _table(groups: Mapping[str, Record]) -> str:
    header = (
        "gradient of",
        "`jax.lax.scan`",
        "with `jax.checkpoint` on the step",
        "eqloop",
        "memory",
        "time",
        "schedule",
    )
    rows = [_cells(one, groups) for one in (FIRST, *OTHERS)]
    return f"{table(header, rows)}\n"


def _cells(headline: Headline, groups: Mapping[str, Record]) -> tuple[str, ...]:
    theirs, remat, ours = headline.rows(groups)
    smaller = theirs.temp_bytes / ours.temp_bytes
    return (
        headline.loop,
        _took(theirs),
        _took(remat),
        _took(ours),
        f"1/{smaller:.1f}" if smaller < 10 else f"1/{round(smaller):,}",
        f"{headline.times(groups):.2f} x",
        f"`{headline.schedule}`",
    )


def _took(row: Row) -> str:
    return f"{_nbytes(row.temp_bytes)}, {_seconds(row.seconds)}"


def _nbytes(count: int) -> str:
    """Bytes, to two or three digits."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            # The figures of claims are kept with five digits, and shown with three.
            return f"{float(f'{count / unit:.5g}'):.3g} {name}"
    return f"{count} B"


def _seconds(seconds: float) -> str:
    """A duration, to two digits."""
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
