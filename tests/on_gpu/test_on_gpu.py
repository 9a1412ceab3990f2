"""That the script for a lent GPU is right when there is one: all of it but the GPU."""

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
import pytest

import eqloop as el

from ..benchmarks import _problems as problems
from ..marks import slow
from . import _fitting, _packages, _page
from ._found import Found
from ._groups import GROUPS, Program, Unit, tiny
from ._processes import NotDone, Processes, Task
from ._rows import Row, load, merged, save
from ._unit import _Bench
from .stand_ins import FOR_EVER, MEASURES, work

ROOT = Path(__file__).parents[2]
ROW = Row("a device", "times", "a step", "a program")


def run(
    steps: Sequence[str], seconds: float = FOR_EVER, limit: float = FOR_EVER
) -> dict[str, list[Any]]:
    """What tasks of these names send."""
    tasks = [Task("a group", step, FOR_EVER) for step in steps]
    said: dict[str, list[Any]] = {step: [] for step in steps}
    end = time.monotonic() + seconds
    for task, one in Processes(work, workers=2, end=end, limit=limit).run(tasks):
        said[task.step].append(one)
    return said


def test_one_at_a_time_measures_while_others_stand_still():
    said = run(["crashes", "first", "second", "prepares"])
    assert said["crashes"] == [NotDone("its process ended with 3")]
    measured = [(start, end) for (_, start, end) in said["first"] + said["second"]]
    (_, first_ends), (second_starts, _) = sorted(measured)
    assert first_ends <= second_starts
    assert len(said["prepares"]) == 20
    for start, end in measured:
        within = [
            one for _, *one in said["prepares"] if start < one[0] and one[1] < end
        ]
        assert within == []


def test_it_ends_in_time_and_says_what_was_not_reached():
    start = time.monotonic()
    said = run(["hangs", "measures for ever", "first"], seconds=6.0, limit=1.0)
    assert time.monotonic() - start < 60
    assert said["hangs"] == [NotDone("time was over")]
    assert said["measures for ever"] == [NotDone("it took more than 1 seconds")]
    assert [kind for kind, *_ in said["first"]] == ["measured"]


def test_a_group_whose_time_is_over_waits_for_the_others():
    tasks = [Task("long", f"{i}", 0.5 * MEASURES) for i in range(3)]
    tasks.append(Task("other", "last", FOR_EVER))
    processes = Processes(
        work, workers=4, end=time.monotonic() + FOR_EVER, limit=FOR_EVER
    )
    order = [task.group for task, _ in processes.run(tasks)]
    assert sorted(order) == ["long"] * 3 + ["other"]
    assert order[-1] == "long"


def bench(*programs: Program) -> _Bench:
    """A few steps, as a unit."""
    unit = Unit("recurrent", lambda: problems.recurrent(16, 4), programs)
    return _Bench(unit, eqx.filter_eval_shape(unit.make), ROW)


def scanned(schedule: el.AbstractSchedule, name: str, **about: Any) -> Program:
    """The gradient of a scan."""
    run = lambda cell, init, xs: el.Scan(cell, schedule=schedule)(init, xs)
    return Program(name, lambda _: problems.gradient(run), is_planned=True, **about)


def test_a_unit_is_compiled_and_run_though_a_program_fails():
    whole = list[int]()

    def refused(nbytes: int) -> Any:
        whole.append(nbytes)
        raise ValueError("Budget: too little.")

    unit = bench(
        scanned(el.StoreAll(), "first"),
        Program("refused", refused),
        scanned(el.Chunked(4), "chunked"),
        scanned(el.Chunked(2), "crashes"),
        scanned(el.Chunked(2), "measured", is_measured=True),
    )
    prepared = dict[str, Row]()
    for made in unit.prepared(is_dry=False):
        prepared[made.row.name] = made.row
        if made.row.name == "crashes":
            made.compiled = lambda *_: 1 / 0
    assert list(prepared) == ["first", "refused", "chunked", "crashes"]
    assert whole == [prepared["first"].temp]
    assert prepared["chunked"].planned >= prepared["chunked"].temp > 0
    assert prepared["chunked"].evaluations > 16
    assert prepared["first"].kernels > 16
    assert set(prepared["first"].foreseen) == set(_fitting.PARTS)
    values = problems.recurrent(16, 4)
    rows = {made.row.name: made.row for made in unit.measured(values)}
    assert rows["refused"].wrong == "ValueError: Budget: too little."
    assert rows["crashes"].wrong == "ZeroDivisionError: division by zero"
    for name in ("first", "chunked", "measured"):
        assert len(rows[name].seconds) == 5
        assert rows[name].error <= 1e-5
        assert rows[name].wrong is None


