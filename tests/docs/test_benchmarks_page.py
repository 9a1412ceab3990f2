"""The page of benchmarks, from figures that are made up, and from those that are kept.

Nothing is measured here.
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from tests.benchmarks import (
    _claims,
    _comparison,
    _gains,
    _h100,
    _headlines,
    _lines,
    _once,
    _page,
    _plots,
    _reasons,
    _report,
    _results,
)
from tests.benchmarks._machine import environment, watch
from tests.benchmarks._special_cases import SPECIAL_CASES
from tests.benchmarks.groups import GROUPS
from tests.tables import FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
KEPT = _results.load(_results.data_of(PAGE))
WHERE = _results.Environment("cpu", "a machine", "3.11", {"jax": "0.10.0"}, "abc")


def row(name="`lax.scan`", line="lax.scan", seconds=0.5, **changes):
    """A case that took half a second, which is nothing that was measured."""
    found = _results.Row(name, line, seconds, (0.4, 0.6), 1.5, 2_000_000, 0.0)
    return dataclasses.replace(found, **changes)


def outcome(*rows, **changes):
    """A comparison of these rows."""
    found = _results.Outcome("A title", 256, 5, 1e-4, rows or (row(),))
    return dataclasses.replace(found, **changes)


def record(*outcomes, busy=0.0, where=WHERE):
    """A group of these comparisons."""
    return _results.Record(where, "2026-01-02", busy, outcomes)


def test_the_page_is_what_its_figures_make():
    assert PAGE.read_text() == _page.text(KEPT)
    for name, data in _page.tables(KEPT).items():
        assert (FOLDER / name).read_text() == data


@pytest.mark.parametrize("page", _headlines.PAGES, ids=lambda page: page.name)
def test_the_first_figures_are_those_of_the_benchmarks(page):
    text = page.read_text()
    assert text == _headlines.with_figures(text, KEPT)
    with pytest.raises(ValueError, match="no place for its headline"):
        _headlines.with_figures("# A page", KEPT)


def test_the_table_of_gains_is_that_of_the_benchmarks():
    page = _gains.PAGE.read_text()
    assert page == _gains.with_gains(page, KEPT)


def test_gains_are_ratios_of_programs_without_a_special_case():
    """Their median and the greatest, of those programs that differ."""
    times = [("without short sums", 0.5), ("without short sums", 0.8)]
    outcomes = [
        outcome(
            row("as it is", evaluations=100),
            row(name, evaluations=150, temp_bytes=3_000_000),
            verdicts=(verdict(f"time, as it is over {name}", figure),),
        )
        for name, figure in times
    ]
    (line,) = _gains.text({"cpu": {"ablation": record(*outcomes)}}).splitlines()[2:]
    assert line == (
        "| short sums | 2 |  | 1.62 x, up to 2.00 x | 1.50 x, up to 1.50 x | "
        "1.50 x, up to 1.50 x |  |  |"
    )


@pytest.mark.parametrize("special", SPECIAL_CASES, ids=lambda special: special.name)
def test_a_special_case_is_switched_off_and_on_again(special):
    module = importlib.import_module(f"eqloop.{special.module}")
    *path, name = special.function.split(".")
    owner = getattr(module, path[0]) if path else module
    own = vars(owner)[name]
    with special.off():
        assert vars(owner)[name] is not own
    assert vars(owner)[name] is own


def test_kernels_of_a_loop_count_as_often_as_it_runs():
    text = """\
