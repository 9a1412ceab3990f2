"""Recurrent cells whose steps are reversed together."""

import dataclasses
from collections.abc import Sequence

import eqloop as el

from .. import _loops as loops
from .._claims import NO_SLOWER, memory, memory_ratio, time_ratio
from .._comparison import Comparison
from .._problems import gradient, gru, lstm, tanh_rnn

# A gradient takes a step and its reversal, which is about two more. So it takes a third
# longer where each step is run again, if nothing is gained by reversing them together.
_RUN_AGAIN = 4 / 3


def cells() -> Sequence[Comparison]:
    """Each cell by `lax.scan`, step by step, together, and within budgets.

    What is reversed together becomes products of matrices. That saves time where
    `lax.scan` has products of matrices and vectors, and residuals to write and read.
    Sixteen cells at once have products of matrices as it is, and a step of a plain RNN
    has one vector to store: there, less memory should cost no time.
    """
    return [
        _cell("GRU of width 128, 1000 steps", gru(1000, 128), (0.85, 1.0, 1.05, 0.95)),
        _cell(
            "tanh RNN of width 512, 2000 steps",
            tanh_rnn(2000, 512),
            (NO_SLOWER, NO_SLOWER, _RUN_AGAIN, 0.95),
        ),
        _cell(
            "4 LSTMs of width 512, 200 steps", lstm(200, 512, 4), (0.75, 0.9, 1.0, 0.95)
        ),
        _cell(
            "16 LSTMs of width 256, 200 steps",
            lstm(200, 256, 16),
            (NO_SLOWER, 1.1, _RUN_AGAIN, NO_SLOWER),
        ),
    ]


def _cell(title: str, args: tuple, bounds: tuple[float, ...]) -> Comparison:
    """A cell, with bounds on its time.

    Args:
        title: What it is called.
        args: The cell, the initial carry and the inputs.
        bounds: The time over that of `lax.scan` within a half of its memory, within a
            quarter or a little more than is feasible at the least, by default, and
            with all carries stored.
    """
    cell, init, xs = args
    length, plain = len(xs), loops.lax_scan()
    whole = el.Scan(cell).plan(init, xs).peak_bytes
    least = el.Scan(cell).frontier(init, xs)[0].peak_bytes
    # With the least alone, a single carry is stored.
    fourth = max(whole // 4, least + whole // 20)
    half, quarter = (loops.ours(el.Budget(size)) for size in (whole // 2, fourth))
    default, levels, every = (
        dataclasses.replace(loops.ours(schedule), line=line)
        for line, schedule in (
            ("Recursive(16)", el.Recursive(16)),
            ("Recursive, together", el.Recursive(32, batch=32)),
            ("Chunked, together", el.Chunked(length, batch=32)),
        )
    )
    rows = [plain, loops.lax_scan_of_remat(), default, levels, every, half, quarter]
    return Comparison(
        f"Gradient of weights, h0 and xs: {title}",
        [loop.case(gradient, args) for loop in rows],
        [
            time_ratio(half.name, plain.name, bounds[0]),
            time_ratio(quarter.name, plain.name, bounds[1]),
            time_ratio(default.name, plain.name, bounds[2]),
            time_ratio(every.name, plain.name, bounds[3]),
            memory(half.name, whole // 2),
            memory(quarter.name, fourth),
            memory_ratio(every.name, plain.name, 0.6),
        ],
    )
