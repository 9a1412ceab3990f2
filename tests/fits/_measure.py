"""What the gradient of a function takes by one budget after the other."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

import eqloop as el

from ..benchmarks._measure import forget_programs, temp_bytes
from ._functions import Function

# What JAX says when a program was compiled.
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Row:
    """A gradient.

    Attributes:
        name: How it is made.
        budget: The bytes that it may take, if it has a budget.
        taken: The bytes that it takes.
        time: Its time over that of the plain gradient.
        planning: The time to compile it with all that is tried before, over that to
            compile the plain gradient.
        programs: How many programs were compiled for it, itself among them.
    """

    name: str
    budget: int | None
    taken: int
    time: float
    planning: float
    programs: int


@dataclasses.dataclass(frozen=True)
class _Made:
    """A gradient that was compiled."""

    run: Any
    seconds: float
    programs: int


def measured(function: Function, count: int, rounds: int) -> list[Row]:
    """The rows of a function: plain, by budgets, and by `jax.checkpoint`.

    Args:
        function: The function.
        count: How many budgets there are, from the least to all.
        rounds: How often each is run.
    """
    _forget()
    plain = _made(function, function.plain)
    whole = temp_bytes(plain.run)
    least = least_budget(function)
    # As if nothing had been found out.
    _forget()
    made = {"plain": plain}
    budgets = {"plain": None}
    for i in range(count):
        part = i / (count - 1) if count > 1 else 0.5
        budget = round(least + part * (whole - least))
        name = f"{budget / whole:.2f}"
        made[name] = _made(function, el.Fit(function.plain, budget))
        budgets[name] = budget
        if not i:
            # With what was found out the first time.
            forget_programs()
            made["again"] = _made(function, el.Fit(function.plain, budget))
            budgets["again"] = budget
    checkpointed = {"each part": function.by_parts}
    checkpointed["the function"] = jax.checkpoint(function.plain)
    for name, loss in checkpointed.items():
        # JAX 0.10 has no such gradient of a loop in which there is a loop of ours.
        try:
            made[name] = _made(function, loss)
        except NotImplementedError:
            continue
        budgets[name] = None
    times = _seconds(function, [one.run for one in made.values()], rounds)
    return [
        Row(
            name=name,
            budget=budgets[name],
            taken=temp_bytes(one.run),
            time=times[i] / times[0],
            planning=one.seconds / plain.seconds,
            programs=one.programs,
        )
        for i, (name, one) in enumerate(made.items())
    ]


def least_budget(function: Function) -> int:
    """The least budget that will do, as the error says it."""
    try:
        _gradient(function, el.Fit(function.plain, 1)).trace(*function.args)
    except ValueError as error:
        said = re.search(r"which is (\d+) bytes", str(error))
        if said is None:
            raise
        return int(said[1])
    return 1


def _gradient(function: Function, loss: Callable[..., Any]) -> Any:
    return jax.jit(jax.value_and_grad(loss))


def _made(function: Function, loss: Callable[..., Any]) -> _Made:
    found: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == _COMPILED:
            found.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.process_time()
    run = _gradient(function, loss).lower(*function.args).compile()
    seconds = time.process_time() - start
    jax.monitoring.unregister_event_duration_listener(listen)
    return _Made(run, seconds, len(found))


def _seconds(
    function: Function, programs: Sequence[Callable[..., Any]], rounds: int
) -> list[float]:
    """The least time of each, run in turn: of the processor, which others share."""
    best = [float("inf")] * len(programs)
    for turn in range(rounds + 1):
        for i, run in enumerate(programs):
            start = time.process_time()
            jax.block_until_ready(run(*function.args))
            if turn:
                best[i] = min(best[i], time.process_time() - start)
    return best


def _forget() -> None:
    """Everything that was compiled or found out."""
    forget_programs()
    el.measurements(None)
