"""How a loop under a schedule is differentiated, in every mode.

Such a loop is a primitive of its own, `PlannedLoop`, so that it can say for itself how
it is batched and how it is differentiated. With `F` the loop as a function of its
inputs `p`, and `J(p)` its Jacobian, reverse mode consists of a forward sweep, which
saves slots, and of the primitive `Reverse`, which computes `(p, ct) -> J(p)^T ct` from
them.

All higher derivatives come from one observation. Let `T(p, v) = (F(p), J(p) v)`. It is
a loop again, of the step's jvp, under the same schedule. Its vjp at `(p, v)` takes the
cotangents `(a, b)` to

    (J(p)^T a + d/dp <b, J(p) v>,  J(p)^T b).

So the derivative of `Reverse` in a direction `v` of `p` and `a` of `ct` is the first
part with `b = ct`, since second derivatives are symmetric. Its cotangents, in turn, are
`d/dp <ct, J(p) v>` and `J(p) v`. Thus forward-over-reverse and reverse-over-reverse
keep to the schedule's memory as well.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from ..._formula import (
    Formula,
    Pushed,
    Static,
    Zero,
    instantiated,
    is_zero,
    nonzero,
)
from ..._lists import Arrays, Flags, pick, put, split
from ..._recall import recall
from ...progress import open_back, tied
from . import _forward
from ._forward import Active
from ._layout import Nested, Revolved, Stored
from ._loop import Loop, stack_of, stack_type
from ._problem import (
    Problem,
    activity,
    batched_problem,
    inexact_only,
    merge,
    select,
    tangent_problem,
)
from ._reverse import reverse
from ._slots import slot_type
from ._sweep import Sweep


def planned_loop(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs a loop that is differentiated as its schedule plans: carry and `ys`."""
    inputs = (list(consts), list(init), list(xs))
    carry, ys, _ = PlannedLoop(problem, None, inputs)(*inputs)
    return carry, ys


