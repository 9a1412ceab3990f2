"""Memory on devices that are not here, and what their host computes: nothing."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from eqloop._compat import HAS_MOSAIC_GPU

from ..marks import slow
from .compiler import is_installed

ROOT = pathlib.Path(__file__).parents[2]


def found(kind: str, *args: object) -> dict[str, dict[str, Any]]:
    """What `python -m tests.elsewhere` prints, by case."""
    if not is_installed(kind):
        pytest.skip(f"the compiler for {kind} is not installed: `eqloop[targets]`")
    # Nobody is warned of a backend of Pallas that will be removed.
    strict = "-W", "error:The Pallas Triton backend"
    ran = subprocess.run(
        [sys.executable, *strict, "-m", "tests.elsewhere", kind, *map(str, args)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    lines = map(json.loads, ran.stdout.splitlines())
    return {line.pop("case"): line for line in lines}


@pytest.mark.parametrize("kind", ["h100", slow("v5e")])
def test_no_host_computes_where_slots_are_on_it(kind):
    cases = found(kind)
    assert cases
    assert [name for name, case in cases.items() if case["computes_on_host"]] == []
    # They are there once, and in the same memory for each of three examples.
    for name, case in cases.items():
        order, how = name.split(": ")
        if how == "vmap of grad":
            joint = cases[f"{order}: grad of vmap"]
            assert 0 < case["host"] <= joint["host"] + 1024


BUDGETS = [("h100", "lorenz", 60_000)]
BUDGETS += [
    slow(kind, loop, size)
    for kind, more in (("h100", 0), ("v5e", 800_000))
    for loop, sizes in {
        "lorenz": (20_000, 600_000),
        "wave": (600_000, 3_000_000),
        "tanh": (100_000, 700_000),
        "gru": (200_000, 800_000),
    }.items()
    for size in (size + more for size in sizes)
]


@pytest.mark.parametrize(("kind", "loop", "nbytes"), BUDGETS)
def test_a_budget_is_kept_elsewhere(kind, loop, nbytes):
    # What fits for all inputs is not refused for some of them.
    cases = found(kind, loop, nbytes)
    assert len(cases) == (2 if loop == "lorenz" else 3)
    for case in cases.values():
        assert case["temp"] <= case["planned"] <= nbytes
        if loop == "lorenz":  # whose `xs` have no influence
            assert case["temp"] <= case["shown"]


@pytest.mark.slow
def test_a_fit_uses_the_host_and_kernels():
    cases = found("h100", "fit")
    # A loop of many rows is one kernel.
    rows = cases.pop("rows")
    assert any("one kernel" in stores for stores in rows["stores"])
    assert rows["temp"] <= rows["planned"] <= 24 * 2**20
    none, some, all_of_it = cases.values()
    for case in (none, some, all_of_it):
        assert case["temp"] <= case["planned"] <= 120 * 2**20
        assert case["host"] <= case["on_host"]
    assert none["on_host"] == 0 < some["on_host"] <= 100 * 2**20
    assert some["on_host"] < all_of_it["on_host"] <= 2**30
    assert none["time"] > some["time"] > all_of_it["time"]


def test_a_loop_that_is_one_kernel_takes_what_its_plan_says():
    cases = found("h100", "fused")
    for case in cases.values():
        # By itself, the gradient has its cotangents in a place of their own.
        assert case["temp"] <= case["planned"] <= 1.05 * case["temp"] + 4096
    # A budget takes it where it is faster, and if it compiles in seconds.
    crowded = cases.pop("crowded")
    assert re.search(r"255 registers a thread, and \d+ B", crowded["kernels"][0])
    assert "is left to XLA" in crowded["kernels"][1]
    assert any("has too many numbers" in said for said in crowded["said"])
    for case in cases.values():
        assert all("registers a thread" in kernel for kernel in case["kernels"])
        if HAS_MOSAIC_GPU:
            assert all("; by Mosaic GPU; " in kernel for kernel in case["kernels"])
        assert max(case["times"]) < 0.1
        assert not any("Fused" in said for said in case["said"])


@pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="a later backend")
def test_matrices_of_a_cell_lose_no_bits_before_its_kernel():
    (case,) = found("h100", "cell").values()
    assert case["kernel"].startswith("one each way with a row in several threads")
    assert "unknown, as no such kernel has been timed yet" in case["plan"]
    assert case["nothing"] == []
    assert case["temp"] <= case["planned"]


def test_operations_of_a_kernel_are_compiled():
    assert len(found("h100", "operations")) == 4
