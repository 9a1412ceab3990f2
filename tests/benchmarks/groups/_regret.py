"""`Budget` compared with the fastest of all other plans that fit."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import eqloop as el

from .. import _loops as loops
from .._claims import Claim, Figure, Measurements, memory, over_the_best
from .._comparison import Comparison
from .._problems import (
    attention,
    convolutions,
    gradient,
    gru,
    lorenz,
    lstm,
    pendulum,
    recurrent,
    relaxation,
    wave,
)
from ._budget import planned
from ._layer_policies import policies_of_layers

# Of the memory that storing everything takes.
_PARTS = (0.6, 0.2, 0.05, 0.015)


def regret() -> Sequence[Comparison]:
    """Steps of all kinds, light and heavy, single and batched."""
    problems = {
        "GRU of width 128, 1024 steps": gru(1024, 128),
        "8 LSTMs of width 128, 256 steps": lstm(256, 128, 8),
        "recurrent step of width 64, 4096 steps": recurrent(4096),
        "neural ODE by Runge and Kutta, 1024 steps": pendulum(1024),
        "wave equation on 32 x 32, 1024 steps": wave(1024, 32),
        "Lorenz, 16384 steps": lorenz(16384),
        "two convolutions of 8 channels on 16 x 16, 128 steps": convolutions(
            128, 16, 8
        ),
        "attention of 32 tokens of width 64, 256 steps": attention(256, 32, 64),
        "five sweeps of width 32 in a step, 1024 steps": relaxation(1024, 32),
    }
    return [
        *(_comparison(name, args) for name, args in problems.items()),
        policies_of_layers(),
    ]


def _comparison(title: str, args: tuple[Any, ...]) -> Comparison:
    cell, init, xs = args
    length = len(xs)
    plain = loops.lax_scan()
    whole = el.Scan(cell).plan(init, xs)
    least = min(
        plan.peak_bytes
        for plan in el.Scan(cell, schedule=el.Recursive()).frontier(init, xs)
    )
    sizes = [max(round(part * whole.peak_bytes), least) for part in _PARTS]
    budgets = {loops.ours(el.Budget(size)): size for size in dict.fromkeys(sizes)}
    others = [plain, *by_hand(length), *map(loops.ours, fixed_schedules(length))]
    names = [one.name for one in others]
    claims = []
    for one, size in budgets.items():
        claims += [
            memory(one.name, size),
            over_the_best(one.name, names, size, 1.15),
            _foreseen(one.name, plain.name),
        ]
    return Comparison(
        title,
        [
            *(one.case(gradient, args) for one in others),
            *(planned(size, args) for size in budgets.values()),
        ],
        claims,
        tolerance=2e-3,
        rounds=9,
    )


def by_hand(length: int) -> list[loops.Loop]:
    """What one would write without this project."""
    chunk = 2 ** round(math.log2(length) / 2)
    while length % chunk:
        chunk -= 1
    sizes = [n for n in (chunk // 2, chunk, 2 * chunk) if n > 1 and length % n == 0]
    return [loops.lax_scan_of_remat(), *(loops.nested(length // n, n) for n in sizes)]


def fixed_schedules(length: int) -> list[Any]:
    """Those that budgets are compared with."""
    root = math.isqrt(length)
    return [
        el.Recursive(16, batch=1),
        el.Recursive(root, batch=8),
        el.Recursive(root, batch=32),
        el.Chunked(root, batch=1),
        el.Chunked(root, batch=32),
        el.Chunked(length, batch=1),
        el.Chunked(length, batch=32),
        el.Binomial(8),
        el.Binomial(root),
        el.Binomial(8, block=8),
        el.Binomial(root, block=root),
    ]


def _foreseen(name: str, plain: str) -> Claim:
    """How far the time is from what the plan said, whichever is more."""

    def figure(measured: Measurements) -> Figure | None:
        if (plan := measured[name].plan) is None:
            return None
        found = measured[name].busy / measured[plain].busy / plan.relative_time
        return np.maximum(found, 1 / found)

    text = f"predicted time of {name} over `lax.scan`, off by"
    return Claim(text, figure, 1.2, "x", (name, plain))
