"""Says what takes so long, if a plan does."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from ..._device import planning_device
from ..._programs import place_now
from ..engine._problem import Problem

# As long as this, in seconds, nobody wonders.
_LONG = 2.0
_logger = logging.getLogger("eqloop")
_said = set[str]()


@contextlib.contextmanager
def says_if_long(problem: Problem, owner: str) -> Iterator[None]:
    """A context for planning a loop, which is said in a line if it takes long.

    Args:
        problem: The loop.
        owner: What plans it.
    """
    where = f"{problem.loop.length} steps for {planning_device().kind}"
    if (place := place_now()) is not None:
        where += f", asked for at {place}"
    line = (
        f"{owner} is planning a loop of {where}: it compiles short loops of the step "
        f"and the programs of a few plans, once. `jax_compilation_cache_dir` or "
        f"`el.measurements` keep what is found for other processes."
    )
    timer = threading.Timer(_LONG, _say_once, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_once(line: str) -> None:
    # A loop is planned once more for each derivative, and nobody wonders again.
    if line not in _said:
        _said.add(line)
        _logger.warning(line)
