"""The primitive for a loop under a schedule, and the one for its way back.

A loop is a primitive, `PlannedLoop`, so that it decides itself how it is batched and
differentiated. Forward mode is the loop of the step's jvp, under the same schedule.
Reverse mode is a forward sweep, which leaves carries in slots, and another primitive,
`Reverse`, which goes back from them:

    f                  PlannedLoop(step)
    jvp of f           PlannedLoop(jvp of step)
    vmap of f          PlannedLoop(vmap of step)
    grad of f          PlannedLoop(step, saves) -> slots -> Reverse(step)
    jvp of grad of f   PlannedLoop(jvp of step, saves) -> Reverse(jvp of step)

The way back is a primitive so that second derivatives keep to the schedule's memory,
too. If JAX differentiated the loops of a reverse sweep, it would store residuals of all
steps. Here the derivative of a reverse sweep is a forward loop and a reverse sweep
again, which are planned anew:

    reverse        h0 <- h1 <- h2 <- h3      cotangents of the carry, from h3 to h0
    its reverse    h0 -> h1 -> h2 -> h3      cotangents of these, along with the carry
                   h0 <- h1 <- h2 <- h3      and then those of the carry itself

The first line is linear in the cotangents that it carries. So its derivative with
respect to them, the second line, needs no values of the first.

So nothing that JAX is asked for can lead out of these two primitives, and the schedule
is asked for a layout only where one of them is differentiated in reverse mode. A
gradient comes by these functions, in this order. JAX calls those on the left, which are
methods of the base class, `Formula`, or calls `expand` where a primitive is lowered:

    vjp_fwd          PlannedLoop.sweep_forward    a layout, and what the slots hold
    expand           PlannedLoop.expand           `Problem.forward` fills the slots
    vjp_bwd_retval   PlannedLoop.sweep_back       which cotangents there are
    expand           Reverse.expand               `Problem.reverse`, as follows

From there on the way back goes through `Layout.reverse` to its order, which goes back
by a `Walk`; through the reversal, `Sweep.take` and `BackwardStep`, to the `vjp` of the
step (`Pull.__call__`); and with its cotangents through `Sweep.added` to the next block.
Steps that are reversed together bypass `Sweep.take` (`_joined` in
`reversals/_together.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
    cast_like,
    closed_under,
    inexact_only,
    instantiated,
    is_zero,
    pick,
    put,
    split,
    type_of,
    union,
    with_batch_axis,
    with_tangent_types,
    zero_cotangent,
)
from ..._programs import (
    Doubled,
    Formula,
    Rewrite,
    Static,
    behind,
    is_only_transposed,
    joined,
    makes_refs,
    mapped,
    reached,
    recall,
    refuse_callbacks,
    refuse_refs_in_rules,
)
from ..._types import BatchAxis, PyTree, Value
from ...progress import Again, BarChange, tied
from ._backward_step import BackwardStep, BlockResult, program_of
from ._derived import (
    NotLinearError,
    Pulled,
    Pushed,
    differentiated_once,
    forward_step_of_reverse,
)
from ._forward import Active
from ._layout import AbstractLayout, AbstractRunner, Needs, Saves, Stored
from ._listing import is_listing, listed, stands_for_residuals
from ._logs import logging_of
from ._loop import zero
from ._packing import packing_of
from ._problem import (
    Problem,
    activity,
    again,
    all_active,
    batched_problem,
    gradient_back,
    needs_of_gradient,
    settled_problem,
    tangent_problem,
    with_cotangents,
    without_stored,
)
from ._step import NoWayBackError, Step, reaching, without_outputs
from ._stored_rows import (
    StoredOfSteps,
    StoredProducts,
    StoredResiduals,
    products_to_store,
    residuals_to_store,
)
from ._substitute import Substitute
from ._sweep import KnownProducts, KnownResiduals, Sweep
from ._walk import Walk
from .leaves._needed_leaves import leaves_computed, needs_of, without_leaves
from .leaves._restricted_steps import Restricted, StoredLeaves, restricted
from .leaves._row_lists import listing
from .orders._all_at_once import pull_residuals, store_residuals

# What runs in place of a loop where that is differentiated; each in place of the one
# before it, if both do.
SUBSTITUTES: tuple[Callable[..., Substitute | None], ...] = (logging_of, packing_of)


def planned_loop(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Value], list[Value]]:
    """Runs a loop that will be differentiated as its schedule plans.

    Returns:
        The final carry, and `ys`.
    """
    inputs = (list(consts), list(init), list(xs))
    carry, ys, _ = PlannedLoop(problem, None, inputs).apply(*inputs)
    return carry, ys


class PlannedLoop(Formula):
    """`(consts, init, xs) -> (carry, ys, stored)`.

    Nothing is stored if `saves` is `None`, as for a loop that is not differentiated.
    What is stored are primal values, and still they have no tangents. Only `Reverse`
    reads them, and its derivatives are computed from the inputs of the loop.

    Attributes:
        problem: The loop.
        saves: Which carries it leaves in slots.
    """

    problem: Problem[Any]
    saves: Saves[AbstractLayout] | None
    unit = "iteration"

    def __init__(
        self,
        problem: Problem[Any],
        saves: Saves[AbstractLayout] | None,
        inputs: PyTree,
    ):
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
        # In forward mode the equation for the tangents has run the loop already.
        if (known := recall(self, self.flat_in(inputs))) is not None:
            return known
        carry, ys, stored = self.problem.forward(self.saves, inputs)
        last = [] if self.saves is None else self.saves.of_last(carry)
        return carry, ys, stored._replace(last=last)

    def doubled(self, moves: Flags) -> Doubled:
        active, y_active = self._activity(moves)
        problem = tangent_problem(self.problem, active, y_active)
        # The slots stay as they are: nobody reads tangents from them. A `Reverse` that
        # needs tangents of carries runs this loop again.
        saves = self.saves and self.saves.with_leaves(sum(active.carry))
        formula = PlannedLoop(problem, saves, with_tangent_types(self.in_avals, active))
        gives = active.carry, y_active, tuple(self._nothing_stored.flat)
        return Doubled.of(formula, active, gives)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.pull_logs(perturbed, inputs, cts)[0]

    def pull_logs(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> tuple[PyTree, PyTree]:
        # JAX transposes the tangents of a loop in a program without its primal, so both
        # sweeps run here. The bar of the primal has been shown already.
        if all(map(is_zero, self.flat_out(cts))):
            return self.zero_cts(), None
        again = self.with_bars(Again())
        # All leaves that vary are perturbed here, as in `jax.checkpoint`, and nobody
        # knows which cotangents will be read. To be safe, the plan has it that those
        # of `init` are not: it then counts one more buffer, see
        # `Problem.undifferentiated`.
        moves = [False] * len(perturbed[1])
        try:
            _, residuals, _ = again._sweep(perturbed, moves, inputs)
        except NoWayBackError:
            used = tuple(not is_zero(ct) for ct in self.flat_out(cts))
            if (smaller := again.keep_outputs(used)) is None:
                raise
            return self._pull_by(*smaller, perturbed, inputs, cts)
        return again.sweep_back(residuals, cts)

    def _pull_by(
        self,
        formula: Formula,
        takes: Flags,
        gives: Flags,
        perturbed: PyTree,
        inputs: PyTree,
        cts: PyTree,
    ) -> tuple[PyTree, PyTree]:
        """The same without what has no cotangent, by `keep_outputs`."""
        take = lambda tree: formula.in_tree.unflatten(pick(self.flat_in(tree), takes))
        given = formula.out_tree.unflatten(pick(self.flat_out(cts), gives))
        pulled, log = formula.pull_logs(take(perturbed), take(inputs), given)
        cts = put(self.flat_in(self.zero_cts()), takes, formula.flat_in(pulled))
        return self.in_tree.unflatten(cts), log

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        try:
            # Here JAX marks what is differentiated, and nothing else. So the marks of
            # `init` are also those of the cotangents that the gradient returns.
            return self._sweep(perturbed, perturbed[1], inputs)
        except NoWayBackError:
            # Perhaps no cotangent ever arrives. If one does, `pull` raises this again.
            out, residuals, moves_out = super().sweep_forward(perturbed, *inputs)
            return out, (Static(None), residuals), moves_out

    def _sweep(
        self,
        perturbed: PyTree,
        moves: Sequence[bool],
        inputs: PyTree,
        kinds: Sequence[Callable[..., Substitute | None]] = SUBSTITUTES,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The forward sweep of a gradient.

        Args:
            perturbed: A mark for each of the inputs.
            moves: Which leaves of `init` the plan counts as differentiated.
            inputs: The inputs.
            kinds: The kinds of loops that may run in place of this one.

        Returns:
            What `sweep_forward` returns.
        """
        problem = self.problem
        active, y_active = activity(problem.step, perturbed)
        for at, kind in enumerate(kinds, 1):
            if (instead := kind(problem, active, self.saves)) is not None:
                ins = instead.inputs(inputs)
                loop = PlannedLoop(instead.of(problem), self.saves, ins)
                marks = instead.marks(perturbed)
                _, moves, _ = instead.marks((perturbed[0], moves, perturbed[2]))
                out, swept, moved = loop._sweep(marks, moves, ins, kinds[at:])
                out = instead.carry(out[0]), *out[1:]
                moved = list(active.carry), *moved[1:]
                return out, (Static((instead, (loop, active))), swept), moved
        # 1. The plan. Not before: it depends on which leaves vary, and types do not
        # tell. A gradient asks its schedule here, and nowhere else.
        problem.check(active, inputs)
        planned = problem.planned_for(active, moves)
        saves = self._saves_of_gradient(planned, active, y_active)
        # 2. The loop runs, and leaves behind what the plan says. Until a cotangent
        # comes, that is all.
        problem = problem.under(saves.layout)
        if saves.layout.stores_residuals:
            # A plain scan, which JAX differentiates.
            settings = problem.step, problem.loop, problem.policy
            (carry, ys), residuals = store_residuals(
                *settings, active, y_active, inputs
            )
            stored = Stored.of()
        else:
            # Where plans are listed, a layout that stores residuals is replaced by one
            # that does not, in a program that is never run.
            if not stands_for_residuals(saves.layout):
                instead = problem.instead_of_effects
                refuse_refs_in_rules(problem.step.jaxpr, instead)
            more = _stored_of_steps(saves.layout, problem, active, y_active)
            # A custom rule computes the primal, too. The forward loop runs that one,
            # and the backward step differentiates the step as the user wrote it.
            primal = settled_problem(problem, active, reverse=True)
            carry, ys, stored = _run_primal(primal, saves, more, inputs)
            # JAX holds the inputs until the way back. That takes no
            # copies.
            residuals = (inputs, stored)
        # 3. What JAX gets: outputs, residuals, and which outputs have a tangent.
        # If this loop is itself the forward sweep of a gradient, it still has to return
        # what is stored for that one's way back: a part of what both share.
        asked_for = saves.of_these(stored, self.saves) if self.saves else Stored.of()
        out = (carry, ys, asked_for)
        moves_out = (list(active.carry), list(y_active), self._nothing_stored)
        swept = saves, active, y_active
        return out, (Static((None, swept)), residuals), moves_out

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> tuple[PyTree, PyTree]:
        static, residuals = residuals
        # The forward sweep found no way back. Now there is a cotangent, and `pull`
        # tries again without the outputs that have none.
        if static.value is None:
            return super().sweep_back(residuals, cts)
        if all(map(is_zero, self.flat_out(cts))):
            return self.zero_cts(), None
        instead, swept = static.value
        if instead is None:
            return self._cotangents(swept, residuals, cts), None
        loop, active = swept
        problem = instead.for_ends(loop.problem, active, cts)
        loop = loop.with_params(problem=problem)
        cts, _ = loop.sweep_back(residuals, instead.ends(cts))
        return instead.cotangents(cts)

    def _cotangents(
        self,
        swept: tuple[Saves[AbstractLayout], Active, Flags],
        residuals: PyTree,
        outgrad: PyTree,
    ) -> PyTree:
        saves, active, y_active = swept
        ct_carry, ct_ys, _ = outgrad
        if saves.layout.stores_residuals:
            ends = pick(ct_carry, active.carry), pick(ct_ys, y_active)
            loop = self.problem.loop
            cts = pull_residuals(loop, residuals, *map(instantiated, ends))
        else:
            # Only now is it known which outputs have a cotangent. The slots may hold
            # more than that needs.
            has_ct = [[not is_zero(ct) for ct in cts] for cts in (ct_carry, ct_ys)]
            needed = with_cotangents(self.problem.step, active, *has_ct)
            cts = self._reversed(swept, needed, residuals, ct_carry, ct_ys)
            active = needed
        # Zeros that are only symbols: JAX adds up no arrays for them.
        return tuple(map(put, self.zero_cts(), active, cts))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = self._activity(moves)
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

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(problem=self.problem.with_bars(change))

    def rewritten(self, rewrite: Rewrite) -> Self:
        step = self.problem.step
        if (jaxpr := rewrite(step.jaxpr)) is step.jaxpr:
            return self
        step = dataclasses.replace(step, jaxpr=jaxpr)
        return self.with_params(problem=dataclasses.replace(self.problem, step=step))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        active, y_active = self._activity(moves_in)
        return [*active.carry, *y_active, *self._nothing_stored.flat]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        problem, groups = self.problem, self.in_tree.unflatten(marks)
        carry, ys = reaching(problem.step, *groups, axis_name=axis_name)
        lead, stored = problem.lead, self._nothing_stored
        if self.saves is not None:
            (held, final), known = self.saves.needs, carry[lead:]
            carries, last = pick(known, held), pick(known, final)
            stored = stored._replace(carries=carries, last=last)
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
        if (
            has_bars
            or step.jaxpr.effects
            or all((*kept, *ys, any(stored) == bool(stored)))
        ):
            return None
        # 3. The loop without the other leaves.
        step = without_leaves(step, carry, ys)
        paths = problem.loop.carry_paths
        paths = tuple(pick(paths, carry)) if len(paths) == len(carry) else ()
        starts = pick(problem.loop.padded_starts(len(carry)), carry)
        steps, leaves = problem.loop.stored
        loop = dataclasses.replace(
            problem.loop,
            carry_paths=paths,
            starts=tuple(starts),
            stored=(steps, sum(ys[:leaves])),
        )
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

    def _activity(self, moves: Sequence[bool]) -> tuple[Active, Flags]:
        return activity(self.problem.step, self.in_tree.unflatten(moves))

    def _saves_of_gradient(
        self, problem: Problem, active: Active, y_active: Flags
    ) -> Saves[AbstractLayout]:
        """Which carries the forward sweep of a gradient stores.

        If this loop already stores carries for another way back, the two share a
        layout, and the slots hold the leaves that either of them reads.
        """
        if self.saves is not None:
            layout = self.saves.layout
        else:
            bare = without_stored(problem)
            layout = bare.layout(active)
            # JAX's own derivative of a scan has rows of all steps, or of none.
            layout = layout if bare is problem else layout.by_carries()
            # A reference that a step makes cannot be handed from the way there to the
            # way back.
            if layout.steps_with_residuals and makes_refs(problem.step.jaxpr):
                layout = layout.by_carries()
        layout = listed(layout, active, problem.undifferentiated)
        if layout.stores_residuals:
            return Saves(layout, Needs((), ()))
        problem = problem.under(layout)
        wanted = _with_rows(problem, y_active)
        needs = needs_of_gradient(problem, active, wanted, layout)
        if self.saves is not None:
            needs = needs.with_those_of(self.saves.needs)
        fitted = layout.for_needs(problem.step, needs)
        if fitted is not layout:
            # What is noted is found by its identity.
            fitted = listed(fitted, active, problem.undifferentiated)
        return Saves(fitted, needs)

    @property
    def _nothing_stored(self) -> Stored:
        return Stored(*([False] * len(group) for group in self.out_aval[2]))

    def _reversed(
        self,
        swept: tuple[Saves[AbstractLayout], Active, Flags],
        needed: Active,
        residuals: PyTree,
        ct_carry: Arrays,
        ct_ys: Arrays,
    ) -> PyTree:
        """The cotangents of the `needed` inputs.

        Args:
            swept: What the forward sweep stored, and which inputs and leaves of `y`
                are active.
            needed: Which of the inputs have a cotangent other than zero.
            residuals: The inputs, and what is stored.
            ct_carry: The cotangents of the final carry.
            ct_ys: The cotangents of `ys`.
        """
        (saves, active, y_active), (inputs, stored) = swept, residuals
        # A callback is refused here and not in the forward sweep: without a cotangent,
        # no step is run again.
        if not stands_for_residuals(saves.layout):
            again = "The gradient of this loop runs steps again"
            instead = self.problem.instead_of_effects
            refuse_callbacks(self.effects, again, instead)
        problem, layout = self.problem.under(saves.layout), saves.layout
        has_ct = [a and not is_zero(ct) for a, ct in zip(y_active, ct_ys, strict=True)]
        wanted = _with_rows(problem, has_ct)
        ends = instantiated(pick(ct_carry, needed.carry)), pick(ct_ys, wanted)
        more = _stored_of_steps(layout, problem, active, y_active)
        primal = settled_problem(problem, active, reverse=True)
        back = gradient_back(problem, needed, wanted)
        args = (inputs, stored, *ends)
        settings = without_stored(primal), back, layout, saves.given, args, more
        # It is called, and so becomes an equation. For a second derivative JAX finds a
        # primitive here, and no loops whose every step it would store.
        return Reverse(*settings).checked()(*args)


