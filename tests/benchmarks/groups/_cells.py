"""Recurrent cells whose steps are reversed together."""

import dataclasses
from collections.abc import Sequence

import eqloop as el

from .. import _loops as loops
from .._claims import memory_ratio, time_ratio
from .._comparison import Comparison
from .._problems import gradient, gru, lstm, tanh_rnn


def cells() -> Sequence[Comparison]:
    """Each cell by `lax.scan`, step by step, and in blocks."""
    return [
        _cell("GRU of width 128, 1000 steps", gru(1000, 128)),
        _cell("tanh RNN of width 512, 2000 steps", tanh_rnn(2000, 512)),
        _cell("4 LSTMs of width 512, 200 steps", lstm(200, 512, 4)),
        _cell("16 LSTMs of width 256, 200 steps", lstm(200, 256, 16)),
    ]


def _cell(title: str, args: tuple) -> Comparison:
    length = len(args[2])
    plain = loops.lax_scan()
    single, levels, every = (
        dataclasses.replace(loops.ours(schedule), line=line)
        for line, schedule in (
            ("Recursive(16)", el.Recursive(16)),
            ("Recursive, in blocks", el.Recursive(32, block=32)),
            ("Chunked, in blocks", el.Chunked(length, block=32)),
        )
    )
    rows = [
        plain,
        loops.lax_scan_of_remat(),
        single,
        levels,
        every,
    ]
    return Comparison(
        f"Gradient of weights, h0 and xs: {title}",
        [loop.case(gradient, args) for loop in rows],
        [
            time_ratio(every.name, plain.name, 0.95),
            memory_ratio(every.name, plain.name, 0.6),
            time_ratio(levels.name, plain.name, 1.3),
        ],
    )
