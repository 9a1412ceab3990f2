"""Whether a policy has the steps of a loop evaluated once more."""

import dataclasses
import math

from ..engine._forward import Active
from ..engine._layout import Layout
from ..engine._problem import Problem
from ._cost import gradient_parts
from ._work import rates, work


def computed_again(problem: Problem, active: Active, layout: Layout) -> int:
    """How many steps the policy of a loop has evaluated once more for one gradient."""
    # Where residuals are stored, the reversal of a step computes again what the policy
    # does not keep. A step that is reversed as soon as it has been run computes its
    # values once: with a policy only its effects, such as callbacks, happen once more.
    if problem.policy is None:
        return 0
    stored = layout.steps_read_from_residuals
    again = layout.order.length - stored if problem.step.jaxpr.effects else 0
    if stored:
        everything = dataclasses.replace(problem, policy=None)
        least = _work_of_reversal(everything, active)
        own = _work_of_reversal(problem, active)
        again += stored if own > least and not math.isclose(own, least) else 0
    return again


def _work_of_reversal(problem: Problem, active: Active) -> float:
    """The work of taking a step back from what is stored of it."""
    return work(gradient_parts(problem, active).rest.jaxpr, rates())
