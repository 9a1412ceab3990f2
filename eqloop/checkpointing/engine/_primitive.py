"""The primitive for a loop under a schedule, and its derivatives in every mode.

A loop is a primitive, `PlannedLoop`, so that it decides itself how it is batched and
differentiated. Forward mode is the loop of the step's jvp, under the same schedule.
Reverse mode is a forward sweep, which leaves carries in slots, and another primitive,
`Reverse`, which goes back from them (`_reverse_primitive.py`):

    f                  PlannedLoop(step)
    jvp of f           PlannedLoop(jvp of step)
    vmap of f          PlannedLoop(vmap of step)
    grad of f          PlannedLoop(step, saves) -> slots -> Reverse(step)
    jvp of grad of f   PlannedLoop(jvp of step, saves) -> Reverse(jvp of step)

So nothing that JAX is asked for can lead out of these two primitives, and the schedule
is asked for a layout only where one of them is differentiated in reverse mode.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Self

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
    instantiated,
    is_zero,
    pick,
    put,
    split,
    stack_type,
    type_of,
    union,
    with_tangent_types,
    zero_array,
)
from ..._programs import (
    Doubled,
    Formula,
    Rewrite,
    Static,
    recall,
    refuse_callbacks,
    refuse_refs_in_rules,
)
from ..._types import BatchAxis, PyTree, Value
from ...progress import Again, BarChange
from ._forward import Active
from ._layout import AbstractLayout
from ._listing import is_listing, listed, stands_for_residuals
from ._logs import logging_step
from ._problem import (
    Problem,
    activity,
    gradient_back,
    needs_of_gradient,
    settled_problem,
    tangent_problem,
    with_cotangents,
)
from ._reverse_primitive import Reverse
from ._step import NoWayBackError, reaching
from ._stored_products import products_to_store, storing_products
from .leaves._needed_leaves import leaves_computed, without_leaves
from .leaves._saves import Needs, Saves
from .orders._all_at_once import pull_residuals, store_residuals
from .reversals._known_products import Products


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
    """`(consts, init, xs) -> (carry, ys, slots)`.

    There are no slots if `saves` is `None`, as for a loop that is not differentiated.
    Slots hold primal values, and still they have no tangents. Only `Reverse` reads
    them, and its derivatives are computed from the inputs of the loop.

    Attributes:
        problem: The loop.
        saves: Which carries it leaves in slots.
    """

    problem: Problem
    saves: Saves[AbstractLayout] | None
    unit = "iteration"

    def __init__(
        self, problem: Problem, saves: Saves[AbstractLayout] | None, inputs: PyTree
    ):
        step, rows = problem.step, problem.loop.rows
        ys = [stack_type(y, rows) for y in step.y_types]
        slots = []
        if saves is not None:
            slots = problem.repetition.saved_types(step, saves)
            slots = [*slots, *saves.of_last(step.carry_types)]
        self.in_avals = jax.tree.map(type_of, inputs)
        self.out_aval = (step.carry_types, ys, slots)
        self.params = dict(problem=problem, saves=saves)
        self.effects = step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: PyTree) -> PyTree:
        # In forward mode the equation for the tangents has run the loop already.
        if (known := recall(self, self.flat_in(inputs))) is not None:
            return known
        carry, ys, slots = self.problem.repetition.run(self.problem, self.saves, inputs)
        last = [] if self.saves is None else self.saves.of_last(carry)
        return carry, ys, [*slots, *last]

    def doubled(self, moves: Flags) -> Doubled:
        active, y_active = self._activity(moves)
        problem = tangent_problem(self.problem, active, y_active)
        saves = self.saves and self.saves.with_leaves(sum(active.carry))
        formula = PlannedLoop(problem, saves, with_tangent_types(self.in_avals, active))
        gives = active.carry, y_active, tuple(self._no_slots())
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
        # of `init` are not: it then counts one more buffer, see `Problem.still`.
        moves = [False] * len(perturbed[1])
        try:
            _, residuals, _ = again._logging_sweep(perturbed, moves, inputs)
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
            return self._logging_sweep(perturbed, perturbed[1], inputs)
        except NoWayBackError:
            # Perhaps no cotangent ever arrives. If one does, `pull` raises this again.
            out, residuals, moves_out = super().sweep_forward(perturbed, *inputs)
            return out, (Static(None), residuals), moves_out

    def _logging_sweep(
        self, perturbed: PyTree, moves: Sequence[bool], inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """As `_sweep`, and what backward rules log is returned with the cotangents."""
        active, _ = activity(self.problem.step, perturbed)
        has_rows = self.problem.repetition.has_xs
        logging = logging_step(self.problem.step, active) if has_rows else None
        if logging is None:
            return self._sweep(perturbed, moves, inputs)
        # A loop with more `xs`, whose cotangents are the log.
        rows = [stack_type(x, self.problem.loop.length) for x in logging.x_types]
        (consts, init, xs), of_xs = inputs, perturbed[2]
        inputs = consts, init, [*xs, *map(zero_array, rows)]
        perturbed = *perturbed[:2], [*of_xs, *[True] * len(rows)]
        loop = PlannedLoop(logging.of(self.problem), self.saves, inputs)
        out, residuals, moves_out = loop._sweep(perturbed, moves, inputs)
        return out, (Static((loop, logging)), residuals), moves_out

    def _sweep(
        self, perturbed: PyTree, moves: Sequence[bool], inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        """The forward sweep of a gradient.

        Args:
            perturbed: A mark for each of the inputs.
            moves: Which leaves of `init` the plan counts as differentiated.
            inputs: The inputs.

        Returns:
            What `sweep_forward` returns.
        """
        problem = self.problem
        active, y_active = activity(problem.step, perturbed)
        problem.repetition.check(problem, active, inputs)
        planned = problem.planned_for(active, moves)
        saves = self._saves_of_gradient(planned, active, y_active)
        problem = problem.under(saves.layout)
        if saves.layout.stores_residuals:
            # A plain scan, which JAX differentiates. Its residuals go to the backward
            # rule in the place of slots.
            settings = problem.step, problem.loop, problem.policy
            (carry, ys), residuals = store_residuals(
                *settings, active, y_active, inputs
            )
            slots = []
        else:
            # Where plans are listed, a layout that stores residuals is replaced by one
            # that does not, in a program that is never run.
            if not stands_for_residuals(saves.layout):
                instead = problem.repetition.instead_of_effects
                refuse_refs_in_rules(problem.step.jaxpr, instead)
            products = _products(saves.layout, problem, active, y_active)
            primal = settled_problem(problem, active, reverse=True)
            carry, ys, slots, rows = _run_primal(primal, saves, products, inputs)
            residuals = (inputs, slots, rows)
        # If this loop is itself the forward sweep of a gradient, it still has to return
        # the slots for that one's way back: a part of those that both share.
        asked_for = saves.of_these(slots, self.saves) if self.saves else []
        out = (carry, ys, asked_for)
        moves_out = (list(active.carry), list(y_active), self._no_slots())
        return out, (Static((saves, active, y_active)), residuals), moves_out

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> tuple[PyTree, PyTree]:
        static, residuals = residuals
        if static.value is None:
            return super().sweep_back(residuals, cts)
        if all(map(is_zero, self.flat_out(cts))):
            return self.zero_cts(), None
        if not isinstance(static.value[0], PlannedLoop):
            return self._cotangents(static.value, residuals, cts), None
        loop, logging = static.value
        (consts, init, xs), _ = loop.sweep_back(residuals, cts)
        xs, rows = split(xs, len(self.in_avals[2]))
        return (consts, init, xs), logging.log(instantiated(rows))

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
        return tuple(map(put, self.zero_cts(), active, cts))

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = self._activity(moves)
        return self.with_params(problem=settled_problem(self.problem, active, reverse))

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        return self.problem.repetition.batched(self, axis_data, args, dims)

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
        return [*active.carry, *y_active, *self._no_slots()]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        problem, groups = self.problem, self.in_tree.unflatten(marks)
        carry, ys = reaching(problem.step, *groups, axis_name=axis_name)
        lead, in_slots = problem.repetition.lead, list[bool]()
        if self.saves is not None:
            held, final = self.saves.needs
            known = carry[lead:]
            in_slots = [*pick(known, held), *pick(known, final)]
        # Integers come first; how many there are depends on how the loop goes on.
        integers = len(self.out_aval[2]) - len(in_slots)
        # If an example may run longer than another (the first leaf of the carry is
        # reached), all of its outputs differ. With an inverse, more leaves may be
        # batched than depend on the inputs (`_reaching_both_ways`), and slots may be
        # batched that do not depend on them.
        is_batch = axis_name is not None
        is_known = not is_batch or (self.saves is None and problem.step.inverse is None)
        if not is_known or integers < 0 or any(carry[:lead]):
            return super().reached_out(marks, axis_name)
        return [*carry, *ys, *[False] * integers, *in_slots]

    def keep_outputs(self, used: Flags) -> tuple[Formula, Flags, Flags] | None:
        problem, saves = self.problem, self.saves
        step, meter = problem.step, problem.loop.meter
        carry, ys, slots = self.out_tree.unflatten(used)
        own, lead = problem.repetition.own_leaves, problem.repetition.lead
        # 1. Which leaves of the carry are needed: those that are used, those that slots
        #    hold, those that decide how the loop goes on, and what these depend on.
        if not any(slots):
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
            or all((*kept, *ys, any(slots) == bool(slots)))
        ):
            return None
        # 3. The loop without the other leaves.
        step = without_leaves(step, carry, ys)
        paths = problem.loop.carry_paths
        paths = tuple(pick(paths, carry)) if len(paths) == len(carry) else ()
        starts = pick(problem.loop.padded_starts(len(carry)), carry)
        loop = problem.loop
        loop = dataclasses.replace(loop, carry_paths=paths, starts=tuple(starts))
        problem = dataclasses.replace(problem, step=step, loop=loop)
        if saves is not None:
            saves = saves.of_leaves(lambda flags: pick(flags, carry[lead:]))
        consts, init, xs = self.in_avals
        formula = PlannedLoop(problem, saves, (consts, pick(init, carry), xs))
        gives = *carry, *ys, *[saves is not None] * len(slots)
        return formula, tuple(kept), tuple(gives)

    def _activity(self, moves: Sequence[bool]) -> tuple[Active, Flags]:
        return activity(self.problem.step, self.in_tree.unflatten(moves))

    def _saves_of_gradient(
        self, problem: Problem, active: Active, y_active: Flags
    ) -> Saves[AbstractLayout]:
        """Which carries the forward sweep of a gradient stores.

        If this loop already stores carries for another way back, the two share a
        layout, and the slots hold the leaves that either of them reads.
        """
        layout = self.saves.layout if self.saves else problem.layout(active)
        layout = listed(layout, active, problem.still)
        if layout.stores_residuals:
            return Saves(layout, Needs((), ()))
        problem = problem.under(layout)
        wanted = _with_rows(problem, y_active)
        needs = needs_of_gradient(problem, active, wanted, layout.block)
        if self.saves is not None:
            needs = needs.with_those_of(self.saves.needs)
        fitted = layout.for_needs(problem.step, needs)
        if fitted is not layout:
            # What is noted is found by its identity.
            fitted = listed(fitted, active, problem.still)
        return Saves(fitted, needs)

    def _no_slots(self) -> list[bool]:
        """The marks of the slots, none of which has a tangent."""
        return [False] * len(self.out_aval[2])

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
            residuals: The inputs, the slots, and the products that are stored.
            ct_carry: The cotangents of the final carry.
            ct_ys: The cotangents of `ys`.
        """
        (saves, active, y_active), (inputs, slots, rows) = swept, residuals
        if not stands_for_residuals(saves.layout):
            again = "The gradient of this loop runs steps again"
            instead = self.problem.repetition.instead_of_effects
            refuse_callbacks(self.effects, again, instead)
        problem, layout = self.problem.under(saves.layout), saves.layout
        has_ct = [a and not is_zero(ct) for a, ct in zip(y_active, ct_ys, strict=True)]
        wanted = _with_rows(problem, has_ct)
        ends = instantiated(pick(ct_carry, needed.carry)), pick(ct_ys, wanted)
        products = _products(layout, problem, active, y_active)
        primal = settled_problem(problem, active, reverse=True)
        back = gradient_back(problem, needed, wanted)
        args = (inputs, [*slots, *rows], *ends)
        settings = primal, back, layout, saves.given, args, products
        return Reverse(PlannedLoop, *settings).checked()(*args)


