"""Whether a budget is kept, and its gradient right."""

import re
import traceback
from typing import Any

import jax

import eqloop as el

from ..compiling import AS_USED
from ..random_programs.cases import Case
from ..random_programs.judging import Finding, Skipped, distance, kind_of
from .budgeted import Budgeted


def judge(case: Case) -> Finding | None:
    """What is wrong with a case, if anything is.

    Raises:
        Skipped: If plain JAX cannot evaluate it, or there is nothing to plan.
    """
    assert isinstance(case, Budgeted)
    with case.environment():
        expected = _reference(case)
        try:
            return _judged(case, expected)
        except Skipped:
            raise
        except Exception as error:
            return Finding(case, kind_of(error), "".join(traceback.format_exc()))


# The reference is run three times, on little data, and its memory does not matter.
_QUICK: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def least(case: Budgeted) -> int | None:
    """The least budget that will do, as errors say it; `None` if any does.

    A map's gradient is another map than the one of its value, and may need more.
    """
    nbytes = None
    for _ in range(3 if case.program.transform.name == "ChunkedVmap" else 1):
        try:
            _trace(case, nbytes or 1)
        except ValueError as error:
            said = re.search(r"which is (\d+) bytes", str(error))
            if said is None:
                raise
            nbytes = int(said[1])
        else:
            break
    return nbytes


def _trace(case: Budgeted, nbytes: int) -> None:
    run, args = case.within(case.budget(nbytes))
    jax.jit(run).trace(*args)


def _reference(case: Budgeted) -> tuple[Any, Any, int]:
    """The gradient by plain JAX, how far rounding takes it, and its memory."""
    try:
        run, args = case.reference()
        program = jax.jit(run).lower(*args).compile(_QUICK)
        found = program(*args)
        nudges = case.precision.nudge, -case.precision.nudge
        changed = [program(case.values(by), args[1]) for by in nudges]
        sensitivity = max(distance(found, other) for other in changed)
        return found, sensitivity, _bytes(program)
    except Exception as error:
        raise Skipped(kind_of(error)) from error


def _bytes(program: Any) -> int:
    return program.memory_analysis().temp_size_in_bytes


def _judged(case: Budgeted, expected: Any) -> Finding | None:
    name, smallest = case.name, least(case)
    if smallest is None:
        raise Skipped("nothing to plan")
    budgets, tried = [smallest, round(case.more * smallest)], set[int]()
    for nbytes in budgets:
        if nbytes in tried:
            continue
        tried.add(nbytes)
        run, args = case.within(case.budget(nbytes))
        program = jax.jit(run).lower(*args).compile(AS_USED)
        taken = _bytes(program) - case.slack
        plans = el.plans(run)(*args) if taken > nbytes or case.room else ()
        outer = (loop.plan for loop in plans if not loop.depth)
        elsewhere = sum(p.bytes_elsewhere for p in outer if isinstance(p, el.Plan))
        if elsewhere > case.room:
            detail = f"{elsewhere} of {case.room} bytes\n{plans}"
            return Finding(case, f"more than its second place: {name}", detail)
        if taken - elsewhere * case.has_host > nbytes:
            detail = f"{taken} of {nbytes} bytes, {taken / nbytes:.3f} times as much"
            return Finding(case, f"more than its budget: {name}", f"{detail}\n{plans}")
        # Whether the same plan keeps to this one is found out in a program like it.
        near = taken + 512 + 64 * (len(case.program.inputs) + 1)
        if len(budgets) == 2 and nbytes == budgets[1] and near > smallest:
            budgets.append(near)
    found, sensitivity, by_jax = expected
    worst = distance(found, program(*args))
    if worst > max(case.precision.tolerance, 100 * sensitivity):
        return Finding(case, f"another gradient: {name}", f"off by {worst:.2g}")
    # On several devices sums are added up, and a loop that stops is no scan.
    if case.devices or "While" in str(case.program):
        return None
    run, args = case.checkpointed()
    ways = {"plain": by_jax}
    ways["checkpointed"] = _bytes(jax.jit(run).lower(*args).compile(_QUICK))
    way, enough = min(ways.items(), key=lambda item: item[1])
    if smallest <= enough + case.slack + 1024 + 128 * len(case.program.inputs):
        return None
    detail = f"{smallest} bytes at least, and {way} JAX takes {enough}"
    return Finding(case, f"refuses what JAX takes: {name}", detail)