class Reverse(Formula):
    """`(inputs, stored, carried, zs) -> (sums, carried, xs)`, by a `Sweep`.

    In a gradient, the inputs are those of the forward loop, `stored` is what that has
    left behind, `carried` are the cotangents of the final carry, and `zs` those of
    `ys`. The outputs are the cotangents of the active consts, leaves of the initial
    carry, and `xs`.

    In a derivative of a gradient, `carried` and `zs` have more in them; which entries
    these are is up to the backward step (`_backward_step.py`).

    Attributes:
        problem: The forward loop.
        back: The backward step.
        layout: Which carries are in slots, and how the loop is reversed.
        given: Which leaves of a carry, and of the last one, are stored. `None` if the
            forward loop has to run first, because nothing is stored, or not all of the
            leaves that are read are.
        more: What more is stored of the last steps, if anything is.
    """

    problem: Problem[Any]
    back: BackwardStep
    layout: AbstractLayout
    given: Needs | None
    more: StoredOfSteps | None
    unit = "iteration"
    is_backward = True

    def __init__(
        self,
        problem: Problem[Any],
        back: BackwardStep,
        layout: AbstractLayout,
        given: Needs | None,
        inputs: PyTree,
        more: StoredOfSteps | None = None,
    ):
        in_avals = jax.tree.map(type_of, inputs)
        (consts, _, xs), _, carried, _ = in_avals
        ct_types = lambda avals, at: [avals[i].to_ct_aval() for i in at]
        self.in_avals = in_avals
        self.out_aval = (
            ct_types(consts, back.const_of),
            list(carried),
            ct_types(xs, back.x_of),
        )
        params = dict(problem=problem, back=back, layout=layout)
        self.params = params | dict(given=given, more=more)
        self.effects = problem.step.jaxpr.effects
        super().__init__()

    def expand(
        self, inputs: PyTree, stored: Stored, carried: PyTree, zs: PyTree
    ) -> PyTree:
        # 1. What is stored. If slots do not outlast the primal, or lack a leaf, the
        # forward loop runs now, right before it is reversed.
        (consts, init, xs), given, problem = inputs, self.given, self.problem
        if given is None:
            given = self.needed
            stored = self._forward(inputs, given)._replace(rows=stored.rows)
        # 2. The programs. The way back counts steps, so the leaves at the start by
        # which the forward loop decides whether to go on are gone.
        init = init[problem.lead :]
        step, back = self.again, self.back
        # If slots lack leaves, the programs of the step and of the backward step are
        # cut down to the leaves that are there.
        known = None if all(given.held) else self._known_of_carry(given)
        if known is not None:
            none = list[Value]([None] * len(given.final))
            last = put(none, given.final, stored.last)
            made = known.consts(last, init, consts, xs, problem.loop)
            consts = [*consts, *made]
            step, back = restricted(step, known), Restricted(back, known)
        products, residuals = self._known_rows(stored.rows, consts, known)
        first = pick(init, given.held)
        paths = problem.loop.carry_paths[problem.lead :]
        paths = tuple(pick(paths, given.held)) if len(paths) == len(init) else ()
        # 3. The way back. The layout's order says which block is next, and moves by the
        # `walk`: this runs `step` again, and takes cotangents past steps by `back`.
        sweep = Sweep(
            step,
            dataclasses.replace(problem.loop, carry_paths=paths),
            back,
            consts,
            xs,
            zs,
            products,
            residuals,
            init=first,
            gauge=problem.loop.meter.back.of(problem.loop.length),
        )
        walk = Walk(sweep, self.layout.reversal)
        cts = problem.reverse(walk, self.layout, stored, carried)
        # The sums may be wider than the consts, and are cast once, here.
        sums = list(map(cast_like, cts.consts, self.out_aval[0]))
        # Without this tie XLA would drop the reports to the bar, which nothing reads.
        return tied(cts.number, (sums, cts.carry, cts.xs))

    def doubled(self, moves: Flags) -> Doubled:
        marks, _, _, _ = self.in_tree.unflatten(moves)
        active, y_active = activity(self.problem.step, marks)
        # If only `carried` and `zs` have tangents, the carries do not move, and the
        # slots that are there will do.
        if not any(map(any, active)):
            return self._doubled_ends()
        # The carries move, so their tangents are needed at every step. The slots that
        # are there lack them: the forward loop is planned, and run, once more.
        problem = tangent_problem(self.problem, active, y_active)
        inputs, _, carried, zs = self.in_avals
        in_avals = (
            with_tangent_types(inputs, active),
            Stored.of(),
            carried * 2,
            zs * 2,
        )
        formula = self._derived(problem, Pushed, active, in_avals)
        return self._as_doubled(formula, active, uses_stored=False)

    def _doubled_ends(self) -> Doubled:
        active = Active(*((False,) * len(group) for group in self.in_avals[0]))
        back = Pushed(self.back, self.again, self._known(active))
        inputs, stored, carried, zs = self.in_avals
        in_avals = (inputs, stored, carried * 2, zs * 2)
        settings = self.problem, back, self.layout, self.given
        formula = Reverse(*settings, in_avals, self.more)
        return self._as_doubled(formula.checked(), active, uses_stored=True)

    def _as_doubled(
        self, formula: "Reverse", active: Active, uses_stored: bool
    ) -> Doubled:
        _, stored, *ends = self.in_avals
        all_of = lambda groups: tuple((True,) * len(group) for group in groups)
        nothing, moving_ends = (False,) * len(stored.flat), all_of(ends)
        moves = (*active, nothing, *moving_ends)
        doubled = Doubled.of(formula, moves, all_of(self.out_aval))
        if uses_stored:
            return doubled
        uses = joined((*all_of(active), nothing, *moving_ends))
        return dataclasses.replace(
            doubled, uses=uses, ins=behind((*active, *moving_ends))
        )

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        """Reverse mode of the reverse sweep: a forward loop, and a reverse sweep.

        See the top of this file. The forward loop carries `[*carry, *cotangents of what
        is carried back]`, and its consts and `xs` have the cotangents of the outputs
        behind them.
        """
        (primals, _, carried, zs), problem = inputs, self.problem
        active, _ = activity(problem.step, perturbed[0])
        cts = instantiated(cts)
        try:
            # The forward loop and the backward step have been differentiated once, so
            # what is differentiated now are the rules of custom derivatives in them.
            primal = settled_problem(problem, active, reverse=True)
            back = differentiated_once(
                self.back, self.again, self._known(active), reverse=True
            )
            step = forward_step_of_reverse(back, primal.step.rewritten(Again()))
        except NotLinearError:
            return self._pull_written_out(perturbed, inputs, cts)
        # The forward loop carries the carry and `b`, see `_derived.py`. The cotangents
        # of the returned `xs` are scanned along with `xs`, by the same axes.
        axes = [problem.loop.x_axes[i] for i in self.back.x_of]
        meter = problem.loop.meter.again.tangents
        loop = dataclasses.replace(
            problem.loop, x_axes=(*problem.loop.x_axes, *axes), meter=meter
        )
        problem = dataclasses.replace(problem, step=step, loop=loop)
        args = tuple([*p, *ct] for p, ct in zip(primals, cts, strict=True))
        count = len(primals[1])
        zeros, none_stored, *_ = self.zero_cts()
        if not any(map(any, active)):
            # Only the cotangents are differentiated: the forward loop does it all.
            carry, ct_zs, _ = PlannedLoop(problem, None, args)(*args)
            return zeros, none_stored, carry[count:], ct_zs
        # At the end of the loop, the carry has no cotangent: a reverse sweep reads the
        # carries before steps, and the last one is before none.
        ct_carry = [
            instantiated(zero_cotangent(c))
            for c in pick(self.in_avals[0][1], active.carry)
        ]
        ends = ([*carried, *ct_carry], zs)
        # This first formula is only asked for its layout, and for which leaves its
        # backward step reads. The forward loop then stores these for the second one.
        formula = self._derived(problem, Pulled, active, (args, Stored.of(), *ends))
        saves = Saves(formula.layout, formula.needed)
        carry, ct_zs, stored = _run_storing(problem, saves.at_primal, args)
        given = (args, stored, *ends)
        settings = problem, formula.back, saves.layout, saves.given
        formula = Reverse(*settings, given)
        # Both loops are primitives, so a third derivative comes this way again.
        sums, carried_on, ct_xs = formula(*given)
        ct_init = carried_on[len(carried) :]
        ct_primals = map(put, zeros, active, (sums, ct_init, ct_xs))
        return tuple(ct_primals), none_stored, carry[count:], ct_zs

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = activity(self.problem.step, self.in_tree.unflatten(moves)[0])
        problem = settled_problem(self.problem, active, reverse)
        back = differentiated_once(self.back, self.again, self._known(active), reverse)
        return self.with_params(problem=problem, back=back).checked()

    def checked(self) -> Self:
        """The same, unless its slots lack a leaf: then it runs the forward loop first.

        That happens where a derivative reads leaves that the gradient did not.
        """
        if isinstance(self.more, StoredResiduals) and self.back.base is not self.back:
            # It takes more back than cotangents, and needs the carries for that.
            layout = self.layout.by_carries()
            new = self.with_params(given=None, more=None, layout=layout)
            layout = layout.for_needs(self.problem.step, new.needed)
            return new.with_params(layout=layout)
        if self.given is None or self.given.serves(self.needed):
            return self
        layout = self.layout.for_needs(self.problem.step, self.needed)
        return self.with_params(given=None, layout=layout)

    @property
    def reads(self) -> Flags:
        reads = jax.tree.map(lambda _: True, self.in_avals)
        if self.given is not None:
            # The initial carry is in the first slot. As an input it is read only for
            # buffers whose rows are written once (`leaves/_rows_once.py`), or if the
            # layout says so.
            inputs, *others = reads
            consts, _, xs = inputs
            init = self._known_of_carry(self.given).firsts
            if self.layout.reads_init:
                init = union(init, self.given.held)
            init = [False] * self.problem.lead + init
            reads = (consts, init, xs), *others
        return tuple(jax.tree.leaves(reads))

    @property
    def needed(self) -> Needs:
        """Which leaves of the carries the backward step reads, or needs to compute."""
        loop, layout = self.problem.loop_back, self.layout
        return needs_of(self.back, self.again, loop, layout.block, layout.carries)

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.problem.step.jaxpr, self.back.base.step.jaxpr]

    def with_bars(self, change: BarChange) -> Self:
        change = change.in_reverse
        back = self.back.mapped(lambda step: step.rewritten(change))
        return self.with_params(problem=self.problem.with_bars(change), back=back)

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [any(moves_in)] * len(self.out_avals_flat)

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        (consts, init, xs), stored, carried, zs = self.in_tree.unflatten(marks)
        carry, _ = reaching(self.problem.step, consts, init, xs)
        lead = self.problem.lead
        # A batch has all outputs batched; and if the number of steps is reached, or a
        # carry in a slot, so is everything.
        if axis_name is not None or any((*carry[:lead], *stored.flat)):
            return super().reached_out(marks, axis_name)
        program, around = program_of(self.back), (*consts, *carry[lead:], *xs, *zs)
        counts = len(self.out_aval[0]), len(carried)
        outs = lambda carried: split(reached(program, (*around, *carried)), *counts)
        carried = closed_under(carried, lambda carried: outs(carried)[1])
        sums, _, xs = outs(carried)
        return [*sums, *carried, *xs]

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        return mapped(self, axis_data, args, dims)

    @property
    def again(self) -> Step:
        """The step that is run again to get from a stored carry to later ones."""
        return again(self.problem)

    def _known_rows(
        self, rows: Arrays, consts: Arrays, known: StoredLeaves | None
    ) -> tuple[KnownProducts | None, KnownResiduals | None]:
        """What more is stored of the last steps, with programs that take it.

        Args:
            rows: The rows of it.
            consts: The consts of the step, which may be followed by others.
            known: Which leaves of a carry are known, if not all are.
        """
        more, length = self.more, self.problem.loop.length
        if isinstance(more, StoredResiduals):
            first = length - self.layout.steps_with_residuals
            own = consts[: self.problem.step.num_consts]
            return None, more.known(rows, first, own)
        if not isinstance(more, StoredProducts):
            return None, None
        products = more.products
        step = without_outputs(products.step)
        back = self.back.with_products(products)
        if known is not None:
            step = restricted(step, known)
            back = None if back is None else Restricted(back, known)
        first = length - self.layout.steps_with_products
        return KnownProducts(rows, first, step, back), None

    def _known(self, active: Active) -> Active:
        return active._replace(carry=active.carry[self.problem.lead :])

    def _known_of_carry(self, given: Needs) -> StoredLeaves:
        return StoredLeaves.of(given, self.again, self.problem.loop_back)

    def _derived(
        self,
        problem: Problem[Any],
        kind: Callable[..., BackwardStep],
        active: Active,
        in_avals: PyTree,
    ) -> "Reverse":
        """The derivative whose forward loop is given; it has no slots yet."""
        # What is only transposed is never run, and no schedule could differentiate it.
        is_run = not is_only_transposed(problem.step.jaxpr)
        layout = problem.layout(all_active(problem.step)) if is_run else self.layout
        # `by_carries`, as a `Reverse` goes back from stored carries. By `StoreAll` it
        # stores all of them, and no residuals.
        layout = layout.by_carries()
        back = kind(self.back, self.again, self._known(active))
        formula = Reverse(problem, back, layout, None, in_avals)
        layout = layout.for_needs(problem.step, formula.needed)
        return formula.with_params(layout=layout)

    def _forward(self, inputs: PyTree, needs: Needs) -> Stored:
        problem = self.problem.with_bars(Again(backward=True))
        # The primal has returned `ys` already, and stored the residuals of some steps,
        # if any.
        step, rest = without_outputs(problem.step), self.layout.steps_with_residuals
        loop = problem.loop.cut_at(problem.loop.length - rest)[0]
        problem = dataclasses.replace(
            problem, step=step, loop=loop if rest else problem.loop
        )
        # Not called but expanded: this is within the expansion of a primitive already,
        # and nothing differentiates it any more.
        expand = lambda loop, *inputs: loop.expand(*inputs)
        return _run_storing(problem, Saves(self.layout, needs), inputs, expand)[2]

    def _pull_written_out(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> PyTree:
        """The same by JAX's own derivative of two loops, with every carry stored.

        For a custom rule that is not linear in its cotangents. Then the derivative with
        respect to these depends on their values at every step.
        """
        primals, _, *ends = inputs
        run = functools.partial(self.problem.written_out, self.back, self.again)
        marks = Active(*map(inexact_only, perturbed[0], primals))
        of_marked = lambda m, ends: run(tuple(map(put, primals, marks, m)), ends)
        _, pull = jax.vjp(of_marked, tuple(map(pick, primals, marks)), tuple(ends))
        ct_marked, ct_ends = pull(BlockResult(*cts))
        zeros, none_stored, *_ = self.zero_cts()
        return (tuple(map(put, zeros, marks, ct_marked)), none_stored, *ct_ends)


def _with_rows(problem: Problem[Any], ys: Sequence[bool]) -> Flags:
    """The marked leaves of `y`, or none if the loop keeps no rows of `ys`."""
    return tuple(mark and problem.loop.rows > 0 for mark in ys)


def _stored_of_steps(
    layout: AbstractLayout, problem: Problem[Any], active: Active, y_active: Flags
) -> StoredOfSteps | None:
    """What more the primal stores of its last steps, if the layout asks."""
    # Where plans are listed, a loop has no leaves but its own: its plan is looked up by
    # them. That program is never run.
    if is_listing():
        return None
    wanted = _with_rows(problem, y_active)
    if layout.steps_with_residuals:
        return residuals_to_store(problem, active, wanted)
    if layout.steps_with_products:
        products = products_to_store(problem, active, wanted)
        return None if products is None else StoredProducts(products)
    return None


def _run_primal(
    problem: Problem[Any],
    saves: Saves[AbstractLayout],
    more: StoredOfSteps | None,
    inputs: PyTree,
) -> tuple[list[Value], list[Value], Stored]:
    """Runs the loop of a forward sweep: the final carry, `ys`, and what is stored."""
    if more is None:
        return _run_storing(problem, saves.at_primal, inputs)
    layout = saves.layout
    count = layout.steps_with_residuals or layout.steps_with_products
    storing = more.stored_by(problem, count)
    carry, ys, stored = _run_storing(storing, saves.at_primal, inputs)
    rows, ys = split(ys, more.leaves)
    return carry, ys, stored._replace(rows=rows)


def _run_storing(
    problem: Problem[Any],
    saves: Saves[AbstractLayout] | None,
    inputs: PyTree,
    run: Callable[..., Any] = lambda loop, *inputs: loop(*inputs),
) -> tuple[list[Value], list[Value], Stored]:
    """Runs a loop that stores what `saves` says, lists of rows among it.

    Args:
        problem: The loop.
        saves: What it stores.
        inputs: Consts, the initial carry and `xs`.
        run: How the primitive is called.
    """
    known = saves and StoredLeaves.of(saves.needs, again(problem), problem.loop_back)
    # Where plans are listed, a loop has no leaves but its own, see `_stored_of_steps`.
    if saves is None or known is None or not known.lists or is_listing():
        return run(PlannedLoop(problem, saves, inputs), *inputs)
    # The lists are leaves of the carry: a loop writes to these in place.
    (consts, init, xs), lead, lists = inputs, problem.lead, known.lists
    count, (held, final) = len(init), saves.needs
    of_list = [leaf in dict(lists) for leaf in range(len(final))]
    step = listing(problem.step, tuple(lists), lead)
    starts = (*problem.loop.padded_starts(count), 0)
    loop = dataclasses.replace(problem.loop, starts=starts, carry_paths=())
    problem = dataclasses.replace(problem, step=step, loop=loop)
    others = [f and not in_list for f, in_list in zip(final, of_list, strict=True)]
    needs = Needs(
        (*held, *[False] * (1 + len(lists))),
        (*others, False, *[True] * len(lists)),
    )
    init = [*init, zero(), *(own.started(init[lead + leaf]) for leaf, own in lists)]
    inputs, saves = (consts, init, xs), dataclasses.replace(saves, needs=needs)
    carry, ys, stored = run(PlannedLoop(problem, saves, inputs), *inputs)
    last, rows = split(stored.last, sum(others))
    none = list[Value]([None] * len(final))
    last = pick(put(put(none, others, last), of_list, rows), final)
    return carry[:count], ys, stored._replace(last=last)
