"""Runs programs in turn, with nothing beside them."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from eqloop._device import planning_device

from ._groups import Program
from ._rows import Row

# Each program is run so often, after twice that is not counted. A run of a quick one is
# several, which take so long together, in seconds.
_ROUNDS, _ENOUGH = 5, 0.02
RUNS = 2 + _ROUNDS
# No other round is begun after so many seconds.
_LONG = 25.0


@dataclasses.dataclass
class Made:
    """A program, and what is known of it.

    Attributes:
        program: As the table has it.
        row: What was found.
        compiled: The program to run, if there is one.
        count: How many times it is run at once.
    """

    program: Program
    row: Row
    compiled: Any = None
    count: int = 1


def run_in_turn(
    every: Sequence[Made],
    arguments: Sequence[Any],
    compare: Callable[[Any, Any], float],
) -> Iterator[Made]:
    """Runs all of them that can be.

    Args:
        every: The programs. The others are compared with the first.
        arguments: The arrays that they take.
        compare: Tells how far a result is from that of the first program.

    Yields:
        Each program whose row has changed: all of them after each round.
    """
    start = time.monotonic()
    args = jax.block_until_ready(jax.device_put(list(arguments), planning_device().own))
    # The most that was ever allocated is what is told. So the least come first.
    by_size = sorted(every, key=lambda made: made.row.temp or 0)
    for made in by_size:
        _tried(made, lambda made: _allocate(made, args))
    expected = _result(every[0], args)
    for made in every:
        _tried(made, lambda made: _look(made, args, expected, compare))
    del expected
    yield from every
    for _ in range(_ROUNDS):
        for made in every:
            _tried(made, lambda made: _time(made, args))
        yield from every
        if time.monotonic() - start > _LONG:
            return


def _result(made: Made, args: Sequence[Any]) -> Any:
    """What a program computes, if it can be run."""
    results = list[Any]()
    _tried(
        made, lambda made: results.append(jax.block_until_ready(made.compiled(*args)))
    )
    return results[0] if results else None


def _tried(made: Made, run: Callable[[Made], None]) -> None:
    """Has a program that fails be run no more."""
    if made.compiled is None:
        return
    try:
        run(made)
    except Exception as error:
        made.compiled = None
        made.row = dataclasses.replace(made.row, wrong=in_short(error))


def _allocate(made: Made, args: Sequence[Any]) -> None:
    before = _allocated()
    jax.block_until_ready(made.compiled(*args))
    after = _allocated()
    if after.get("peak_bytes_in_use", 0) > before.get("peak_bytes_in_use", 0):
        peak = after["peak_bytes_in_use"] - before["bytes_in_use"]
        made.row = dataclasses.replace(made.row, peak=peak)


def _allocated() -> dict[str, int]:
    """What the allocator of the device says, if it says anything."""
    return planning_device().own.memory_stats() or {}


def _look(
    made: Made,
    args: Sequence[Any],
    expected: Any,
    compare: Callable[[Any, Any], float],
) -> None:
    start = time.perf_counter()
    result = jax.block_until_ready(made.compiled(*args))
    made.count = max(math.ceil(_ENOUGH / (time.perf_counter() - start)), 1)
    if expected is not None:
        made.row = dataclasses.replace(made.row, error=compare(result, expected))


def _time(made: Made, args: Sequence[Any]) -> None:
    start = time.perf_counter()
    for _ in range(made.count):
        result = made.compiled(*args)
    jax.block_until_ready(result)
    seconds = (time.perf_counter() - start) / made.count
    made.row = dataclasses.replace(made.row, seconds=(*made.row.seconds, seconds))


def in_short(error: Exception) -> str:
    """An error in a line."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first[:200]}"
