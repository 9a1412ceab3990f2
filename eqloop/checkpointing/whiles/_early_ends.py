"""Scans within a step that end early, where the step is only run.

A while loop of at most so many iterations that JAX can differentiate is a scan of all
of them, each of them a branch: the body, or nothing. So are the stages of a Runge-Kutta
method in Diffrax: a scan of 16 iterations of which the last 9 do nothing. Where nothing
differentiates the step they are a while loop again, which runs no more iterations than
it has to, and need not copy its carry for a branch.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.core
import jax.extend.core as jex
from jax import lax

from ..._array_types import axes_of
from ..._axes import is_symbolic
from ..._compat import close, scan_counts
from ..._equations import (
    Rewrite,
    aval_of,
    formula_of,
    map_programs,
    rewrite_everywhere,
)
from ..._partition import split
from ..._programs import called, pruned, run
from ..._types import Index, Value
from ..engine._loop import zero
from ..engine._step import Step
from ..engine.leaves._lean import lean


@functools.lru_cache(maxsize=128)
def only_run(step: Step) -> Step:
    """A step of the same meaning for where it is run; JAX cannot differentiate it.

    If there is a custom derivative in the step, its primals are those of a derivative
    (`settled`), for which a loop in it fills slots. Here nothing would read them.
    """
    return with_early_ends(leaned(step))


@functools.lru_cache(maxsize=128)
def leaned(step: Step) -> Step:
    """A step of the same meaning without what is there for derivatives alone."""
    used = (True,) * len(step.jaxpr.out_avals)
    return step.rewritten(lambda program: lean(program, used))


@functools.lru_cache(maxsize=128)
def with_early_ends(step: Step) -> Step:
    """A step of the same meaning whose scans end early; JAX cannot differentiate it."""
    return step.rewritten(
        lambda program: rewrite_everywhere(_with_early_ends_within, program)
    )


def _with_early_ends_within(
    program: jex.ClosedJaxpr, rewrite: Rewrite
) -> jex.ClosedJaxpr:
    # A loop of this library does so itself, where it runs its steps.
    eqns = [
        _with_early_end(map_programs(eqn, rewrite)) if formula_of(eqn) is None else eqn
        for eqn in program.eqns
    ]
    if all(a is b for a, b in zip(eqns, program.eqns, strict=True)):
        return program
    return jex.ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)


class _EndingScan(NamedTuple):
    """A scan whose carry stays as it is from some iteration on.

    Attributes:
        goes_on: From its consts and its carry to whether it changes the carry.
        body: From the same to the next carry.
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
            return (state[0] < length) & run(parts.goes_on, *consts, *state[1])[0]

        def move(state: tuple[Index, list[Value]]) -> tuple[Index, list[Value]]:
            return state[0] + 1, run(parts.body, *consts, *state[1])

        return lax.while_loop(goes_on, move, (zero(), init))[1]

    return _calling(jax.make_jaxpr(loop)(*map(aval_of, eqn.invars)), eqn)


def _ending_scan(eqn: jex.JaxprEqn) -> _EndingScan | None:
    """The parts of a scan, if it has a branch that leaves its carry as it is."""
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
            if after == list(jaxpr.invars[counts[0] :]):
                return _parts_of_scan(program, place, 1 - which)
    return None


def _after_idle(
    branch: jex.JaxprEqn, idle: jex.Jaxpr, outvars: Sequence[jax.core.Atom]
) -> list[jax.core.Atom | None]:
    """What variables are the same as if one of two branches is taken, where known.

    Args:
        branch: The equation.
        idle: What that branch runs.
        outvars: The variables.
    """
    operands = dict(zip(idle.invars, branch.invars[1:], strict=True))
    # What a branch computes is none of its operands, and literals are no variables.
    given = [
        None if isinstance(x, jex.Literal) else operands.get(x) for x in idle.outvars
    ]
    same = dict(zip(branch.outvars, given, strict=True))
    return [None if isinstance(x, jex.Literal) else same.get(x, x) for x in outvars]


def _parts_of_scan(program: jex.ClosedJaxpr, place: int, taken: int) -> _EndingScan:
    """The parts of what a scan runs.

    Args:
        program: What it runs.
        place: Which of the equations is the branch.
        taken: Which of two branches changes the carry.
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
        unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        own = jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=unnamed)
        return pruned(jex.ClosedJaxpr(own, program.consts))

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