def _with_rows(problem: Problem, ys: Sequence[bool]) -> Flags:
    """The marked leaves of `y`, or none if the loop keeps no rows of `ys`."""
    return tuple(mark and problem.loop.rows > 0 for mark in ys)


def _products(
    layout: AbstractLayout, problem: Problem, active: Active, y_active: Flags
) -> Products | None:
    """The products that the primal stores for its last steps, if the layout asks."""
    # Where plans are listed, a loop has no leaves but its own: its plan is looked up by
    # them. That program is never run.
    if not layout.steps_with_products or is_listing():
        return None
    return products_to_store(problem, active, _with_rows(problem, y_active))


def _run_primal(
    problem: Problem,
    saves: Saves[AbstractLayout],
    products: Products | None,
    inputs: PyTree,
) -> tuple[list[Value], list[Value], list[Value], list[Value]]:
    """Runs the loop of a forward sweep.

    Returns:
        The final carry, `ys`, the slots, and the rows of stored products.
    """
    at_primal = saves.at_primal
    if products is None:
        return *PlannedLoop(problem, at_primal, inputs)(*inputs), []
    count = saves.layout.steps_with_products
    storing = storing_products(problem.step, products, problem.loop.length, count)
    problem = dataclasses.replace(problem, step=storing.step)
    if at_primal is not None:
        at_primal = at_primal.with_leaves(storing.buffers)
    inputs = storing.started(inputs)
    carry, ys, slots = PlannedLoop(problem, at_primal, inputs)(*inputs)
    carry, rows = storing.stored(carry)
    return carry, ys, slots, rows
