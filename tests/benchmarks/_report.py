"""Comparisons and their circumstances as Markdown."""

from collections.abc import Iterable, Sequence

from ._reasons import reason_for
from ._results import Environment, Outcome, Record, Row, Verdict

CELLS = ("time", "temporary memory", "trace and compile", "difference")
CLAIM_CELLS = ("claim", "measured", "at most", "")


def environments(records: Iterable[Record]) -> str:
    """The machines and versions that records are of, and when they were measured."""
    where = dict[str, list[Record]]()
    for record in records:
        where.setdefault(environment(record.environment), []).append(record)
    return "\n\n".join(
        f"{text}\n{_when(found, len(where) > 1)}" for text, found in where.items()
    )


def _when(records: Sequence[Record], has_others: bool) -> str:
    """The dates and commits of records."""
    dates = sorted({record.date for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    plural = "s" if len(records) > 1 else ""
    count = f"{len(records)} group{plural}, " if has_others else ""
    commits = sorted({f"`{record.environment.commit}`" for record in records})
    return f"- {count}{when}, at {', '.join(commits)}"


def environment(of: Environment) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in of.packages.items())
    return f"- {of.machine}\n- Python {of.python}; {packages}"


def section(
    outcome: Outcome, rows: Sequence[Row] | None = None, elsewhere: Sequence[str] = ()
) -> str:
    """One comparison: its title, and a table of its rows.

    Args:
        outcome: The comparison.
        rows: The rows of the table; by default all that there are.
        elsewhere: The titles of the sections that have the others.
    """
    rows = outcome.rows if rows is None else rows
    parts = [f"**{outcome.title}**"]
    if rows:
        parts.append(table(("", *CELLS), [(row.name, *cells(row)) for row in rows]))
        once = outcome.rounds == 1
        parts.append("One run." if once else f"Medians of {outcome.rounds} runs.")
    elif not outcome.rows:
        parts.append(table(CLAIM_CELLS, map(claim_cells, outcome.verdicts)))
    if elsewhere:
        which = "The other figures" if rows else "The figures"
        parts.append(f"{which} are in {', '.join(map(_link, elsewhere))}.")
    if outcome.skipped:
        names = ", ".join(f"{name} (no {package})" for name, package in outcome.skipped)
        parts.append(f"Not run: {names}.")
    if outcome.disagreeing:
        names = ", ".join(outcome.disagreeing)
        parts.append(f"**These do not compute what the first row does: {names}.**")
    return "\n\n".join(parts) + "\n"


def _link(title: str) -> str:
    """A link to a section of the page."""
    return f"[{title}](#{title.lower().replace(',', '').replace(' ', '-')})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def folded(summary: str, text: str) -> str:
    """Text that is shown when its summary is clicked."""
    start = f'<details markdown="1">\n<summary>{summary}</summary>'
    return f"{start}\n\n{text.rstrip()}\n\n</details>"


def cells(row: Row) -> tuple[str, ...]:
    """The figures of a row, as `CELLS` names them."""
    return (
        milliseconds(row.seconds),
        f"{row.temp_bytes / 1e6:.3f} MB",
        f"{row.compile_seconds:.2f} s",
        f"{row.error:.0e}" if row.error else "0",
    )


def milliseconds(seconds: float) -> str:
    """A duration, to three digits and no finer than a microsecond."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def missed(outcomes: Iterable[Outcome], version: str) -> str:
    """A table of the claims that comparisons miss; nothing if they miss none.

    Args:
        outcomes: The comparisons.
        version: That of JAX.
    """
    rows = [
        (*claim, reason_for(*claim[:2], version))
        for outcome in outcomes
        for verdict in outcome.verdicts
        if not verdict.holds
        for claim in [(outcome.title, *claim_cells(verdict)[:-1])]
    ]
    header = ("missed", "claim", "measured", "at most", "why")
    return table(header, rows) if rows else ""


def claim_cells(verdict: Verdict) -> tuple[str, ...]:
    """What came of a claim, as `CLAIM_CELLS` names it."""
    return (
        verdict.text,
        _measured(verdict),
        f"{verdict.at_most:.3g}{verdict.unit}",
        "holds" if verdict.holds else "**misses**",
    )


def _measured(verdict: Verdict) -> str:
    """The median of the rounds, and between which bounds half of them are."""
    text = f"{verdict.figure:.3g}{verdict.unit}"
    if verdict.quartiles is None:
        return text
    low, high = (f"{each:.3g}" for each in verdict.quartiles)
    return text if low == high else f"{text}, {low} to {high}"
