"""Gradients within a given memory."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

import eqloop as el

from .. import _loops as loops
from .._claims import NO_SLOWER, Claim, Measurements, memory, time_ratio
from .._comparison import Comparison
from .._measure import Case
from .._problems import gradient, gru, lorenz, recurrent, wave

MEBI = 2**20


def budget() -> Sequence[Comparison]:
    """Every budget by factors of two, on four quite different steps."""
    return [
        _sweep(
            "Gradient of W, h0 and xs: recurrent step, 4096 steps, width 64",
            recurrent(4096),
        ),
        _sweep("Budgets: GRU, 2048 steps, width 32", gru(2048)),
        _sweep("Budgets: wave equation on 32 x 32, 512 steps", wave(512, 32)),
        _sweep("Budgets: Lorenz, 16384 steps", lorenz(16384)),
    ]


def million() -> Sequence[Comparison]:
    """A million steps in 64 MiB."""
    args = recurrent(1_000_000)
    scan = loops.ours(el.Budget(64 * MEBI))
    return [
        Comparison(
            "Gradient of W, h0 and xs: recurrent step, 1,000,000 steps, width 64",
            [loop.case(gradient, args) for loop in (loops.nested(1000, 1000), scan)],
            [memory(scan.name, 64 * MEBI)],
            # Sums of a million terms, in another order: from those in float64 either
            # is further off than from the other.
            tolerance=1e-3,
            rounds=1,
        )
    ]


def _sweep(title: str, args: tuple[Any, ...]) -> Comparison:
    plain = loops.lax_scan()
    scans = {nbytes: loops.ours(el.Budget(nbytes)) for nbytes in budgets(args)}
    growing = itertools.pairwise(scan.name for scan in scans.values())
    return Comparison(
        title,
        [plain.case(gradient, args), *(planned(size, args) for size in scans)],
        [
            *(memory(scan.name, nbytes) for nbytes, scan in scans.items()),
            *(_prediction(scan.name) for scan in scans.values()),
            *(time_ratio(more, less, 1.1) for less, more in growing),
            time_ratio(scans[8 * MEBI].name, plain.name, NO_SLOWER),
        ],
    )


def budgets(args: tuple[Any, ...]) -> list[int]:
    """From the least that is feasible, then powers of two up to 64 MiB, in bytes."""
    cell, init, xs = args
    plans = el.Scan(cell, schedule=el.Recursive()).frontier(init, xs)
    least = min(plan.peak_bytes for plan in plans)
    doublings = (2**power for power in range(int(np.log2(least)) + 1, 27))
    return [least, *doublings]


def planned(nbytes: int, args: tuple[Any, ...]) -> Case:
    """The gradient of a scan within a budget, which tells its plan."""
    cell, init, xs = args
    schedule = el.Budget(nbytes)
    scan = el.Scan(cell, schedule=schedule)
    case = loops.ours(schedule).case(gradient, args)
    return dataclasses.replace(case, plan=lambda: scan.plan(init, xs))


def _prediction(name: str) -> Claim:
    """How far the plan is from the compiled program, where 1 is all it may be."""

    def figure(measured: Measurements) -> float | None:
        found = measured[name]
        if found.plan is None:
            return None
        predicted = found.plan.peak_bytes
        allowed = max(0.15 * predicted, 16 * 2**10)
        return abs(found.temp_bytes - predicted) / allowed

    text = f"predicted memory of {name}, off by, of what is allowed"
    return Claim(text, figure, 1.0, "", (name,))
