"""Measures a few programs beside one another, in turn, on the same machine."""

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

from ._h100 import ForH100, compiled_for_h100


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A function on arrays, with the arguments it is measured at.

    Cases that hold the very same `args` compute the same thing: their results are
    compared with those of the first of them.

    Args:
        name: the row of the table.
        fn: any function of PyTrees of arrays that `jax.jit` takes.
        args: its arguments.
        requires: the package that `fn` comes from, if it is not this one or JAX.
        line: the line of a plot that it belongs to, if it is drawn.
        is_compiled: whether it is compiled before; otherwise it is called as Python
            calls it, and what JAX does for each call is part of what is measured.
        plan: makes the plan that `fn` compiles by, if it has one that is of interest.
        under: gives a context in which `fn` is traced and compiled.
        on_h100: whether it is also compiled for an H100, where that is possible.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    requires: str | None = None
    line: str = ""
    is_compiled: bool = True
    plan: Callable[[], el.Plan] | None = None
    under: Callable[[], AbstractContextManager[None]] = nullcontext
    on_h100: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement:
    """What one case took.

    Attributes:
        seconds: one run per round; entries of equal index, across cases, were taken
            one after the other.
        busy: how long the cores of a CPU were busy with each of the runs, whatever else
            they had to do; the same as `seconds` where a device does the work.
        compile_seconds: tracing, lowering and compiling, once per round of those; the
            first call of what is not compiled before.
        temp_bytes: what XLA allocates besides arguments and results; 0 for what is not
            one program.
        error: the greatest difference of a result from the reference, relative to the
            greatest entry of that array of the reference.
        plan: what the case was compiled by, of a case that tells.
        on_h100: what a compiler for an H100 made of it, if it was asked.
    """

    seconds: np.ndarray
    busy: np.ndarray
    compile_seconds: np.ndarray
    temp_bytes: int
    error: float
    plan: el.Plan | None
    on_h100: ForH100 | None


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A case whose package is not installed."""

    requires: str


def measure(
    cases: Sequence[Case],
    *,
    rounds: int = 15,
    compile_rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Measurement | Skipped]:
    """Compiles and runs the cases A B C A B C ..., so that all share the noise.

    Args:
        cases: what to measure; names are unique.
        rounds: how many times each is run, after one run that is not counted.
        compile_rounds: how many times each is compiled from nothing.
        clock: tells the time of a run, in seconds.

    Returns:
        For each name, in order, what was measured, or that the case was skipped.
    """
    runnable = [case for case in cases if is_installed(case.requires)]
    compile_seconds, programs, plans = _compile(runnable, compile_rounds)
    on_h100 = {case.name: _compiled_for_h100(case) for case in runnable}
    results = {case.name: programs[case.name](*case.args) for case in runnable}
    errors = _errors(runnable, results)
    del results
    seconds, busy = np.empty((2, len(runnable), rounds))
    clocks = clock, time.process_time
    for turn in range(rounds):
        for row, case in enumerate(runnable):
            times = _seconds(clocks, programs[case.name], *case.args)
            seconds[row, turn], busy[row, turn] = times
    measured = {
        case.name: Measurement(
            seconds=seconds[row],
            busy=busy[row] if jax.default_backend() == "cpu" else seconds[row],
            compile_seconds=compile_seconds[row],
            temp_bytes=temp_bytes(programs[case.name]) if case.is_compiled else 0,
            error=errors[case.name],
            plan=plans[case.name],
            on_h100=on_h100[case.name],
        )
        for row, case in enumerate(runnable)
    }
    return {case.name: measured.get(case.name, _skip(case)) for case in cases}


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that XLA allocates for a program besides its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def is_installed(package: str | None) -> bool:
    """Imports a case's package beforehand, so that no measurement contains that."""
    if package is None:
        return True
    x64 = jax.config.jax_enable_x64
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return False
    # netket turns float64 on for everybody.
    jax.config.update("jax_enable_x64", x64)
    return True


def _skip(case: Case) -> Skipped:
    return Skipped(case.requires or "")


def _compile(
    cases: Sequence[Case], rounds: int
) -> tuple[np.ndarray, dict[str, Any], dict[str, el.Plan | None]]:
    seconds = np.empty((len(cases), rounds))
    programs: dict[str, Any] = {}
    plans: dict[str, el.Plan | None] = {}
    for turn in range(rounds):
        for row, case in enumerate(cases):
            forget()
            with case.under():
                start = time.perf_counter()
                if case.is_compiled:
                    programs[case.name] = jax.jit(case.fn).lower(*case.args).compile()
                else:
                    programs[case.name] = case.fn
                    jax.block_until_ready(case.fn(*case.args))
                seconds[row, turn] = time.perf_counter() - start
                # Here, while the times are known that the program was planned with.
                plans[case.name] = case.plan() if case.plan else None
    return seconds, programs, plans


def _compiled_for_h100(case: Case) -> ForH100 | None:
    if not case.on_h100:
        return None
    forget_programs()
    with case.under():
        return compiled_for_h100(case.fn, *case.args)


def forget() -> None:
    """Empties JAX's caches, and those in which this project keeps what it planned."""
    forget_programs()
    # The times of steps are no cache of a function, and are taken anew as well.
    el.measurements(None)


def forget_programs() -> None:
    """Empties the caches of JAX and of this project, but for the times of steps."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "eqloop":
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _seconds(
    clocks: Sequence[Callable[[], float]], program: Callable[..., Any], *args: Any
) -> list[float]:
    """How long a run takes, by each of the clocks."""
    starts = [clock() for clock in clocks]
    jax.block_until_ready(program(*args))
    return [clock() - start for clock, start in zip(clocks, starts, strict=True)]


def _errors(cases: Sequence[Case], results: dict[str, Any]) -> dict[str, float]:
    references: dict[int, Any] = {}
    return {
        case.name: _error(
            results[case.name],
            references.setdefault(id(case.args), results[case.name]),
        )
        for case in cases
    }


def _error(result: Any, reference: Any) -> float:
    """Compares leaf by leaf; a `nan` anywhere is an infinite error."""
    return float(relative_error(result, reference))


def relative_error(result: Any, reference: Any) -> jax.Array:
    """The same for programs: the greatest difference of any leaf.

    It is relative to the greatest entry of that leaf of the reference.
    """

    def leaf_error(leaf: jax.Array, expected: jax.Array) -> jax.Array:
        scale = jnp.max(jnp.abs(expected), initial=0.0)
        error = jnp.max(jnp.abs(leaf - expected), initial=0.0)
        error /= jnp.where(scale == 0.0, 1.0, scale)
        return jnp.where(jnp.isfinite(error), error, jnp.inf)

    errors = jax.tree.leaves(jax.tree.map(leaf_error, result, reference))
    return jnp.max(jnp.stack(errors), initial=0.0)