%body (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %y = f32[2]{0} fusion(%x), kind=kLoop, calls=%add
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %copied = f32[2]{0} copy(%x)
  ROOT %w = f32[2]{0} while(%copied), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""
    assert _h100.kernels_of(text) == 8
    assert _h100.kernels_of(text.replace("known_trip_count", "unknown")) == 2


def test_all_groups_are_on_the_page_with_their_pictures():
    # Seconds of first uses are shown once they were measured where nothing else runs.
    first_uses = {"importing", "tracing", "compiling", "planning"}
    assert set(KEPT["cpu"]) | first_uses == set(GROUPS)
    shown = re.findall(r"!\[.+\]\((.+)\)", PAGE.read_text())
    assert len(shown) == 1 + sum(map(len, _plots.PICTURES.values()))
    folder = PAGE.parent / "images" / "benchmarks"
    assert {PAGE.parent / path for path in shown} == set(folder.iterdir())


def test_figures_come_back_from_their_file(tmp_path):
    verdict = _results.Verdict("a claim", 1.25, 1.5, "x")
    found = outcome(verdicts=(verdict,), skipped=(("powerpax", "powerpax"),))
    results = {"cpu": {"length": record(found)}}
    _results.save(results, tmp_path / "results.json")
    assert _results.load(tmp_path / "results.json") == results
    assert _results.load(tmp_path / "none.json") == {}


def test_measuring_a_group_anew_leaves_the_others():
    old = {"cpu": {"length": record(), "maps": record()}}
    new = _results.merged(old, "maps", record(outcome()))
    assert new == {"cpu": {"length": record(), "maps": record(outcome())}}
    gpu = dataclasses.replace(WHERE, platform="gpu")
    both = _results.merged(old, "maps", record(where=gpu))
    assert both["cpu"] == old["cpu"]
    assert set(both["gpu"]) == {"maps"}
    newer = dataclasses.replace(WHERE, packages={"jax": "0.12.0"})
    apart = _results.merged(old, "maps", record(where=newer))
    assert apart["cpu"] == old["cpu"]
    assert set(apart["cpu, JAX 0.12"]) == {"maps"}


def test_the_newest_version_of_jax_comes_first():
    newer = dataclasses.replace(WHERE, packages={"jax": "0.12.0"})
    verdicts = verdict("a claim", 1.5), verdict("another", 0.5)
    found = record(outcome(row(seconds=0.7)), where=newer)
    old = record(outcome(row(), verdicts=verdicts))
    both = {"cells": old, "calls": record(outcome())}
    results = {"cpu": both, "cpu, JAX 0.12": {"cells": found}}
    text = _page.text(results)
    _, first = text.split("\n## On a CPU, with JAX 0.12\n")
    assert "*This was measured with JAX 0.10.*" in first
    _, missed = text.split("## Missed claims")
    assert "| A title | a claim | 1.5x | 1x |  |" in missed
    tables = _page.tables(results)
    rows = json.loads(tables["benchmarks.json"])["rows"]
    newest, *_ = rows
    assert newest[:5] == [
        "CPU, with JAX 0.12",
        "Recurrent cells",
        "A title",
        "`lax.scan`",
        "700 ms",
    ]
    assert [cells[0] for cells in rows[1:]] == ["CPU, with JAX 0.10"]
    claims = json.loads(tables["claims.json"])["rows"]
    assert [cells[3:] for cells in claims] == [
        ["a claim", "1.5x", "1x", "**misses**"],
        ["another", "0.5x", "1x", "holds"],
    ]


def test_a_section_says_what_disagrees_and_what_was_not_run():
    found = outcome(
        row(),
        row("wrong", error=0.5),
        skipped=(("a peer", "its package"),),
    )
    text = _report.section(found)
    assert "| `lax.scan` | 500 ms | 2.000 MB | 1.50 s | 0 |" in text
    assert "Medians of 5 runs." in text
    assert "do not compute what the first row does: wrong.**" in text
    assert "a peer (no its package)" in text
    assert not found.holds


def test_missed_claims_are_listed_at_the_end_and_not_folded_away():
    late = outcome(row(), verdicts=(verdict("a claim", 1.5), verdict("another", 0.5)))
    _, missed = _page.text({"cpu": {"cells": record(late)}}).split("## Missed claims")
    assert "| A title | a claim | 1.5x | 1x |  |" in missed
    assert "another" not in missed
    assert "1 of 2 claims hold" in missed
    held = outcome(row(), verdicts=(verdict("another", 0.5),))
    assert "| missed |" not in _page.text({"cpu": {"cells": record(held)}})


def test_every_claim_that_is_missed_has_its_reason():
    used = set()
    for place, groups in KEPT.items():
        version = _results.version_of(groups)
        for outcome in (one for record in groups.values() for one in record.outcomes):
            for missed in (v for v in outcome.verdicts if not v.holds):
                about = outcome.title, missed.text, version
                reasons = [one for one in _reasons.REASONS if one.is_for(*about)]
                assert len(reasons) == 1, (place, *about)
                used |= set(reasons)
    assert used == set(_reasons.REASONS)


def test_a_reason_is_shown_beside_the_claim(monkeypatch):
    reason = _reasons.Reason("A ti", "claim", "Because.", version="0.10")
    monkeypatch.setattr(_reasons, "REASONS", (reason,))
    late = outcome(row(), verdicts=(verdict("a claim", 1.5),))
    page = _page.text({"cpu": {"cells": record(late)}})
    assert "| A title | a claim | 1.5x | 1x | Because. |" in page
    assert not reason.is_for("A title", "a claim", "0.12")


def test_a_claim_is_missed_by_three_of_four_rounds():
    claim = _claims.Claim("a claim", lambda _: np.array([]), 1.0, "x", ())
    rounds = np.array([0.9, 1.0, 1.2, 1.3, 1.3])
    verdicts = [_comparison._verdict(claim, rounds + by) for by in (0.0, 0.01)]
    assert [one.holds for one in verdicts] == [True, False]
    assert _report.claim_cells(verdicts[0]) == (
        "a claim",
        "1.2x, 1 to 1.3",
        "1x",
        "holds",
    )
    once = _comparison._verdict(claim, 1.5)
    assert once.quartiles is None
    assert not once.holds


def test_claims_alone_are_measured_anew():
    """The rows stay, and so do the claims beside a peer that is not there now."""
    claims = verdict("time, ours", 2.0), verdict("time, ours over powerpax", 0.5)
    old = record(outcome(row(seconds=0.7), verdicts=claims))
    found = outcome(
        row(seconds=9.0),
        verdicts=(verdict("time, ours", 0.9),),
        skipped=(("powerpax", "powerpax"),),
    )
    (one,) = _results.with_claims(old, record(found)).outcomes
    assert one.rows == old.outcomes[0].rows
    assert [v.figure for v in one.verdicts] == [0.9, 0.5]
    assert one.claimed == "2026-01-02, commit `abc`"


def test_the_figures_are_of_special_cases_that_there_are():
    names = {f"without {special.name}" for special in SPECIAL_CASES}
    for groups in KEPT.values():
        for found in groups["ablation"].outcomes:
            assert {row.name for row in found.rows} <= {"as it is", *names}


def test_the_page_says_where_it_was_measured_and_what_was_not():
    one = _page.text({"cpu": {"modes": record(outcome()), "maps": record(outcome())}})
    assert one.count("- a machine\n") == 1
    assert one.index("### Maps in chunks") < one.index("## How this is measured")
    assert one.index("## How this is measured") < one.index("- a machine\n")
    assert "not quiet" not in one
    assert "There are no times yet" in one
    elsewhere = dataclasses.replace(WHERE, platform="gpu", machine="another")
    results = {
        "cpu": {"modes": record(outcome(), busy=1.5), "maps": record(outcome())},
        "gpu": {"modes": record(outcome(), where=elsewhere)},
    }
    two = _page.text(results)
    assert "up to 1.5 of its cores" in two
    assert "On a GPU, with JAX 0.10:\n\n- another" in two
    assert "There are no times yet" not in two


def test_dates_and_commits_of_groups_measured_apart():
    newer = dataclasses.replace(WHERE, commit="def", packages={"jax": "0.10.1"})
    others = record(where=dataclasses.replace(WHERE, commit="fed")), record()
    text = _report.environments([record(where=newer), *others])
    assert "- Python 3.11; jax 0.10.1\n- 1 group, 2026-01-02, at `def`" in text
    assert "- Python 3.11; jax 0.10.0\n- 2 groups, 2026-01-02, at `abc`, `fed`" in text


def test_what_two_groups_measure_is_shown_once():
    here, there = row(seconds=0.5), row(seconds=1.5)
    more = row("StoreAll()", "StoreAll()", seconds=0.7)
    groups = {
        "frontier": record(outcome(here)),
        "length": record(outcome(there), outcome(there, title="Another")),
        "recurrent": record(outcome(there, more)),
        "scaling": record(outcome(there, title="Compiled")),
    }
    shown = _once.shown(groups)
    rows = {name: [one.rows for one in ones] for name, ones in shown.items()}
    assert rows["frontier"] == [(here,)]
    assert rows["length"] == [(), (there,)]
    assert rows["recurrent"] == [(more,)]
    assert rows["scaling"] == [()]
    drawn = [one.outcome.rows for one in shown["length"]]
    assert drawn == [(here,), (there,)]
    figures = _page.tables({"cpu": groups})["benchmarks.json"]
    assert figures.count('"`lax.scan`", "500 ms"') == 1
    assert figures.count('"`lax.scan`", "1,500 ms"') == 1
    text = _page.text({"cpu": groups})
    assert (
        "The other figures are in [Time against memory](#time-against-memory)" in text
    )
    lines = list(_once.differing(groups))
    assert len(lines) == 2
    assert "length: A title: `lax.scan` took 1,500 ms, and 500 ms where" in lines[0]


def test_no_figure_on_the_page_is_there_twice():
    for groups in KEPT.values():
        tables = [
            (one.outcome.title, row.name)
            for ones in _once.shown(_page._in_order(groups)).values()
            for one in ones
            for row in one.rows
        ]
        assert len(tables) == len(set(tables))


def test_pictures_are_drawn_the_same_twice(tmp_path):
    rows = [row(line=line, seconds=0.1 * i) for i, line in enumerate(LINES, 1)]
    outcomes = [outcome(*rows, size=size) for size in (256, 1024)]
    for picture in (_plots.PICTURES["length"][0], _plots.PICTURES["frontier"][0]):
        first, second = _drawn_twice(picture, outcomes, tmp_path)
        assert first == second
        for line in LINES:
            assert f"<!-- {line} -->" in first


def _drawn_twice(picture, outcomes, folder):
    paths = [folder / f"{picture.name}{i}.svg" for i in (1, 2)]
    for path in paths:
        picture.save(outcomes, path)
    return [path.read_text() for path in paths]


def verdict(text, figure, at_most=1.0):
    """What a claim came to."""
    return _results.Verdict(text, figure, at_most, "x")


def strips(group, of):
    """Headings, labels and ratios that the picture of a group shows of an outcome."""
    (picture,) = _plots.PICTURES[group]
    return [
        (strip.heading, strip.label, [ratio for _, ratio in strip.dots])
        for strip in picture.strips(of)
    ]


CELL = outcome(
    row(),
    row("Recursive(16)", "Recursive(16)", seconds=0.75, temp_bytes=200_000),
    row("Budget(1234567)", "Budget", seconds=0.25, temp_bytes=1_000_000),
    title="Gradient of weights: a cell",
)
# Nothing else fits into the smaller budget, so nothing is claimed of its time.
BUDGETS = outcome(
    title="a step",
    verdicts=(
        verdict("temporary memory of Budget(9)", 0.5, 9.0),
        verdict("time, Budget(9) over the fastest of the others that fit", 1.25),
        verdict("temporary memory of Budget(2)", 0.5, 2.0),
    ),
)
SOLVE = outcome(
    title="An equation: the end saved",
    verdicts=(verdict("time, ours", 0.5), verdict("temporary memory, ours", 1.5)),
)


def test_what_pictures_of_ratios_show():
    assert strips("cells", CELL) == [
        ("a cell", "Recursive(16)", [1.5, 0.1]),
        ("a cell", "Budget, 1.2 MB", [0.5, 0.5]),
    ]
    assert strips("regret", BUDGETS) == [("a step", "", [1.25])]
    nothing_fits = dataclasses.replace(BUDGETS, verdicts=BUDGETS.verdicts[2:])
    assert strips("regret", nothing_fits) == []
    assert strips("diffrax", SOLVE) == [("An equation", "the end", [0.5, 1.5])]


@pytest.mark.parametrize(
    ("group", "of", "words"),
    [
        ("cells", CELL, ["a cell", "Budget, 1.2 MB", "memory"]),
        ("regret", BUDGETS, ["a step", "1 x"]),
        ("diffrax", SOLVE, ["An equation", "the end", "time"]),
    ],
)
def test_pictures_of_ratios_are_drawn_the_same_twice(tmp_path, group, of, words):
    (picture,) = _plots.PICTURES[group]
    first, second = _drawn_twice(picture, [of], tmp_path)
    assert first == second
    for word in words:
        assert f"<!-- {word} -->" in first


LINES = ("lax.scan", "by hand", "Equinox", "Recursive(16)", "Budget")


@pytest.mark.parametrize(
    "heights", [[0.1, 0.5, 0.9], [0.5, 0.5, 0.5], [0.0, 0.01, 0.3, 0.31, 0.32]]
)
def test_labels_are_spread(heights):
    moved = _lines._spread(heights, gap=0.1)
    assert np.all(np.diff(moved) > 0.1 - 1e-9)
    assert np.mean(moved) == pytest.approx(np.mean(heights))


def test_units():
    ticks = [_plots.seconds(value) for value in (1e-5, 1e-3, 0.1, 10.0)]
    assert ticks == ["10 µs", "1 ms", "100 ms", "10 s"]
    ticks = [_plots.nbytes(value) for value in (100, 1e4, 1e6, 1e9)]
    assert ticks == ["100 B", "10 kB", "1 MB", "1 GB"]
    assert _report.milliseconds(0.0098765) == "9.88 ms"
    assert _report.milliseconds(1.2345) == "1,234 ms"


def test_the_machine_is_described():
    elsewhere = watch()
    found = environment()
    assert {"eqloop", "jax", "equinox"} <= set(found.packages)
    assert found.machine
    assert re.fullmatch("unknown|[0-9a-f]{12}(-dirty)?", found.commit)
    busy = elsewhere()
    assert busy is None or busy >= 0
