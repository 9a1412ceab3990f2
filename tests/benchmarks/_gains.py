"""What the special cases gain: the table of `docs/how_plans_are_made.md`.

It stands between two comments there. `python -m tests.benchmarks --write` fills it in,
and a test compares it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ._headlines import filled
from ._report import table
from ._results import Outcome, Results, Row
from ._special_cases import AS_IT_IS, SPECIAL_CASES

PAGE = Path(__file__).parents[2] / "docs" / "how_plans_are_made.md"
_GROUP = "ablation"

_HEADER = (
    "without",
    "programs that differ",
    "time",
    "with JAX 0.10",
    "memory",
    "evaluations",
    "kernels on an H100",
    "memory there",
)


def with_gains(page: str, results: Results) -> str:
    """The page, with the table between its comments."""
    return filled(page, "gains", f"{text(results)}\n")


def text(results: Results) -> str:
    """The table: for each special case the median of the ratios, and the greatest."""
    newer, older = (_outcomes(results, place) for place in ("cpu, JAX 0.12", "cpu"))
    rows = list[Sequence[str]]()
    for special in SPECIAL_CASES:
        name = f"without {special.name}"
        pairs, others = list(_pairs(newer, name)), list(_pairs(older, name))
        if not pairs and not others:
            continue
        ratios = (
            _of_rows(pairs or others, lambda row: row.temp_bytes),
            _of_rows(pairs or others, lambda row: row.evaluations),
            _of_rows(pairs + others, lambda row: row.kernels),
            _of_rows(pairs + others, lambda row: row.h100_bytes),
        )
        rows.append(
            (
                special.name,
                str(max(len(pairs), len(others))),
                _spelled(_times(newer, name)),
                _spelled(_times(older, name)),
                *map(_spelled, ratios),
            )
        )
    return table(_HEADER, rows)


def _outcomes(results: Results, place: str) -> Sequence[Outcome]:
    record = results.get(place, {}).get(_GROUP)
    return record.outcomes if record else ()


def _pairs(outcomes: Sequence[Outcome], name: str) -> Iterator[tuple[Row, Row]]:
    """The rows with and without a special case."""
    for outcome in outcomes:
        rows = {row.name: row for row in outcome.rows}
        if name in rows:
            yield rows[AS_IT_IS], rows[name]


def _times(outcomes: Sequence[Outcome], name: str) -> list[float]:
    """How many times as long it takes without it: medians of ratios within a round."""
    claim = f"time, {AS_IT_IS} over {name}"
    verdicts = [verdict for outcome in outcomes for verdict in outcome.verdicts]
    return [1 / verdict.figure for verdict in verdicts if verdict.text == claim]


def _of_rows(
    pairs: Sequence[tuple[Row, Row]], figure: Callable[[Row], int | None]
) -> list[float]:
    """The ratios of one figure, where both rows have it."""
    figures = [(figure(own), figure(without)) for own, without in pairs]
    return [without / own for own, without in figures if own and without is not None]


def _spelled(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} x, up to {max(ratios):.2f} x"
