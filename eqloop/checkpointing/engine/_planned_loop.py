"""The primitive for a loop under a schedule.

A loop is a primitive, `PlannedLoop`, so that it decides itself how it is batched and
differentiated. Forward mode is the loop of the step's jvp, under the same schedule.
Reverse mode is a forward sweep, which leaves carries in slots, and another primitive,
`Reverse` (`_reverse.py`), which goes back from them:

    f                  PlannedLoop(step)
    jvp of f           PlannedLoop(jvp of step)
    vmap of f          PlannedLoop(vmap of step)
    grad of f          PlannedLoop(step, saves) -> slots -> Reverse(step)
    jvp of grad of f   PlannedLoop(jvp of step, saves) -> Reverse(jvp of step)

So nothing that JAX is asked for can lead out of these two primitives, and the schedule
is asked for a layout only where one of them is differentiated in reverse mode. A
gradient comes by these functions, in this order. JAX calls those on the left, which are
methods of the base class, `Formula`, or calls `expand` where a primitive is lowered:

    vjp_fwd          PlannedLoop.sweep_forward    a layout, and what the slots hold
    expand           PlannedLoop.expand           `Problem.forward` fills the slots
    vjp_bwd_retval   PlannedLoop.sweep_back       which cotangents there are
    expand           Reverse.expand               `Problem.reverse`, by a `Sweep`
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
    instantiated,
    is_zero,
    pick,
    put,
    type_of,
    union,
    with_batch_axis,
    with_tangent_types,
)
from ..._programs import (
    Doubled,
    Formula,
    Rewrite,
    Static,
    moved_by,
    refuse_callbacks,
    refuse_refs_in_rules,
)
from ..._types import BatchAxis, PyTree, Value
from ...progress import Again, BarChange
from ..rewrites._masked_writes import MaskableLoop, with_masked_writes, written_leaves
from ..steps._step import NoWayBackError, StepResult, reaching
from ._layout import AbstractRunner, Stored
from ._leaves import leaves_computed, without_leaves
from ._listing import is_listing, stands_for_residuals
from ._packing import packing_of
from ._primal import (
    MaybeSaves,
    Outputs,
    residuals_of,
    run_storing,
    saves_of_gradient,
    with_rows,
)
from ._problem import Problem
from ._reverse import AbstractReverse
from ._row_order import in_row_order
from ._transformed import (
    activity,
    batched_problem,
    gradient_back,
    settled_problem,
    tangent_problem,
    with_cotangents,
    without_stored,
)
from .orders._all_at_once import pull_residuals, store_residuals


def planned_loop(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> StepResult:
    """Runs a loop that will be differentiated as its schedule plans.

    It returns the final carry, and `ys`.
    """
    inputs = (list(consts), list(init), in_row_order(xs))
    carry, ys, _ = PlannedLoop(problem, None, inputs).apply(*inputs)
    return carry, ys


class PlannedLoop(MaskableLoop):
    """`(consts, init, xs) -> (carry, ys, stored)`.

    Nothing is stored if `saves` is `None`, as for a loop that is not differentiated.
    What is stored are primal values, and still they have no tangents. Only `Reverse`
    reads them, and its derivatives are computed from the inputs of the loop.

    Attributes:
        problem: The loop.
        saves: Which carries it leaves in slots.
    """

    problem: Problem[Any]
    saves: MaybeSaves
    unit = "iteration"

    def __init__(self, problem: Problem[Any], saves: MaybeSaves, inputs: PyTree):
        step = problem.step
        ys = problem.loop.stacked_types(step.y_types)
        stored = Stored.of()
        if saves is not None:
            last = saves.of_last(step.carry_types)
            stored = problem.stored_types(saves)._replace(last=last)
        self.in_avals = jax.tree.map(type_of, inputs)
        self.out_aval = (step.carry_types, ys, stored)
        self.params = dict(problem=problem, saves=saves)
        self.effects = step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: PyTree) -> PyTree:
        # JAX calls this last, when nothing is left to differentiate or to batch: at
        # once without `jit`, and while lowering under `jit`. So what follows may be
        # plain loops, and slots that no rule of differentiation could get past.
        return self.problem.evaluated(self.saves, inputs)

    def doubled(self, nonzeros: Flags) -> Doubled:
        active, y_active = activity(self.problem.step, self.in_tree.unflatten(nonzeros))
        problem = tangent_problem(self.problem, active, y_active)
        # The slots stay as they are: nobody reads tangents from them. A `Reverse` that
        # needs tangents of carries runs this loop again.
        saves = self.saves and self.saves.with_leaves(sum(active.carry))
        formula = PlannedLoop(problem, saves, with_tangent_types(self.in_avals, active))
        gives = active.carry, y_active, tuple(self._nothing_stored.flat)
        return Doubled.of(formula, active, gives)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        # JAX transposes the tangents of a loop in a program without its primal, so both
        # sweeps run here. The bar of the primal has been shown already.
        if all(map(is_zero, self.flat_out(cts))):
            return self.zero_cts()
        again = self.with_bars(Again())
        # All leaves that vary are perturbed here, as in `jax.checkpoint`, and nobody
        # knows which cotangents will be read. To be safe, the plan has it that those
        # of `init` are not: it then counts one more buffer, see
        # `Problem.undifferentiated`.
        nonzeros = [False] * len(perturbed[1])
        try:
            _, residuals, _ = again._sweep(perturbed, nonzeros, inputs)
        except NoWayBackError:
            used = tuple(not is_zero(ct) for ct in self.flat_out(cts))
            if (smaller := again.keep_outputs(used)) is None:
                raise
        else:
            return again.sweep_back(residuals, cts)
        # The same without what has no cotangent.
        formula, takes, gives = smaller
        take = lambda tree: formula.in_tree.unflatten(pick(self.flat_in(tree), takes))
        given = formula.out_tree.unflatten(pick(self.flat_out(cts), gives))
        in_cts = formula.pull(take(perturbed), take(inputs), given)
        cts = put(self.flat_in(self.zero_cts()), takes, formula.flat_in(in_cts))
        return self.in_tree.unflatten(cts)

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        try:
            # Here JAX marks what is differentiated, and nothing else. So the marks of
            # `init` are also those of the cotangents that the gradient returns.
            return self._sweep(perturbed, perturbed[1], inputs)
        except NoWayBackError:
            # Perhaps no cotangent ever arrives. If one does, `pull` raises this again.
            out, residuals, nonzeros_out = super().sweep_forward(perturbed, *inputs)
            return out, (Static(None), residuals), nonzeros_out

    def _sweep(
        self,
        perturbed: PyTree,
        nonzeros: Sequence[bool],
        inputs: PyTree,
        may_pack: bool = True,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """What `sweep_forward` returns; the plan differentiates `nonzeros` of `init`.

        A loop whose carry is packed runs in place of this one, if it may.
        """
        problem = self.problem
        active, y_active = activity(problem.step, perturbed)
        packing = packing_of(problem, active, self.saves) if may_pack else None
        if packing is not None:
            ins = packing.inputs(inputs)
            loop = PlannedLoop(packing.of(problem), self.saves, ins)
            marks = packing.marks(perturbed)
            _, nonzeros, _ = packing.marks((perturbed[0], nonzeros, perturbed[2]))
            out, swept, moved = loop._sweep(marks, nonzeros, ins, may_pack=False)
            moved = list(active.carry), *moved[1:]
            static = Static((packing, (loop, active)))
            return packing.outputs(*out), (static, swept), moved
        # 1. The plan. Not before: it depends on which leaves vary, and types do not
        # tell. A gradient asks its schedule here, and nowhere else.
        problem.check(active, inputs)
        planned = problem.planned_for(active, nonzeros)
        saves, every = saves_of_gradient(planned, self.saves, active, y_active)
        # 2. The loop runs, and leaves behind what the plan says. Until a cotangent
        # comes, that is all.
        problem = problem.under(saves.layout)
        if saves.layout.stores_residuals:
            # A plain scan, which JAX differentiates.
            about = problem.step, problem.loop, problem.policy, active, y_active
            (carry, ys), residuals = store_residuals(*about, inputs)
            stored = Stored.of()
        else:
            # Where plans are listed, a layout that stores residuals is replaced by one
            # that does not, in a program that is never run.
            if not stands_for_residuals(saves.layout):
                advice = problem.instead_of_effects
                refuse_refs_in_rules(problem.step.jaxpr, advice)
            more = residuals_of(saves.layout, problem, active, y_active)
            # A custom rule computes the primal, too. The forward loop runs that one,
            # and the backward step differentiates the step as the user wrote it.
            primal = settled_problem(problem, active, reverse=True)
            if is_listing():
                primal = dataclasses.replace(primal, original=problem)
            settings = primal, every.at_primal, inputs, more, self.saves
            carry, ys, stored = run_storing(forward_loop, *settings)
            # JAX holds the inputs until the way back. That takes no copies.
            residuals = (inputs, every.of_these(stored, saves))
        # 3. What JAX gets: outputs, residuals, and which outputs have a tangent.
        # If this loop is itself the forward sweep of a gradient, it still has to return
        # what is stored for that one's way back: a part of what both share.
        asked_for = every.of_these(stored, self.saves) if self.saves else Stored.of()
        asked_for = asked_for._replace(rows=[])  # a loop has none, but outputs
        nonzeros_out = (list(active.carry), list(y_active), self._nothing_stored)
        static = Static((None, (saves, active, y_active)))
        return (carry, ys, asked_for), (static, residuals), nonzeros_out

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        static, residuals = residuals
        # The forward sweep found no way back. Now there is a cotangent, and `pull`
        # tries again without the outputs that have none.
        if static.value is None:
            return super().sweep_back(residuals, cts)
        if all(map(is_zero, self.flat_out(cts))):
            return self.zero_cts()
        packing, swept = static.value
        if packing is not None:
            loop, active = swept
            problem = packing.for_ends(loop.problem, active, cts)
            loop = loop.with_params(problem=problem)
            return packing.cotangents(loop.sweep_back(residuals, packing.ends(cts)))
        (saves, active, y_active), (ct_carry, ct_ys, _) = swept, cts
        # Zeros that are only symbols: JAX adds up no arrays for them.
        zeros = self.zero_cts()
        if saves.layout.stores_residuals:
            ends = pick(ct_carry, active.carry), pick(ct_ys, y_active)
            about = self.problem.step, self.problem.loop, residuals
            cts = pull_residuals(*about, *map(instantiated, ends))
            return tuple(map(put, zeros, active, cts))
        inputs, stored = residuals
        # A callback is refused here and not in the forward sweep: without a cotangent,
        # no step is run again.
        if not stands_for_residuals(saves.layout):
            again = "The gradient of this loop runs steps again"
            instead = self.problem.instead_of_effects
            refuse_callbacks(self.effects, again, instead)
        problem, layout = self.problem.under(saves.layout), saves.layout
        # Only now is it known which outputs have a cotangent. The slots may hold more
        # than that needs.
        has_ct = [[not is_zero(ct) for ct in cts] for cts in (ct_carry, ct_ys)]
        needed = with_cotangents(self.problem.step, active, *has_ct)
        both = [a and has for a, has in zip(y_active, has_ct[1], strict=True)]
        wanted = with_rows(problem, both)
        ends = instantiated(pick(ct_carry, needed.carry)), pick(ct_ys, wanted)
        more = residuals_of(layout, problem, active, y_active)
        primal = settled_problem(problem, active, reverse=True)
        back = gradient_back(problem, needed, wanted)
        args = (inputs, stored, *ends)
        settings = without_stored(primal), back, layout, saves.given, args, more
        # It is called, and so becomes an equation. For a second derivative JAX finds a
        # primitive here, and no loops whose every step it would store.
        cts = Reverse(*settings).checked()(*args)
        return tuple(map(put, zeros, needed, cts))

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        active, _ = activity(self.problem.step, self.in_tree.unflatten(nonzeros))
        return self.with_params(problem=settled_problem(self.problem, active, reverse))

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        problem, saves = self.problem, self.saves
        apart = problem.batched_apart(self, saves, axis_data, args, dims)
        if apart is not None:
            return apart
        # All examples run as long.
        dims = tuple(map(tuple, dims))
        batched, carry, ys = batched_problem(problem, axis_data, dims)
        consts, init, xs = args
        init = [
            with_batch_axis(c, dim, axis_data) if flag else c
            for c, dim, flag in zip(init, dims[1], carry, strict=True)
        ]
        args = (list(consts), init, list(xs))
        formula = PlannedLoop(batched, saves, args)
        at = lambda axis, flags: [axis if flag else None for flag in flags]
        stored: Stored = formula.out_aval[2]
        if saves is not None:
            # The integers are the same for all examples. Slots have their rows along
            # the first axis, so they are batched along the second; the leaves of the
            # last carry have no rows.
            (held, final), known = saves.needs, carry[problem.lead :]
            stored = stored._replace(
                integers=[None] * len(stored.integers),
                carries=at(1, pick(known, held)),
                last=at(0, pick(known, final)),
            )
        return formula, args, [*at(0, carry), *at(1, ys), *stored.flat]

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.problem.step.jaxpr]

    @property
    def times(self) -> int:
        return self.problem.loop.length or 1

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(problem=self.problem.with_bars(change))

    def rewritten(self, rewrite: Rewrite) -> Self:
        step = self.problem.step
        if (jaxpr := rewrite(step.jaxpr)) is step.jaxpr:
            return self
        step = dataclasses.replace(step, jaxpr=jaxpr)
        return self.with_params(problem=dataclasses.replace(self.problem, step=step))

    @property
    def written(self) -> dict[int, int]:
        step = self.problem.step
        # An inverse reads what it undoes. What a loop moves from one buffer to another
        # goes on to a third one in its next steps, so it is not followed.
        if self.saves is not None or step.inverse is not None:
            return {}
        flags = enumerate(written_leaves(step, nowhere_else=True))
        return {step.num_consts + i: i for i, flag in flags if flag}

    def masked(
        self, places: list[int], operands: list[Value], mask: Value
    ) -> list[Value]:
        problem, step = self.problem, self.problem.step
        written = (step.num_consts + i in places for i in range(step.num_carry))
        masked = with_masked_writes(step, tuple(written))
        consts, init, xs = self.in_tree.unflatten(operands)
        # The mask is a const of the inner loop: an example does not stop in the middle
        # of a step of the outer one.
        args = ([*consts, mask], init, xs)
        loop = PlannedLoop(dataclasses.replace(problem, step=masked), self.saves, args)
        return loop.flat_out(loop(*args))

    @property
    def steps(self) -> tuple[jex.ClosedJaxpr, tuple[int, ...]]:
        return self.problem.step.jaxpr, tuple(map(len, self.in_avals[:2]))

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return list(map(bool, moved_by(self, nonzeros_in)))

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        problem, groups = self.problem, self.in_tree.unflatten(marks)
        carry, ys = reaching(problem.step, *groups, axis_name=axis_name)
        lead, stored = problem.lead, self._nothing_stored
        if self.saves is not None:
            (held, final), known = self.saves.needs, carry[lead:]
            carries, last = pick(known, held), pick(known, final)
            # The number of steps tells when the loop has ended, and so depends on all.
            counts = [any(marks)] * len(stored.integers)
            stored = Stored(counts, carries, last, stored.rows)
        # If an example may run longer than another (the first leaf of the carry is
        # reached), all of its outputs differ. With an inverse, more leaves may be
        # batched than depend on the inputs (`_reaching_both_ways`), and slots may be
        # batched that do not depend on them.
        is_batch = axis_name is not None
        is_known = not is_batch or (self.saves is None and problem.step.inverse is None)
        if not is_known or any(carry[:lead]):
            return super().reached_out(marks, axis_name)
        return [*carry, *ys, *stored.flat]

    def keep_outputs(self, used: Flags) -> tuple[Formula, Flags, Flags] | None:
        problem, saves = self.problem, self.saves
        step, meter = problem.step, problem.loop.meter
        carry, ys, stored = self.out_tree.unflatten(used)
        own, lead, stored = problem.own_leaves, problem.lead, stored.flat
        # 1. Which leaves of the carry are needed: those that are used, those that slots
        #    hold, those that decide how the loop goes on, and what these depend on.
        if not any(stored):
            saves = None
        elif saves is not None:
            carry = union(carry, (*[False] * lead, *union(*saves.needs)))
        carry = leaves_computed(step, [True] * own + carry[own:], ys)
        kept = *[True] * step.num_consts, *carry, *[True] * len(step.x_types)
        # 2. Is there anything to leave out? A bar may show any of the leaves.
        has_bars = meter.here.is_shown or meter.back.is_shown
        is_whole = all((*kept, *ys, any(stored) == bool(stored)))
        if has_bars or step.jaxpr.effects or is_whole:
            return None
        # 3. The loop without the other leaves.
        step = without_leaves(step, carry, ys)
        loop = problem.loop.of_leaves(carry, ys)
        problem = dataclasses.replace(problem, step=step, loop=loop)
        if saves is not None:
            saves = saves.of_leaves(lambda flags: pick(flags, carry[lead:]))
        consts, init, xs = self.in_avals
        formula = PlannedLoop(problem, saves, (consts, pick(init, carry), xs))
        gives = *carry, *ys, *[saves is not None] * len(stored)
        return formula, tuple(kept), tuple(gives)

    def dce(self, used_outs: PyTree, *live_ins: PyTree) -> tuple[PyTree, PyTree, Any]:
        # Of a loop, XLA removes what nobody reads; of a kernel it cannot.
        if self._runner is not None and any(used := self.flat_out(used_outs)):
            smaller = self.keep_outputs(tuple(used))
            if smaller is not None:
                formula, takes, gives = smaller
                unflatten = self.in_tree.unflatten, self.out_tree.unflatten
                return unflatten[0](takes), unflatten[1](gives), formula
        return super().dce(used_outs, *live_ins)

    @property
    def _runner(self) -> AbstractRunner | None:
        saves = self.saves
        return self.problem.planner.runner if saves is None else saves.layout.runner

    @property
    def _nothing_stored(self) -> Stored:
        return Stored(*([False] * len(group) for group in self.out_aval[2]))


def forward_loop(problem: Problem, saves: MaybeSaves, inputs: PyTree) -> Outputs:
    """The loop within a forward sweep, whose derivatives are planned in turn."""
    return PlannedLoop(problem, saves, inputs)(*inputs)


class Reverse(AbstractReverse):
    """The way back, whose derivatives run planned loops."""

    def run(self, problem: Problem, saves: MaybeSaves, inputs: PyTree) -> Outputs:
        return forward_loop(problem, saves, inputs)
