"""What the gradient of a function takes by one budget after the other."""

import dataclasses
import functools
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import eqloop as el
from eqloop._programs import lowered

from ..benchmarks._measure import forget_programs, temp_bytes
from ._functions import Division, Function

# What JAX says when a program was compiled.
_COMPILED = "/jax/core/compile/backend_compile_duration"
# Of more parts than this, the first few are checkpointed, and not any of them.
_MOST_PARTS = 3


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
    forget()
    plain = compiled(function, function.plain)
    whole = temp_bytes(plain.run)
    least = least_budget(function)
    # As if nothing had been found out.
    forget()
    made = {"plain": plain}
    budgets = {"plain": None}
    for i in range(count):
        part = i / (count - 1) if count > 1 else 0.5
        budget = round(least + part * (whole - least))
        name = f"{budget / whole:.2f}"
        made[name] = compiled(function, el.Fit(function.plain, budget))
        budgets[name] = budget
        if not i:
            # With what was found out the first time.
            forget_programs()
            made["again"] = compiled(function, el.Fit(function.plain, budget))
            budgets["again"] = budget
    checkpointed = {"each part": function.by_parts}
    checkpointed["the function"] = jax.checkpoint(function.plain)
    for name, loss in checkpointed.items():
        # JAX 0.10 has no such gradient of a loop in which there is a loop of ours.
        try:
            made[name] = compiled(function, loss)
        except NotImplementedError:
            continue
        budgets[name] = None
    times = seconds_of(function, [one.run for one in made.values()], rounds)
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


@dataclasses.dataclass(frozen=True)
class Against:
    """A budget, beside the fastest division by hand that fits into it.

    Attributes:
        name: The budget, of all.
        time: The time of a `Fit` over that of the division; infinite if none fits.
        tried: How many divisions were compiled.
        fitting: How many of them fit.
    """

    name: str
    time: float
    tried: int
    fitting: int


def against_hand(function: Function, count: int, rounds: int) -> list[Against]:
    """Budgets from the least to all, each beside all divisions of a grid.

    Args:
        function: The function.
        count: How many budgets there are.
        rounds: How often each gradient is run.
    """
    forget()
    by_hand = [compiled(function, division) for division in divisions(function)]
    whole = temp_bytes(compiled(function, function.plain).run)
    least = least_budget(function)
    budgets = [
        round(least + i / max(count - 1, 1) * (whole - least)) for i in range(count)
    ]
    fits = [compiled(function, el.Fit(function.plain, budget)) for budget in budgets]
    times = seconds_of(function, [one.run for one in (*by_hand, *fits)], rounds)
    hands, own = times[: len(by_hand)], times[len(by_hand) :]
    found = list[Against]()
    for budget, taking in zip(budgets, own, strict=True):
        pairs = zip(by_hand, hands, strict=True)
        fitting = [taken for one, taken in pairs if temp_bytes(one.run) <= budget]
        ratio = taking / min(fitting, default=float("inf"))
        name = f"{budget / whole:.2f}"
        found.append(Against(name, ratio, len(by_hand), len(fitting)))
    return found


def divisions(function: Function) -> Iterator[Callable[..., Any]]:
    """Losses whose memory is divided by hand: a grid.

    There is a `jax.checkpoint` around any of the parts, or, where these are many,
    around the first few, and around the whole. Each loop has one of a few schedules,
    or, where there are several loops, the first few have.
    """
    parts, loops = function.parts, function.loops
    around = list(itertools.product([False, True], repeat=parts))
    if parts > _MOST_PARTS:
        around = [[i < k for i in range(parts)] for k in range(parts + 1)]
    by_loop = [_schedules(length) for length in loops]
    scheduled = list(itertools.product(*by_loop))
    if len(loops) > 1:
        scheduled = [
            [of[j] if i < k else None for i, of in enumerate(by_loop)]
            for k in range(1, len(loops) + 1)
            for j in range(len(by_loop[0]))
        ]
    for of_parts, of_loops in itertools.product(around, scheduled):
        yield functools.partial(_divided, function, of_parts, of_loops)
    yield jax.checkpoint(function.plain)


def _schedules(length: int) -> list[el.AbstractSchedule | None]:
    """A few schedules for a loop, from the most memory to the least."""
    half, root = max(length // 2, 1), max(math.isqrt(length), 2)
    found = [el.Chunked(half), el.Chunked(root), el.Recursive(4), el.Binomial(3)]
    return [None, *found] if length > 8 else [None, el.Chunked(1), el.Chunked(2)]


def _divided(
    function: Function,
    parts: Sequence[bool],
    schedules: Sequence[el.AbstractSchedule | None],
    *args: Any,
) -> jax.Array:
    return function.loss(Division(parts, schedules), *args)


@dataclasses.dataclass(frozen=True)
class OnTarget:
    """A budget on a device that is not here.

    Attributes:
        budget: The budget, in bytes.
        taken: The bytes that its compiler says; `None` if the budget was refused.
        least: The bytes that would be enough, if it was refused.
    """

    budget: int
    taken: int | None
    least: int | None = None


def on_target(
    function: Function, target: str, shares: Sequence[float]
) -> tuple[int, list[OnTarget]]:
    """What budgets take on a device, by its compiler.

    Args:
        function: The function.
        target: The name of the device, such as `"h100"`.
        shares: The budgets, of all.

    Returns:
        What the plain gradient takes, and the budgets.
    """
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), function.args
    )

    def taken(loss: Callable[..., Any]) -> int:
        with el.planning_for(target):
            gradient = jax.value_and_grad(loss)
            return temp_bytes(lowered(gradient, *types).compile())

    whole, found = taken(function.plain), list[OnTarget]()
    for share in shares:
        budget = round(share * whole)
        try:
            found.append(OnTarget(budget, taken(el.Fit(function.plain, budget))))
        except ValueError as error:
            found.append(OnTarget(budget, None, _least_said(error)))
    return whole, found


def least_budget(function: Function) -> int:
    """The least budget that will do, as the error says it."""
    try:
        _gradient(function, el.Fit(function.plain, 1)).trace(*function.args)
    except ValueError as error:
        return _least_said(error)
    return 1


def _least_said(error: ValueError) -> int:
    said = re.search(r"which is (\d+) bytes", str(error))
    if said is None:
        raise error
    return int(said[1])


def _gradient(function: Function, loss: Callable[..., Any]) -> Any:
    return jax.jit(jax.value_and_grad(loss))


def compiled(function: Function, loss: Callable[..., Any]) -> _Made:
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


def seconds_of(
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


def forget() -> None:
    """Everything that was compiled or found out."""
    forget_programs()
    el.measurements(None)