class PlannedLoop(Formula):
    """`(consts, init, xs) -> (carry, ys, slots)`; there are no slots without a layout.

    The slots have no tangents: `Reverse`, which alone reads them, knows what they mean.
    """

    problem: Problem
    saves: Nested | Revolved | None

    def __init__(self, problem: Problem, saves: Nested | Revolved | None, inputs: Any):
        step, rows = problem.step, problem.loop.rows
        carry = step.carry_types
        slots = 0 if saves is None else saves.primal_slots + 1
        self.in_avals = jax.tree.map(jax.typeof, inputs)
        self.out_aval = (
            carry,
            [stack_type(y, rows) for y in step.y_types],
            []
            if saves is None
            else [slot_type(c, slots, saves.on_host) for c in carry],
        )
        self.params = dict(problem=problem, saves=saves)
        self.effects = step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        if (known := recall(self, self.flat_in(inputs))) is not None:
            return known
        step, loop = self.problem.step, self.problem.loop
        if self.saves is None:
            return (*_forward.primal(step, loop, *inputs), [])
        return _forward.forward(step, loop, self.saves, *inputs)

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        active, y_active = activity(self.problem.step, nonzero(tangents))
        problem = tangent_problem(self.problem, active, y_active)
        inputs = tuple(
            [*primal, *instantiated(pick(tangent, flags))]
            for primal, tangent, flags in zip(primals, tangents, active, strict=True)
        )
        carry, ys, slots = type(self)(problem, self.saves, inputs)(*inputs)
        carry, carry_dot = split(carry, len(active.carry))
        ys, ys_dot = split(ys, len(y_active))
        moves = self.flat_in(nonzero(tangents))
        tangents_out = self.among_zeros(moves, [*carry_dot, *ys_dot])
        return (carry, ys, slots[: len(self.out_aval[2])]), tangents_out

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        again = self.muted(backward=False)
        _, residuals = again.vjp_fwd(perturbed, *inputs)
        return again.vjp_bwd_retval(residuals, cts)

    def vjp_fwd(self, nzs_in: Any, *inputs: Any) -> Any:
        problem = self.problem
        active, y_active = activity(problem.step, nzs_in)
        layout = self.saves or problem.planner.layout(problem, active)
        if isinstance(layout, Stored):
            (carry, ys), residuals = _vjp_stored(problem, active, y_active, inputs)
            slots = []
        else:
            carry, ys, slots = type(self)(problem, layout, inputs)(*inputs)
            residuals = (inputs, slots)
        out = (carry, ys, slots if self.saves else [])
        return out, (Static((layout, active, y_active)), residuals)

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        static, residuals = res
        layout, active, y_active = static.value
        ct_carry, ct_ys, _ = outgrad
        ct_carry = instantiated(pick(ct_carry, active.carry))
        if isinstance(layout, Stored):
            ct_ys = instantiated(pick(ct_ys, y_active))
            cts = _pull_stored(self.problem.loop, residuals, ct_carry, ct_ys)
        else:
            has_rows = self.problem.loop.rows > 0
            wanted = tuple(
                a and has_rows and not is_zero(ct)
                for a, ct in zip(y_active, ct_ys, strict=True)
            )
            args = (*residuals, ct_carry, pick(ct_ys, wanted))
            cts = self._reverse(self.problem, layout, active, wanted, args)(*args)
        return _spread(cts, active, self.in_avals)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        batched, inputs, _, out_dims = self._batched(axis_data, args, dims)
        return batched(*inputs), out_dims

    def batch_pushed(
        self, pushed: Pushed, axis_data: Any, args: Any, dims: Any
    ) -> Any | None:
        """Where tangents are batched as their primals are, the tangents of the batch.

        Elsewhere, as in `jax.jacfwd`, this would batch the primal with its tangents.
        """
        (primals, tangents), (primal_dims, tangent_dims) = args, dims
        moves = pushed.moves
        at = pick(self.flat_in(primal_dims), moves)
        if any(
            (a is None) != (b is None) for a, b in zip(at, tangent_dims, strict=True)
        ):
            return None
        batched, inputs, in_dims, out_dims = self._batched(
            axis_data, primals, primal_dims
        )
        axes = pick(self.flat_in(in_dims), moves)
        tangents = [
            t if axis is None else jnp.moveaxis(_lead(t, dim, axis_data.size), 0, axis)
            for t, dim, axis in zip(tangents, tangent_dims, axes, strict=True)
        ]
        args = (inputs, tangents)
        moves_out = self.moves_out(moves)
        out = Pushed(batched, moves, args)(*args)
        out = batched.flat_out(batched.among_zeros(moves, out))
        return (
            instantiated(pick(out, moves_out)),
            pick(self.flat_out(out_dims), moves_out),
        )

    def muted(self, backward: bool) -> Self:
        return self.with_params(problem=self.problem.muted(backward))

    def guarded(self) -> Self:
        return self.with_params(problem=self.problem.guarded())

    def rewritten(self, rewrite: Callable[[Any], Any]) -> Self:
        step = self.problem.step
        if (jaxpr := rewrite(step.jaxpr)) is step.jaxpr:
            return self
        step = dataclasses.replace(step, jaxpr=jaxpr)
        return self.with_params(problem=dataclasses.replace(self.problem, step=step))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        active, y_active = activity(self.problem.step, self.in_tree.unflatten(moves_in))
        return [*active.carry, *y_active] + [False] * len(self.out_aval[2])

    def _batched(
        self, axis_data: Any, inputs: Any, dims: Any
    ) -> tuple["PlannedLoop", Any, Any, Any]:
        """The loop under `vmap`, its inputs, where they and the outputs are batched."""
        dims = tuple(map(tuple, dims))
        problem, carry, ys = batched_problem(self.problem, axis_data, dims)
        consts, init, xs = inputs
        init = [
            _lead(c, dim, axis_data.size) if flag else c
            for c, dim, flag in zip(init, dims[1], carry, strict=True)
        ]
        inputs = (list(consts), init, list(xs))
        at = lambda axis, flags: [axis if flag else None for flag in flags]
        in_dims = (list(dims[0]), at(0, carry), list(dims[2]))
        out_dims = (at(0, carry), at(1, ys), at(1, carry) if self.saves else [])
        return type(self)(problem, self.saves, inputs), inputs, in_dims, out_dims

    def _reverse(self, *params: Any) -> "Reverse":
        """The reverse sweep that reads the slots of this loop."""
        return Reverse(*params)


