"""How a loop of unknown length is differentiated, in every mode.

It is closed under derivatives just as a loop of known length is, so `PlannedLoop` tells
how (see there). The loop of the step's jvp stops when the primal does, since tangents
are no part of what the condition reads.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._doubled import recall
from ..._formula import Formula, Selected
from ..._lists import Arrays, pick
from ..._reaching import names_axis
from ...progress import tied
from ..engine._layout import Nested
from ..engine._primitive import PlannedLoop, Reverse
from ..engine._problem import Problem, activity
from ..engine._slots import slot_type
from ..engine._step import Step
from ..engine._sweep import Sweep
from ._batch import joint_loop, stops_apart
from ._forward import forward, primal
from ._layout import Online
from ._metered import closed, opened
from ._reverse import reverse, unconditional
from ._varying import axes_of, check_consts, vary


def planned_while(problem: Problem, consts: Arrays, init: Arrays) -> list[Any]:
    """Runs a loop while the first leaf of its carry says so, as its planner plans."""
    inputs = (list(consts), list(init), [])
    loop = PlannedWhile(problem, None, jax.tree.map(jax.typeof, inputs))
    return loop.apply(*inputs)[0]


class PlannedWhile(PlannedLoop):
    """`(consts, init, xs) -> (carry, ys, saved)`, with neither `xs` nor `ys`.

    What is saved is that of `forward`: a few integers, then the slots.
    """

    instead_of_effects: ClassVar[str] = (
        "Run so many steps with `el.Scan` and `schedule=el.StoreAll()`"
    )
    saves: Any  # Nested | Online | None

    def expand(self, *inputs: Any) -> Any:
        if (known := recall(self, self.flat_in(inputs))) is not None:
            return known
        (consts, init, _), step, loop = inputs, self.problem.step, self.problem.loop
        init = opened(loop.meter, consts, init)
        if self.saves is None:
            carry, saved = primal(step, loop.length, consts, init), []
        else:
            carry, saved = forward(step, self.saves, consts, init)
        carry, saved = closed(loop.meter, carry, (carry, saved))
        return carry, [], saved

    def sweep_forward(self, perturbed: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        step = self.problem.step
        active, _ = activity(step, perturbed)
        check_consts(axes_of(inputs[1][0]), pick(step.const_types, active.consts))
        return super().sweep_forward(perturbed, *inputs)

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        if self.saves is not None:
            check_apart(self, axis_data)
            return Formula.batched(self, axis_data, args, dims)
        dims = tuple(map(tuple, dims))
        if not stops_apart(self.problem, axis_data, dims):
            return super().batched(axis_data, args, dims)
        consts, init, _ = args
        problem, consts, init = joint_loop(self.problem, axis_data, consts, init, dims)
        args = (list(consts), list(init), [])
        joint = PlannedWhile(problem, None, jax.tree.map(jax.typeof, args))
        is_of_example = (False, *[True] * (len(joint.out_avals_flat) - 1))
        formula = Selected.of(joint, is_of_example)
        return formula, args, [0] * len(formula.out_avals_flat)

    def _slot_types(self, step: Step, layout: Any) -> list[Any]:
        return _saved(layout, step.carry_types)

    @property
    def reversal(self) -> type[Reverse]:
        return ReverseWhile


class ReverseWhile(Reverse):
    """The same, for what `forward` saves; the way back knows not whether to go on."""

    there: ClassVar[type[PlannedLoop]] = PlannedWhile
    lead: ClassVar[int] = 1

    @staticmethod
    def _read(step: Step) -> Step:
        return unconditional(step)

    def expand(self, inputs: Any, slots: Any, carried: Any, zs: Any) -> Any:
        if not self.has_run:
            slots = self._forward(inputs)
        (consts, _, _), loop = inputs, self.problem.loop
        sweep = Sweep(self._again, loop, self.back, consts, [], [], count=slots[0])
        cts = reverse(sweep, self.layout, slots, carried)
        return tied(cts.number, (cts.consts, cts.carry, cts.xs))

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        check_apart(self, axis_data)
        return super().batched(axis_data, args, dims)

    def _forward(self, inputs: Any) -> list[Any]:
        consts, init, _ = inputs
        step = self.problem.step.muted(backward=True)
        return forward(step, self.layout, consts, init)[1]

    def _pull_written_out(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        raise ValueError(
            "A while loop cannot be differentiated twice in reverse mode if there is a "
            "`jax.custom_vjp` in its body whose backward rule is not linear in the "
            "cotangent that it is given, as one that clips it is not: the way back "
            "would have to be stored, and how long it is is not known. Take one of the "
            "derivatives in forward mode (`jax.jacfwd(jax.grad(f))`), or run the steps "
            "with `el.Scan`."
        )


def check_apart(formula: Formula, axis_data: Any) -> None:
    """Sees to it that examples can be reversed each by itself.

    Raises:
        ValueError: If they depend on each other.
    """
    if any(names_axis(jaxpr, axis_data.name) for jaxpr in formula.jaxprs):
        raise ValueError(
            f"`jax.vmap` over the gradient of a while loop with collectives over "
            f"{axis_data.name!r} in it: each example is reversed from its own last "
            f"step, and so the steps that collectives are to join do not meet. Take "
            f"the gradient of the batch instead, `jax.grad` of a sum over the "
            f"`jax.vmap`, or run the steps with `el.Scan`."
        )


def _saved(layout: Nested | Online, carry: Arrays) -> list[Any]:
    """The types of what a forward sweep saves."""
    if isinstance(layout, Nested):
        shapes, rows = [()], layout.primal_slots
    else:
        shapes, rows = [(), (layout.slots,), (layout.slots,)], layout.slots + 1
    # A type names the mesh in use, so it is best that JAX makes it.
    axes = axes_of(carry[0])
    integers = lambda: [vary(jnp.zeros(shape, jnp.int32), axes) for shape in shapes]
    marks = jax.make_jaxpr(integers)().out_avals
    return [*marks, *(slot_type(c, rows, on_host=False) for c in carry[1:])]
