"""Makes while loops of scans within a step that could end early, where it is only run.

A bounded while loop that JAX can differentiate is written as a scan of all iterations,
each of which is a branch: the body, or nothing. The stages of a Runge-Kutta method in
Diffrax are such a scan, of 16 iterations, the last 9 of which do nothing:

    scan(lambda c: cond(goes_on(c), body, lambda c: c))

If an iteration does nothing, then none after it does anything: they get the same carry,
and a scan without `xs` gives them nothing else. So where nothing differentiates the
step, it can be a while loop again. This runs no iteration in vain, and does not have to
copy the carry for a branch.

On a CPU it gains nothing: without, 1.01 times the time in the median of five solves,
and 1.04 times at the most. It is there for GPUs, where each branch waits for the host,
as the condition of a while loop does: of the 16 iterations above, 9 are not entered.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
from jax import lax

from ..._arrays import axes_of, is_symbolic, split
from ..._compat import close, scan_counts
from ..._programs import (
    Rewrite,
    aval_of,
    called,
    formula_of,
    map_programs,
    pruned,
    rewrite_everywhere,
    run,
    with_equations,
    with_parts,
)
from ..._types import Index, Value
from ..engine._loop import zero
from ..engine._step import Step
from ..engine.leaves._dce import dce


@functools.lru_cache(maxsize=128)
def only_run(step: Step) -> Step:
    """A step of the same meaning that is faster to run; JAX cannot differentiate it.

    If a custom derivative is involved, the step is the primal of a derivative
    (`settled`), in which inner loops fill slots. Nothing reads these here, so `dce`
    removes them.
    """
    return with_early_ends(dce_step(step))


@functools.lru_cache(maxsize=128)
def dce_step(step: Step) -> Step:
    """A step of the same meaning without what is there for derivatives alone."""
    used = (True,) * len(step.jaxpr.out_avals)
    return step.rewritten(lambda program: dce(program, used))


@functools.lru_cache(maxsize=128)
def with_early_ends(step: Step) -> Step:
    """A step whose scans are while loops if possible; JAX cannot differentiate it."""
    return step.rewritten(
        lambda program: rewrite_everywhere(_with_early_ends_within, program)
    )


def _with_early_ends_within(
    program: jex.ClosedJaxpr, rewrite: Rewrite
) -> jex.ClosedJaxpr:
    # The loops of this library do this themselves, where they run their steps.
    eqns = [
        _with_early_end(map_programs(eqn, rewrite)) if formula_of(eqn) is None else eqn
        for eqn in program.eqns
    ]
    return with_equations(program, eqns)


class _EndingScan(NamedTuple):
    """A scan that does nothing from some iteration on.

    Attributes:
        goes_on: From consts and carry to whether the next iteration does anything.
        body: From consts and carry to the next carry, if it does.
    """

    goes_on: jex.ClosedJaxpr
    body: jex.ClosedJaxpr


def _with_early_end(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """An equation, or a while loop in its place."""
    parts = _ending_scan(eqn)
    if parts is None:
        return eqn
    length, count = eqn.params["length"], scan_counts(eqn.params)[0]

    def loop(*flat: Value) -> list[Value]:
        consts, init = split(flat, count)

        def goes_on(state: tuple[Index, list[Value]]) -> Value:
            # A scan need not become idle before its length, so this is tested as well.
            return (state[0] < length) & run(parts.goes_on, *consts, *state[1])[0]

        def move(state: tuple[Index, list[Value]]) -> tuple[Index, list[Value]]:
            return state[0] + 1, run(parts.body, *consts, *state[1])

        return lax.while_loop(goes_on, move, (zero(), init))[1]

    return _calling(jax.make_jaxpr(loop)(*map(aval_of, eqn.invars)), eqn)


def _ending_scan(eqn: jex.JaxprEqn) -> _EndingScan | None:
    """The parts of a scan, if it has a branch one side of which changes nothing."""
    # The effects of idle iterations would be lost.
    if eqn.primitive.name != "scan" or eqn.effects:
        return None
    if is_symbolic(eqn.params["length"]) or any(
        axes_of(aval_of(x)) for x in eqn.invars
    ):
        return None
    program, counts = close(eqn.params["jaxpr"]), scan_counts(eqn.params)
    jaxpr = program.jaxpr
    if len(jaxpr.invars) != sum(counts) or len(jaxpr.outvars) != counts[1]:
        return None  # it has `xs` or `ys`
    for place, branch in enumerate(jaxpr.eqns):
        if branch.primitive.name != "cond" or len(branch.params["branches"]) != 2:
            continue
        for which, idle in enumerate(map(close, branch.params["branches"])):
            after = _after_idle(branch, idle.jaxpr, jaxpr.outvars)
            # Each leaf is handed on at its own place, so the carry no longer changes.
            # The test reads nothing but consts and carry: once idle, always idle.
            if after == list(jaxpr.invars[counts[0] :]):
                return _parts_of_scan(program, place, 1 - which)
    return None


def _after_idle(
    branch: jex.JaxprEqn, idle: jex.Jaxpr, outvars: Sequence[jax.core.Atom]
) -> list[jax.core.Atom | None]:
    """The variables that some outputs are the same as, if one branch is taken.

    Args:
        branch: The `cond`.
        idle: The program of that branch.
        outvars: The outputs of the program around the `cond`.

    Returns:
        A variable for each output, or `None` if the branch computes the output.
    """
    operands = dict(zip(idle.invars, branch.invars[1:], strict=True))
    # What a branch computes is none of its operands, and literals are no variables.
    given = [
        None if isinstance(x, jex.Literal) else operands.get(x) for x in idle.outvars
    ]
    same = dict(zip(branch.outvars, given, strict=True))
    return [None if isinstance(x, jex.Literal) else same.get(x, x) for x in outvars]


def _parts_of_scan(program: jex.ClosedJaxpr, place: int, taken: int) -> _EndingScan:
    """Takes the body of a scan apart.

    Args:
        program: The body.
        place: The place of the `cond` among its equations.
        taken: Which of the two branches changes the carry.
    """
    jaxpr = program.jaxpr
    branch = jaxpr.eqns[place]
    # An index that is neither 0 nor 1 is for the last branch.
    is_taken = lambda index: (index != 0) if taken else (index == 0)
    (test,) = called(jax.make_jaxpr(is_taken)(aval_of(branch.invars[0]))).eqns
    test = test.replace(invars=branch.invars[:1])
    body = _calling(close(branch.params["branches"][taken]), branch, first=1)
    before, after = jaxpr.eqns[:place], jaxpr.eqns[place + 1 :]

    def part(eqns: list[jex.JaxprEqn], outvars: list[jax.core.Atom]) -> jex.ClosedJaxpr:
        return pruned(with_parts(program, eqns=eqns, outvars=outvars))

    # What comes before the branch is in both parts. The condition of a while loop hands
    # no values to its body; `pruned` leaves each what it reads.
    goes_on = part([*before, test], list(test.outvars))
    return _EndingScan(goes_on, part([*before, body, *after], list(jaxpr.outvars)))


def _calling(
    program: jex.ClosedJaxpr, eqn: jex.JaxprEqn, first: int = 0
) -> jex.JaxprEqn:
    """An equation that calls a program, in place of another one.

    Args:
        program: The program.
        eqn: The other equation.
        first: The first of its operands that the program takes.
    """
    (call,) = called(program).eqns
    return call.replace(invars=eqn.invars[first:], outvars=eqn.outvars)