def test_the_file_is_whole_and_keeps_what_was_measured(tmp_path: Path):
    file = tmp_path / "gpu.json"
    measured = dataclasses.replace(ROW, seconds=(1.0, 2.0), error=0.0, temp=8)
    other = dataclasses.replace(ROW, name="another", wrong="time was over")
    save({row.key: row for row in (measured, other)}, file)
    assert load(file) == {measured.key: measured, other.key: other}
    failed = dataclasses.replace(ROW, wrong="it crashed")
    newer = dataclasses.replace(measured, seconds=(3.0,))
    assert merged(load(file), [failed])[ROW.key] == measured
    assert merged(load(file), [newer])[ROW.key] == newer
    assert [one.name for one in tmp_path.iterdir()] == ["gpu.json"]


def test_each_program_of_a_unit_that_is_lost_is_told_of(tmp_path: Path, capsys: Any):
    file = tmp_path / "gpu.json"
    group, step = "times", "wave, 256 x 256"
    programs = next(u for u in GROUPS[group].units(tiny) if u.step == step).programs
    found = Found(tiny, file, time.monotonic())
    row = ROW.blank(group, step, programs[0].name)
    found.add(Task(group, step, 1.0), dataclasses.replace(row, seconds=(1.0,)))
    found.add(Task(group, step, 1.0), NotDone("its process ended with -9"))
    first, *others = load(file).values()
    assert first.seconds == (1.0,)
    assert first.wrong is None
    assert [row.name for row in others] == [one.name for one in programs[1:]]
    assert {row.wrong for row in others} == {"its process ended with -9"}


def test_names_tell_units_and_programs_from_others():
    for group in GROUPS.values():
        units = list(group.units(tiny))
        assert len({unit.step for unit in units}) == len(units)
        for unit in units:
            assert len({one.name for one in unit.programs}) == len(unit.programs)


def test_the_page_has_rates_that_fit_to_what_was_measured():
    draw = np.random.default_rng(0).uniform(0.1, 1.0, (40, 3))
    # A kernel takes twice as long to start as it should; bytes go four times as fast.
    rows = [
        dataclasses.replace(
            ROW,
            device="NVIDIA H100 80GB HBM3",
            name=f"program {i}",
            seconds=(2 * starts + nbytes / 4 + products,) * 5,
            foreseen=dict(zip(_fitting.PARTS, (starts, nbytes, products), strict=True)),
            temp=2**20,
        )
        for i, (starts, nbytes, products) in enumerate(draw)
    ]
    lost = dataclasses.replace(rows[0], name="lost", seconds=(), wrong="time was over")
    text = _page.text({row.key: row for row in (*rows, lost)})
    assert "| that fit best | 5.00 us | 13.40 TB/s | 495.00 Tflop/s | 1.00 x |" in text
    assert "| program 39 | " in text
    assert "`time was over`" in text


def test_a_page_without_figures_says_so():
    assert "None have been measured yet" in _page.text({ROW.key: ROW})


def test_budgets_are_compared_with_what_fits():
    row = functools.partial(dataclasses.replace, ROW, group="regret")
    rows = [
        row(name="`lax.scan`", temp=100, seconds=(4.0,)),
        row(name="Chunked(4)", temp=50, seconds=(2.0,)),
        row(name="Chunked(8)", temp=51, seconds=(1.0,)),
        row(name="Budget of 0.5, measured", temp=40, seconds=(3.0,)),
    ]
    assert "| 1.50, of 1 |" in _page.text({row.key: row for row in rows})


def test_packages_come_from_the_folder_if_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", path)
    _packages.find(tmp_path)
    assert str(tmp_path) not in path
    monkeypatch.setattr(_packages, "_is_there", lambda name, _: name != "beartype")
    _packages.find(tmp_path)
    assert path[0] == str(tmp_path)
    with pytest.raises(SystemExit, match="beartype: not here"):
        _packages.find(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("only", "match", "count"),
    [("offload", "copies", 1), slow("times", "wave*", 5), slow("fit", "*", 4)],
)
def test_the_command_runs_here(only: str, match: str, count: int, tmp_path: Path):
    options = "--here", "--only", only, "--match", match, "--out", str(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.on_gpu", *options],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = load(tmp_path / "gpu.json").values()
    assert len(rows) == count
    assert all(len(row.seconds) == 5 or row.wrong for row in rows), ran.stdout
