"""Comparisons and their circumstances as Markdown."""

from collections.abc import Iterable, Sequence

from ._reasons import reason_for
from ._results import Environment, Outcome, Row, Verdict

# So many claims stand in the open; more are folded away.
_CLAIMS_SHOWN = 3


def environment(of: Environment) -> str:
    """The machine, the versions and the commit, as a list."""
    packages = ", ".join(f"{name} {version}" for name, version in of.packages.items())
    return "\n".join(
        (
            f"- {of.machine}",
            f"- Python {of.python}; {packages}",
            f"- commit `{of.commit}`",
        )
    )


def section(
    outcome: Outcome, rows: Sequence[Row] | None = None, elsewhere: Sequence[str] = ()
) -> str:
    """One comparison: its title, a table of its rows, and what came of its claims.

    Args:
        outcome: The comparison.
        rows: The rows of the table; by default all that there are.
        elsewhere: The titles of the sections that have the others.
    """
    rows = outcome.rows if rows is None else rows
    parts = [f"**{outcome.title}**"]
    if rows:
        header = ("", "time", "temporary memory", "trace and compile", "difference")
        parts.append(table(header, [(row.name, *_cells(row)) for row in rows]))
        once = outcome.rounds == 1
        parts.append("One run." if once else f"Medians of {outcome.rounds} runs.")
    if elsewhere:
        which = "The other figures" if rows else "The figures"
        parts.append(f"{which} are in {', '.join(map(_link, elsewhere))}.")
    if outcome.skipped:
        names = ", ".join(f"{name} (no {package})" for name, package in outcome.skipped)
        parts.append(f"Not run, see the extra `bench`: {names}.")
    if outcome.disagreeing:
        names = ", ".join(outcome.disagreeing)
        parts.append(f"**These do not compute what the first row does: {names}.**")
    if outcome.verdicts:
        parts.append(_claims(outcome.verdicts))
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


def _cells(row: Row) -> tuple[str, ...]:
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


def _claims(verdicts: Sequence[Verdict]) -> str:
    """A table of the claims; where they are many, those that hold are folded away."""
    if len(verdicts) <= _CLAIMS_SHOWN:
        return _claim_table(verdicts)
    missed = [verdict for verdict in verdicts if not verdict.holds]
    held = [verdict for verdict in verdicts if verdict.holds]
    summary = f"{len(held)} of {len(verdicts)} claims hold"
    parts = [_claim_table(missed)] if missed else []
    return "\n\n".join([*parts, folded(summary, _claim_table(held))])


def missed(outcomes: Iterable[Outcome], version: str) -> str:
    """A table of the claims that comparisons miss; nothing if they miss none.

    Args:
        outcomes: The comparisons.
        version: That of JAX.
    """
    rows = [
        (*row, reason_for(*row[:2], version))
        for row in _titled_claims(outcomes, hold=False)
    ]
    header = ("missed", "claim", "measured", "at most", "why")
    return table(header, rows) if rows else ""


def held_claims(outcomes: Sequence[Outcome]) -> str:
    """The claims of comparisons that hold, folded away."""
    rows = _titled_claims(outcomes, hold=True)
    count = sum(len(outcome.verdicts) for outcome in outcomes)
    held = table(("holds", "claim", "measured", "at most"), rows)
    return folded(f"{len(rows)} of {count} claims hold", held)


def _titled_claims(outcomes: Iterable[Outcome], hold: bool) -> list[tuple[str, ...]]:
    """The claims that hold, or the others, each with the title of its comparison."""
    return [
        (outcome.title, *_claim_cells(verdict)[:-1])
        for outcome in outcomes
        for verdict in outcome.verdicts
        if verdict.holds == hold
    ]


def _claim_table(verdicts: Sequence[Verdict]) -> str:
    header = ("claim", "measured", "at most", "")
    return table(header, [_claim_cells(verdict) for verdict in verdicts])


def _claim_cells(verdict: Verdict) -> tuple[str, ...]:
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
