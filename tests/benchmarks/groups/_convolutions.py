"""Convolutions, and products with transposed matrices, in loops on a CPU."""

from collections.abc import Sequence
from typing import Any

import eqloop as el

from .. import _loops as loops
from .._claims import NO_SLOWER, time_ratio
from .._comparison import Comparison
from .._problems import conv_gru, conv_lstm, diffusion, gradient, loss, there_and_back

# Where XLA does not use its library, a loop takes more than ten times as long.
_TENTH = 0.15


def convolutions() -> Sequence[Comparison]:
    """Each loop by `lax.scan` and by ours: its value, and its gradient."""
    every = {
        "convolutional LSTM, 30 steps": (conv_lstm(30), _TENTH),
        "convolutional GRU, 30 steps": (conv_gru(30), _TENTH),
        "diffusion on 32 x 32, 50 steps": (diffusion(50, (32, 32)), NO_SLOWER),
        "diffusion on 256, 200 steps": (diffusion(200, (256,)), NO_SLOWER),
        "tanh(W.T W h + x), 100 steps of width 384": (
            there_and_back(100, 384),
            NO_SLOWER,
        ),
    }
    return [
        _loop(f"{what}: {title}", use, *about)
        for title, about in every.items()
        for what, use in (("Value", loss), ("Gradient of all inputs", gradient))
    ]


def _loop(title: str, use: Any, args: tuple[Any, ...], bound: float) -> Comparison:
    plain, default = loops.lax_scan(), loops.ours(el.StoreAll())
    ours = default, loops.ours(el.Recursive(8)), loops.ours(el.Chunked(len(args[2])))
    return Comparison(
        title,
        [loop.case(use, args) for loop in (plain, loops.lax_scan_of_remat(), *ours)],
        [time_ratio(default.name, plain.name, bound)],
        tolerance=1e-3,
        rounds=7,
    )
