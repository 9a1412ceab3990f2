"""What loops that end when their carry says so cannot do, and what to do instead."""

import dataclasses
import functools
from typing import Any, ClassVar, NoReturn

import jax.extend.core as jex
from jax.interpreters import partial_eval

from ..._array_types import axes_of
from ..._formula import Formula
from ..._partition import pick
from ..._reaching import names_axis
from ..._typecheck import PyTree
from ..._types import BatchAxis
from ..engine._back import Back
from ..engine._forward import Active
from ..engine._problem import Problem
from ..engine._repetition import AbstractRepetition
from ..engine._short_loops import without_short_loops
from ..engine._step import Step


@dataclasses.dataclass(frozen=True)
class AbstractStopping(AbstractRepetition):
    """A loop goes on for as long as the first leaf of its carry says so.

    It is closed under derivatives just as a loop of known length is. The loop of the
    step's jvp stops when the primal does, since tangents are no part of what the
    condition reads.

    Attributes:
        is_joint: Whether it is the loop of a batch whose examples stop apart, see
            `_batch.py`.
    """

    is_joint: bool = dataclasses.field(default=False, kw_only=True)

    instead_of_effects: ClassVar[str] = (
        "Run so many steps with `el.Scan` and `schedule=el.StoreAll()`"
    )
    lead: ClassVar[int] = 1

    def reversed_step(self, step: Step) -> Step:
        return _unconditional(step)

    def written_out_loops(self, back: Back) -> Back:
        """What the way back does to a step, with short loops in it written out.

        Not in the joint loop of a batch: branches that depend on the example are
        selections there, and stay. Written out, such a step takes longer.
        """
        return back if self.is_joint else back.mapped(without_short_loops)

    def check(self, problem: Problem, active: Active, inputs: PyTree) -> None:
        """Checks the types of consts that have a cotangent.

        If such a const were the same on all devices, they would add up its cotangents,
        and so wait for each other, at every step.
        """
        axes = axes_of(inputs[1][0])
        consts = pick(problem.step.const_types, active.consts)
        if all(axes <= axes_of(const) for const in consts):
            return
        names = tuple(sorted(axes))
        raise ValueError(
            "A while loop that stops at its own time on each device cannot be "
            "differentiated in reverse mode with respect to arrays that are the same "
            "on all of them, if `body` closes over these. Make them leaves of `body`, "
            "as those of a module are, or pass "
            f'`jax.lax.pcast(x, {names}, to="varying")`.'
        )

    def check_batched(self, formula: Formula, axis_data: BatchAxis) -> None:
        """Checks that examples can be reversed each by itself."""
        if any(names_axis(jaxpr, axis_data.name) for jaxpr in formula.jaxprs):
            raise ValueError(
                f"`jax.vmap` over the gradient of a while loop with collectives over "
                f"{axis_data.name!r} in it: each example is reversed from its own "
                f"last step, so a collective would combine values of different "
                f"steps. Take the gradient of the batch instead, `jax.grad` of a sum "
                f"over the `jax.vmap`, or run the steps with `el.Scan`."
            )

    def written_out(
        self, problem: Problem, back: Any, step: Step, inputs: PyTree, ends: PyTree
    ) -> NoReturn:
        raise ValueError(
            "A while loop cannot be differentiated twice in reverse mode if there is a "
            "`jax.custom_vjp` in its body whose backward rule is not linear in the "
            "cotangent (for example, one that clips it): the backward pass would have "
            "to be stored, and its number of steps is not known. Take one of the "
            "derivatives in forward mode (`jax.jacfwd(jax.grad(f))`), or run the steps "
            "with `el.Scan`."
        )


@functools.lru_cache(maxsize=128)
def _unconditional(step: Step) -> Step:
    """The step without the first leaf of its carry, and without what it is made by."""
    kept = [True] * len(step.jaxpr.in_avals)
    kept[step.num_consts] = False
    jaxpr, _ = partial_eval.dce_jaxpr(
        step.jaxpr.jaxpr,
        [False] + [True] * (len(step.jaxpr.out_avals) - 1),
        instantiate=kept,
    )
    closed = jex.ClosedJaxpr(jaxpr, step.jaxpr.consts)
    return Step(closed, step.num_consts, step.num_carry - 1)
