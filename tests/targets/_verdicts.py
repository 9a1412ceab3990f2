"""Compiles a case, and says what is wrong with what came of it."""

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Iterator

import jax

import eqloop as el
from eqloop._device import planning_device
from eqloop._programs import lowered

from ._cases import Case
from ._hlo import Optimised

# A plan may be lower than what is allocated by one of these.
_SHARE, _ROOM = 0.15, 16 * 1024

# What XLA writes to standard error, and in the program for a TPU.
_ON_HOST = "device compute in host memory", "_xla_compute_type"


@dataclasses.dataclass(frozen=True)
class Found:
    """What the compiler says of a case.

    Attributes:
        temp: Bytes on the device, besides inputs and outputs.
        host: Bytes on its host.
        planned: Bytes on the device that the plan has foreseen, if it is for all.
        kernels: How many kernels and copies a GPU starts for each step, if its loops
            have known numbers of trips.
        wrong: What is wrong.
        error: The greatest difference from what plain JAX computes, relative to the
            greatest entry of an array, if it was run.
    """

    temp: int = 0
    host: int = 0
    planned: int | None = None
    kernels: float | None = None
    wrong: tuple[str, ...] = ()
    error: float | None = None


def judged(case: Case) -> tuple[Found, jax.stages.Compiled | None]:
    """Compiles a case for the device that plans are made for.

    A case that does not compile is wrong, whatever its error says.

    Returns:
        What the compiler says, and the program, a function of all arrays.
    """
    try:
        planned = _planned(case)
        with _told() as told:
            compiled = lowered(case.function, *case.args).compile()
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        return Found(wrong=(f"{type(error).__name__}: {first[:200]}",)), None
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    temp, program = memory.temp_size_in_bytes, Optimised(text)
    found = Found(
        temp,
        memory.host_temp_size_in_bytes,
        planned,
        _kernels(case, program),
        tuple(dict.fromkeys(_faults(case, temp, planned, program, [*told, text]))),
    )
    return found, compiled


def _planned(case: Case) -> int | None:
    if not case.is_planned:
        return None
    return sum(found.plan.peak_bytes for found in el.plans(case.function)(*case.args))


def _kernels(case: Case, program: Optimised) -> float | None:
    are_known = all(loop.trips is not None for loop in program.loops())
    if case.steps is None or not are_known:
        return None
    return sum(one.times for one in program.started()) / case.steps


def _faults(
    case: Case, temp: int, planned: int | None, program: Optimised, texts: list[str]
) -> Iterator[str]:
    if planned is not None and temp > planned + max(_SHARE * planned, _ROOM):
        yield f"{planned:,} bytes are planned, and {temp:,} allocated"
    if any(words in text for text in texts for words in _ON_HOST):
        yield "the host computes"
    if case.is_static and planning_device().platform == "gpu":
        unknown = sum(loop.trips is None for loop in program.loops())
        yield from [f"{unknown} loops with unknown numbers of trips"] * (unknown > 0)
    for one in program.started():
        line = one.instruction
        if not one.is_in_loop or line.op.endswith("-start"):
            continue
        for array, written in zip(line.arrays, program.written(line), strict=True):
            # Half of a stack is what a loop of two iterations writes.
            is_stack = not {*array.dims}.isdisjoint(case.rows)
            if is_stack and written > array.size / 2 and math.prod(array.dims) > 1:
                yield f"in each iteration of a loop: {line.op} {line.types.strip()}"


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    """What XLA writes to standard error, which Python does not see otherwise."""
    told = list[str]()
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield told
        finally:
            os.dup2(own, 2)
            os.close(own)
            file.seek(0)
            told.append(file.read().decode(errors="replace"))
