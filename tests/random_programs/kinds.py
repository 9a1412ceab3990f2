"""The kinds of programs, and how many there are of each."""

import random

from . import programs
from .buffers import buffered
from .endings import ended
from .grow import Features
from .programs import Program
from .undone import undone

KINDS = {
    programs.scanned: 8,
    programs.composed: 5,
    programs.rows: 4,
    programs.looped: 4,
    buffered: 4,
    ended: 2,
    undone: 2,
    programs.layers: 2,
    programs.prefixes: 1,
}


def random_program(
    rng: random.Random, width: int, features: Features, length: int
) -> Program:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, width, features, length)
