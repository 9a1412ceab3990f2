"""How a loop of unknown length is differentiated, in every mode.

It is closed under derivatives just as a loop of known length is, so `PlannedLoop` tells
how (see there). The loop of the step's jvp stops when the primal does, since tangents
are no part of what the condition reads.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._formula import Formula, Pushed
from ..._lists import Arrays, pick
from ..._recall import recall
from ...progress import tied
from ..engine._layout import Nested
from ..engine._loop import stack_type
from ..engine._primitive import PlannedLoop, Reverse
from ..engine._problem import Problem, activity
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
    return PlannedWhile(problem, None, inputs)(*inputs)[0]


class PlannedWhile(PlannedLoop):
    """`(consts, init, xs) -> (carry, ys, saved)`, with neither `xs` nor `ys`.

    What is saved is that of `forward`: a few integers, then the slots.
    """

    saves: Any  # Nested | Online | None

    def __init__(self, problem: Problem, saves: Nested | Online | None, inputs: Any):
        carry = problem.step.carry_types
        self.in_avals = jax.tree.map(jax.typeof, inputs)
        self.out_aval = (carry, [], [] if saves is None else _saved(saves, carry))
        self.params = dict(problem=problem, saves=saves)
        self.effects = problem.step.jaxpr.effects
        Formula.__init__(self)

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

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        step = self.problem.step
        active, _ = activity(step, nzs_in)
        check_consts(axes_of(inputs[1][0]), pick(step.const_types, active.consts))
        return super().vjp_fwd(nzs_in, *inputs)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        if self.saves is not None:
            return Formula.batch(self, axis_data, args, dims)
        dims = tuple(map(tuple, dims))
        if not stops_apart(self.problem, axis_data, dims):
            return super().batch(axis_data, args, dims)
        consts, init, _ = args
        problem, consts, init = joint_loop(self.problem, axis_data, consts, init, dims)
        _, *carry = planned_while(problem, consts, init)
        return (carry, [], []), ([0] * len(carry), [], [])

    def batch_pushed(
        self, pushed: Pushed, axis_data: Any, args: Any, dims: Any
    ) -> Any | None:
        dims_of_primals = tuple(map(tuple, dims[0]))
        if self.saves or stops_apart(self.problem, axis_data, dims_of_primals):
            return None
        return super().batch_pushed(pushed, axis_data, args, dims)

    def _reverse(self, *params: Any) -> "ReverseWhile":
        return ReverseWhile(*params)


class ReverseWhile(Reverse):
    """`(inputs, slots, ct_carry, ct_ys) -> cts`, for slots as `forward` saves them."""

    primal: ClassVar[type[PlannedLoop]] = PlannedWhile
    layout: Any  # Nested | Online

    def expand(self, inputs: Any, slots: Any, ct_carry: Any, ct_ys: Any) -> Any:
        consts, _, _ = inputs
        problem = self.problem
        step = unconditional(problem.step)
        active = self.active._replace(carry=self.active.carry[1:])
        sweep = Sweep(
            step, problem.loop, problem.policy, active, consts, [], [], count=slots[0]
        )
        cts = reverse(sweep, self.layout, slots, ct_carry)
        return tied(cts.number, (cts.consts, cts.carry, cts.xs))


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
    return [*marks, *(stack_type(c, rows) for c in carry[1:])]
