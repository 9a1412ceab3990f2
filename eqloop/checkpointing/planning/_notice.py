"""Says what takes so long, if a plan does."""

import contextlib
import contextvars
import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterator

from ..._device import planning_device
from ..._programs import place_now

# As long as this, in seconds, nobody wonders.
_LONG = 2.0
_logger = logging.getLogger("eqloop")
# When the planning that is going on began, and the numbers of its plans.
_Planning = tuple[float, Iterator[int]]
_now = contextvars.ContextVar[_Planning | None]("planning", default=None)


@contextlib.contextmanager
def says_if_long(owner: str, what: str, how: str) -> Iterator[None]:
    """A context for planning, which is said in a line if it takes long.

    In words: `owner` plans `what`, and compiles `how` to find out.
    """
    where = planning_device().kind
    if (place := place_now()) is not None:
        where += f", asked for at {place}"
    line = (
        f"{owner} is planning {what} for {where}: it compiles {how}, once. "
        f"`jax_compilation_cache_dir` or `el.measurements` keep what is found for "
        f"other processes."
    )
    timer = threading.Timer(_LONG, _say_once, [line])
    timer.daemon = True
    timer.start()
    before = _now.set((time.monotonic(), itertools.count(1)))
    try:
        yield
    finally:
        _now.reset(before)
        timer.cancel()


def says_what_is_found(owner: str, found: str) -> None:
    """Says what a plan takes, in words, if planning takes long."""
    if (planning := _now.get()) is None:
        return
    since, numbers = planning
    seconds, number = time.monotonic() - since, next(numbers)
    if seconds > _LONG:
        _logger.warning(f"{owner}: plan {number} takes {found}, after {seconds:.0f} s.")


@functools.cache
def _say_once(line: str) -> None:
    # It is planned once more for each derivative, and nobody wonders again.
    _logger.warning(line)
