"""How optimised programs are read, the page, and a few cases of the weekly run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..elsewhere.compiler import is_installed
from ..on_gpu import _rows
from ..tables import FOLDER
from ._hlo import Optimised
from ._page import data_of, load, tables, text, times_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "on_a_gpu_and_a_tpu.md"

PROGRAM = """\
HloModule jit_f, is_scheduled=true

%stored (p0: f32[9,4], p1: f32[4], p2: s32[]) -> f32[9,4] {
  %p0 = f32[9,4]{1,0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  %row = f32[1,4]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[9,4]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%body (state: (s32[], f32[9,4])) -> (s32[], f32[9,4]) {
  %state = (s32[], f32[9,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[9,4]{1,0} get-tuple-element(%state), index=1
  %again = f32[9,4]{0,1} copy(%rows)
  %new = f32[9,4]{1,0} fusion(%rows, %i, %i), kind=kLoop, calls=%stored
  ROOT %out = (s32[], f32[9,4]{1,0}) tuple(%i, %new)
}

%cond (state: (s32[], f32[9,4])) -> pred[] {
  %state = (s32[], f32[9,4]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: f32[9,4]) -> f32[9,4] {
  %x = f32[9,4]{1,0} parameter(0)
  %start = ((f32[9,4]{1,0}), f32[9,4]{1,0}, u32[]) copy-start(%x)
  %done = f32[9,4]{1,0} copy-done(%start)
  %init = (s32[], f32[9,4]{1,0}) tuple(%x, %done)
  %loop = (s32[], f32[9,4]{1,0}) while(%init), condition=%cond, body=%body, TRIPS
  ROOT %result = f32[9,4]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize("trips", [9, 1, None])
def test_what_is_started_is_multiplied_out(trips):
    known = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    program = Optimised(PROGRAM.replace("TRIPS", known))
    assert [loop.trips for loop in program.loops()] == [trips]
    started = {one.instruction.op: one for one in program.started()}
    assert {op: one.times for op, one in started.items()} == {
        "copy-start": 1,
        "copy": trips or 1,
        "fusion": trips or 1,
    }
    assert {op for op, one in started.items() if one.is_in_loop} == (
        set() if trips == 1 else {"copy", "fusion"}
    )


def test_an_update_writes_its_rows_and_a_copy_all():
    program = Optimised(PROGRAM)
    written = {
        one.instruction.op: program.written(one.instruction)
        for one in program.started()
        if not one.instruction.op.endswith("-start")
    }
    assert written == {"copy": [9 * 4 * 4], "fusion": [4 * 4]}


def test_the_page_is_that_of_its_figures():
    results = load(data_of(PAGE))
    assert PAGE.read_text() == text(results, _rows.load(times_of(PAGE)))
    for name, data in tables(results).items():
        assert (FOLDER / name).read_text() == data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "group", "pattern"),
    [
        ("h100", "steps", "tanh: *"),
        ("h100", "ways", "tanh: Offload*"),
        ("v5e", "loops", "rows in the carry, Offload"),
        ("v5e", "ways", "tanh: Offload(Chunked(1)), *"),
    ],
)
def test_nothing_is_wrong(kind, group, pattern):
    if not is_installed(kind):
        pytest.skip(f"the compiler for {kind} is not installed: `eqloop[targets]`")
    arguments = "--kinds", kind, "--only", group, "--match", pattern
    ran = subprocess.run(
        [sys.executable, "-m", "tests.targets", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.startswith(kind)


@pytest.mark.slow
def test_what_is_run_is_right():
    options = "--run", "cpu", "--length", "16", "--only", "steps"
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.targets",
            *options,
            "--match",
            "lorenz: Chunked(*",
        ],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    lines = ran.stdout.splitlines()
    assert len(lines) == 3
    assert all("lorenz: Chunked(" in line and " off" in line for line in lines)