class Reverse(Formula):
    """`(inputs, slots, ct_carry, ct_ys) -> cts` of the active inputs, by `Sweep`.

    Attributes:
        wanted: Which of the `ys` have a cotangent; that of the others is zero.
        primal: The class of the formula that this is a derivative of.
    """

    primal: ClassVar[type[PlannedLoop]] = PlannedLoop
    problem: Problem
    layout: Nested | Revolved
    active: Active
    wanted: Flags

    def __init__(
        self,
        problem: Problem,
        layout: Nested | Revolved,
        active: Active,
        wanted: Flags,
        args: Any,
    ):
        self.in_avals = jax.tree.map(jax.typeof, args)
        self.out_aval = tuple(
            [aval.to_ct_aval() for aval in pick(avals, flags)]
            for avals, flags in zip(self.in_avals[0], active, strict=True)
        )
        self.params = dict(problem=problem, layout=layout, active=active, wanted=wanted)
        self.effects = problem.step.jaxpr.effects
        super().__init__()

    def expand(self, inputs: Any, slots: Any, ct_carry: Any, ct_ys: Any) -> Any:
        consts, _, xs = inputs
        ct_ys = put([None] * len(self.wanted), self.wanted, ct_ys)
        problem = self.problem
        sweep = Sweep(
            problem.step, problem.loop, problem.policy, self.active, consts, xs, ct_ys
        )
        cts = reverse(sweep, self.layout, slots, ct_carry)
        return tied(cts.number, (cts.consts, cts.carry, cts.xs))

    def push(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        inputs, _, *cts = primals
        inputs_dot, _, *cts_dot = tangents
        pushed = Active(*map(tuple, nonzero(inputs_dot)))
        direction = select(inputs_dot, pushed)
        pushing = lambda marked: self._push(
            merge(inputs, self.active, marked), pushed, direction
        )
        _, pull = jax.vjp(pushing, select(inputs, self.active))
        (out_dot,) = pull((tuple(instantiated(cts_dot)), tuple(cts)))
        # The cotangents of the direction would give the primal, too. But under `vmap`
        # it would then be batched as the direction is.
        return None, out_dot

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        primals, slots, *ct_outs = inputs
        marks = Active(*map(inexact_only, perturbed[0], primals))
        direction = instantiated(cts)
        pushing = lambda marked: self._push(
            merge(primals, marks, marked), self.active, direction
        )
        (outs, outs_dot), pull = jax.vjp(pushing, select(primals, marks))
        (ct_primals,) = pull((jax.tree.map(jnp.zeros_like, outs), tuple(ct_outs)))
        zero_slots = [Zero(jax.typeof(slot).to_ct_aval()) for slot in slots]
        return (_spread(ct_primals, marks, self.in_avals[0]), zero_slots, *outs_dot)

    def muted(self, backward: bool) -> Self:
        # A sweep that is there already is one whose bar has been shown.
        return self.with_params(problem=self.problem.muted(backward=True))

    def guarded(self) -> Self:
        return self.with_params(problem=self.problem.guarded())

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [any(moves_in)] * len(self.out_avals_flat)

    def _push(self, inputs: Any, active: Active, direction: Any) -> Any:
        """`T` of the module's docstring: those outputs that have cotangents here."""
        problem = self.problem.muted(backward=False)

        def run(*marked: Any) -> tuple[list[Any], list[Any]]:
            moved = merge(inputs, active, marked)
            carry, ys, _ = self.primal(problem, None, moved)(*moved)
            return pick(carry, self.active.carry), pick(ys, self.wanted)

        return jax.jvp(run, select(inputs, active), direction)


def _vjp_stored(
    problem: Problem, active: Active, y_active: Flags, inputs: Any
) -> tuple[Any, Any]:
    """JAX's own derivative of the loop, which stores every residual."""

    def run(number: Any, *marked: Any) -> tuple[Any, Any]:
        step, loop, policy = problem.step, problem.loop, problem.policy
        moved = merge(inputs, active, marked)
        carry, ys, number, here = _forward.stored_with_bars(
            step, loop, policy, number, *moved
        )
        moving = (number, pick(carry, active.carry), pick(ys, y_active))
        return moving, (carry, ys, here)

    number = None if problem.loop.meter is None else jnp.zeros((), jnp.float32)
    _, pull, out = jax.vjp(run, number, *select(inputs, active), has_aux=True)
    carry, ys, here = out
    return tied(here, (carry, ys)), (pull, here)


def _pull_stored(loop: Loop, residuals: Any, ct_carry: Arrays, ct_ys: Arrays) -> Any:
    """Calls what `_vjp_stored` returned, with the bar of the backward sweep."""
    pull, here = residuals
    number = open_back(loop.meter, here, [*ct_carry, *ct_ys])
    number, *cts = pull((number, ct_carry, ct_ys))
    return tied(number, cts)


def _spread(cts: Any, active: Active, avals: Any) -> tuple[list[Any], ...]:
    """Cotangents of the active inputs among zeros for the others."""
    zeros = [[Zero(aval.to_ct_aval()) for aval in group] for group in avals]
    return merge(zeros, active, cts)


def _lead(x: Any, dim: int | None, size: int) -> Any:
    """`x` with its batch axis in front, or with one if it has none."""
    return stack_of(x, size) if dim is None else jnp.moveaxis(x, dim, 0)
