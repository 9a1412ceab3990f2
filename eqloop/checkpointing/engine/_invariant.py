"""Outputs that are the same at every step: computed once, beside the loop."""

from collections.abc import Sequence

import jax.extend.core as jex
from jax.interpreters import partial_eval

from ..._opening import Outputs
from ..._partition import pick
from ..._types import Value
from ._step import Step, reaching, without_outputs


def hoist(
    owner: str, step: Step, consts: Sequence[Value], outputs: Outputs, why: str
) -> tuple[Step, list[Value]]:
    """The step without the outputs that are the same each time, and their values.

    Args:
        owner: The name of the transform, for error messages.
        step: The step; its `y` are the arrays of `outputs`.
        consts: What it gets each time.
        outputs: What is to be the same.
        why: What to say of outputs that are not, see `Outputs.check_same`.

    Raises:
        ValueError: If there are some that are not.
    """
    same = outputs.same
    if not any(same):
        return step, []
    outputs.check_same(owner, varying_outputs(step), why)
    return without_outputs(step, same), evaluate_outputs(step, consts, same)


def varying_outputs(step: Step) -> list[bool]:
    """For every leaf of `y`, whether it depends on the carry or on `x`."""
    _, marks = reaching(
        step,
        consts=[False] * len(step.const_types),
        carry=[True] * len(step.carry_types),
        x=[True] * len(step.x_types),
    )
    return list(marks)


def evaluate_outputs(
    step: Step, consts: Sequence[Value], which: Sequence[bool]
) -> list:
    """The values of outputs that depend on consts only.

    Just the equations that they need are evaluated, so that what the step does besides
    is not done once too often.
    """
    jaxpr = step.jaxpr.jaxpr
    y = jaxpr.outvars[step.num_carry :]
    outvars = pick(y, which)
    needed = {var for var in outvars if not isinstance(var, jex.Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
    pruned = jaxpr.replace(outvars=outvars, eqns=eqns[::-1])
    # What is left may call functions that return more than is needed of them.
    pruned, used = partial_eval.dce_jaxpr(pruned, [True] * len(outvars))
    inputs = [const for const, u in zip(consts, used, strict=False) if u]
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(pruned, ()))(*inputs)
