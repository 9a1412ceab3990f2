"""A gradient with a quarter of the memory, beside the one that stores everything."""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import eqloop as el

from ..compiling import AS_USED
from ._cases import Case

# What is asked: of the memory and of the time of the gradient as it is.
SHARE = 1 / 4
SLOWER = 1.3
# Sums of thousands of steps in single precision, added in another order.
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Found:
    """What was measured of a case.

    Attributes:
        plain: The bytes of the gradient as it is; of a loop that has none, `None`.
        budget: The bytes that each loop was given; `None` if it was given no budget.
        taken: The bytes of the gradient with a budget.
        seconds: How long it takes, and the one as it is.
        error: The greatest difference of a gradient from the reference, relative to the
            greatest entry of that leaf.
    """

    plain: int | None
    budget: int | None
    taken: int
    seconds: tuple[float, float]
    error: float

    @property
    def memory(self) -> float | None:
        """The share of the memory that it takes."""
        return None if self.plain is None else self.taken / self.plain

    @property
    def slower(self) -> float:
        """How many times as long it takes."""
        return self.seconds[0] / self.seconds[1]

    @property
    def wrong(self) -> tuple[str, ...]:
        """What is not as it should be."""
        memory = self.memory or 0.0
        said = (
            (not self.error <= TOLERANCE, f"another gradient, by {self.error:.1g}"),
            (memory > SHARE, f"{memory:.3f} of the memory"),
            (self.slower > SLOWER, f"{self.slower:.2f} times as slow"),
        )
        return tuple(what for is_wrong, what in said if is_wrong)


def judged(case: Case, *, rounds: int = 11) -> Found:
    """Compiles both gradients, compares them, and times them in turn."""
    loss, args = case.make()
    reference = case.reference or jax.value_and_grad
    plain = _compiled(reference(loss), args)
    expected = jax.block_until_ready(plain(*args))
    if case.schedule is not None:
        nbytes = budget = None
        program = _compiled(_ours(case, loss, case.schedule), args)
    else:
        nbytes = _temp_bytes(plain)
        budget, program = _fitting(case, loss, args, int(nbytes * SHARE))
    error = distance(jax.block_until_ready(program(*args)), expected)
    programs, clock = (program, plain), _clock()
    times = [[_seconds(clock, each, args) for each in programs] for _ in range(rounds)]
    ours, theirs = (min(each) for each in zip(*times, strict=True))
    return Found(nbytes, budget, _temp_bytes(program), (ours, theirs), error)


def _ours(case: Case, loss: Any, schedule: el.AbstractSchedule) -> Any:
    return jax.value_and_grad(el.Reschedule(loss, schedule, **dict(case.settings)))


def _fitting(
    case: Case, loss: Any, args: tuple[Any, ...], within: int
) -> tuple[int, jax.stages.Compiled]:
    """The program whose gradient takes so much, and the budget of a loop for that.

    A budget is one of a loop. If there are two, or much is stored outside of the loop,
    then the loop has to do with less, as far as it can.
    """
    budget = within
    program = _compiled(_ours(case, loss, el.Budget(budget)), args)
    for _ in range(2):
        if (taken := _temp_bytes(program)) <= within:
            break
        less = int(0.97 * budget * within / taken)
        try:
            other = _compiled(_ours(case, loss, el.Budget(less)), args)
        except ValueError as error:  # no plan needs so little
            if "It needs at least" not in str(error):
                raise
            break
        budget, program = less, other
    return budget, program


def _compiled(f: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
    return jax.jit(f).lower(*args).compile(AS_USED)


def _temp_bytes(program: jax.stages.Compiled) -> int:
    return program.memory_analysis().temp_size_in_bytes


def _clock() -> Callable[[], float]:
    """The time of this process alone, if there are others that keep it waiting."""
    is_idle = os.getloadavg()[0] <= (os.cpu_count() or 1) + 0.5
    return time.perf_counter if is_idle else time.process_time


def _seconds(
    clock: Callable[[], float], program: jax.stages.Compiled, args: tuple[Any, ...]
) -> float:
    start = clock()
    jax.block_until_ready(program(*args))
    return clock() - start


def distance(found: Any, expected: Any) -> float:
    """The greatest difference, relative to the greatest entry of each leaf."""

    def of_leaf(a: Any, b: Any) -> float:
        a, b = np.asarray(a, float), np.asarray(b, float)
        scale = float(np.max(np.abs(b), initial=0.0)) or 1.0
        error = float(np.max(np.abs(a - b), initial=0.0)) / scale
        return error if np.isfinite(error) else float("inf")

    return max(jax.tree.leaves(jax.tree.map(of_leaf, found, expected)))
