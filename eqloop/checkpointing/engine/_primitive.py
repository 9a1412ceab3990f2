"""How a loop under a schedule is differentiated, in every mode.

Such a loop is a primitive of its own, `PlannedLoop`, so that it can say for itself how
it is batched and how it is differentiated. Forward mode is the loop of the step's jvp,
under the same schedule. Reverse mode consists of a forward sweep, which saves slots,
and of the primitive `Reverse`, which goes back from them. The derivatives of `Reverse`,
in turn, are a loop there and a loop back, so these are a `PlannedLoop` and a `Reverse`
again (see `_back.py`): all of them keep to the schedule's memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from ..._doubled import Doubled, recall
from ..._effects import refuse_callbacks, refuse_refs_in_rules
from ..._formula import Formula, Static
from ..._partition import Arrays, Flags, pick, put, split, union
from ..._tangents import inexact_only, instantiated, is_zero, zero_cotangent
from ...progress import Again, BarChange
from ._all_at_once import pull_residuals, store_residuals
from ._back import Back, Taken
from ._derived import NotLinearError, Pulled, Pushed, left_of, onward
from ._forward import Active
from ._groups import flat, spread, tangents_behind, with_tangents
from ._held import Needs, Saves, leaves_computed, needs_of, without_leaves
from ._layout import Layout
from ._listing import listed, stands_for_residuals
from ._loop import stack_type
from ._problem import (
    Problem,
    activity,
    again,
    all_active,
    gradient_back,
    merge,
    needs_of_gradient,
    select,
    settled_problem,
    tangent_problem,
)
from ._slim import Known, Way, narrowed, slim
from ._step import Step, reaching, without_outputs


def planned_loop(
    problem: Problem, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Any], list[Any]]:
    """Runs a loop that is differentiated as its schedule plans: carry and `ys`."""
    inputs = (list(consts), list(init), list(xs))
    loop = PlannedLoop(problem, None, _types_of(inputs))
    carry, ys, _ = loop.apply(*inputs)
    return carry, ys


class PlannedLoop(Formula):
    """`(consts, init, xs) -> (carry, ys, slots)`; there are no slots without a layout.

    The slots have no tangents: `Reverse`, which alone reads them, knows what they mean.
    """

    problem: Problem
    saves: Saves | None
    unit = "iteration"

    def __init__(self, problem: Problem, saves: Saves | None, in_avals: Any):
        step, rows = problem.step, problem.loop.rows
        ys = [stack_type(y, rows) for y in step.y_types]
        slots = []
        if saves is not None:
            slots = problem.repetition.saved_types(step, saves)
            slots = [*slots, *_last(problem, saves, step.carry_types)]
        self.in_avals = in_avals
        self.out_aval = (step.carry_types, ys, slots)
        self.params = dict(problem=problem, saves=saves)
        self.effects = step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: Any) -> Any:
        if (known := recall(self, self.flat_in(inputs))) is not None:
            return known
        return run_and_save(self.problem, self.saves, inputs)

    def doubled(self, moves: Flags) -> Doubled:
        active, y_active = self._activity(moves)
        problem = tangent_problem(self.problem, active, y_active)
        saves = self.saves and self.saves.with_tangents(sum(active.carry))
        formula = type(self)(problem, saves, with_tangents(self.in_avals, active))
        return Doubled(
            formula,
            uses=(True,) * len(moves),
            takes=flat(active),
            ins=tangents_behind(self.in_avals, active),
            gives=(*active.carry, *y_active, *self._no_slots()),
            outs=(
                *tangents_behind(self.out_aval[:2], (active.carry, y_active)),
                *formula._no_slots(),
            ),
        )

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        again = self.with_bars(Again())
        # All leaves that vary are perturbed here, as in `jax.checkpoint`. Nothing tells
        # whose cotangents are read.
        moves = [False] * len(perturbed[1])
        _, residuals, _ = again._sweep(perturbed, moves, inputs)
        return again.vjp_bwd_retval(residuals, cts)

    def sweep_forward(self, perturbed: Any, *inputs: Any) -> tuple[Any, Any, Any]:
        return self._sweep(perturbed, perturbed[1], inputs)

    def _sweep(
        self, perturbed: Any, moves: Sequence[bool], inputs: Any
    ) -> tuple[Any, Any, Any]:
        """The forward sweep, planned for a gradient of these leaves of `init`."""
        problem = self.problem
        active, y_active = activity(problem.step, perturbed)
        problem.repetition.check(problem, active, inputs)
        planned = problem.planned_for(active, moves)
        saves = _saves_of(planned, active, y_active, self.saves)
        problem = problem.under(saves.layout)
        if saves.layout.stores_residuals:
            settings = problem.step, problem.loop, problem.policy
            (carry, ys), residuals = store_residuals(
                *settings, active, y_active, inputs
            )
            slots = []
        else:
            if not stands_for_residuals(saves.layout):
                self._refuse_to_run_again()
            primal = settled_problem(problem, active, reverse=True)
            run = type(self)(primal, saves.at_primal, self.in_avals)
            carry, ys, slots = run(*inputs)
            residuals = (inputs, slots)
        asked_for = saves.of_these(slots, self.saves) if self.saves else []
        out = (carry, ys, asked_for)
        moves_out = (list(active.carry), list(y_active), self._no_slots())
        return out, (Static((saves, active, y_active)), residuals), moves_out

    def vjp_bwd_retval(self, res: Any, outgrad: Any) -> Any:
        static, residuals = res
        saves, active, y_active = static.value
        ct_carry, ct_ys, _ = outgrad
        ct_carry = instantiated(pick(ct_carry, active.carry))
        if saves.layout.stores_residuals:
            ct_ys = instantiated(pick(ct_ys, y_active))
            cts = pull_residuals(self.problem.loop, residuals, ct_carry, ct_ys)
        else:
            cts = self._reversed(saves, active, y_active, residuals, ct_carry, ct_ys)
        return spread(cts, active, self.in_avals)

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = self._activity(moves)
        return self.with_params(problem=settled_problem(self.problem, active, reverse))

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        return self.problem.repetition.batched(self, axis_data, args, dims)

    def remade(self, problem: Problem, args: Any) -> "PlannedLoop":
        """The same of another problem, for inputs of other types."""
        return PlannedLoop(problem, self.saves, _types_of(args))

    @property
    def jaxprs(self) -> list[Any]:
        return [self.problem.step.jaxpr]

    def with_bars(self, change: BarChange) -> Self:
        return self.with_params(problem=self.problem.with_bars(change))

    def rewritten(self, rewrite: Callable[[Any], Any]) -> Self:
        step = self.problem.step
        if (jaxpr := rewrite(step.jaxpr)) is step.jaxpr:
            return self
        step = dataclasses.replace(step, jaxpr=jaxpr)
        return self.with_params(problem=dataclasses.replace(self.problem, step=step))

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        active, y_active = self._activity(moves_in)
        return [*active.carry, *y_active, *self._no_slots()]

    def reached_out(self, marks: Sequence[bool], axis_name: Any) -> list[bool]:
        problem, groups = self.problem, self.in_tree.unflatten(marks)
        carry, ys = reaching(problem.step, *groups, axis_name=axis_name)
        # Where an example runs longer, all that it ends with is another. By an inverse
        # more may be batched than depends on the inputs.
        is_known = self.saves is None and problem.step.inverse is None
        if not is_known or any(carry[: problem.repetition.lead]):
            return super().reached_out(marks, axis_name)
        return [*carry, *ys]

    def leaner(self, used: Flags) -> tuple[Formula, Flags, Flags] | None:
        problem, saves = self.problem, self.saves
        step, meter = problem.step, problem.loop.meter
        carry, ys, slots = self.out_tree.unflatten(used)
        own, lead = problem.repetition.own_leaves, problem.repetition.lead
        if not any(slots):
            saves = None
        elif saves is not None:
            carry = union(carry, (*[False] * lead, *union(*saves.needs)))
        carry = leaves_computed(step, [True] * own + carry[own:], ys)
        kept = *[True] * step.num_consts, *carry, *[True] * len(step.x_types)
        # A bar may show any of the leaves.
        is_told = meter.here.is_shown or meter.back.is_shown
        if (
            is_told
            or step.jaxpr.effects
            or all((*kept, *ys, any(slots) == bool(slots)))
        ):
            return None
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

    def _refuse_to_run_again(self) -> None:
        """Checks that a gradient may run the steps more than once."""
        instead = self.problem.repetition.instead_of_effects
        again = "The gradient of this loop runs steps again"
        refuse_callbacks(self.effects, again, instead)
        refuse_refs_in_rules(self.problem.step.jaxpr, instead)

    def _no_slots(self) -> list[bool]:
        """A mark for each of the slots, of which none has a tangent."""
        return [False] * len(self.out_aval[2])

    def _reversed(
        self,
        saves: Saves,
        active: Active,
        y_active: Flags,
        residuals: Any,
        ct_carry: Arrays,
        ct_ys: Arrays,
    ) -> Any:
        """The cotangents of the active inputs, from the slots of a forward sweep."""
        problem, (inputs, slots) = self.problem.under(saves.layout), residuals
        has_rows = problem.loop.rows > 0
        wanted = tuple(
            a and has_rows and not is_zero(ct)
            for a, ct in zip(y_active, ct_ys, strict=True)
        )
        primal = settled_problem(problem, active, reverse=True)
        args = (inputs, slots, ct_carry, pick(ct_ys, wanted))
        return Reverse.first(problem, primal, saves, active, wanted, args)


class Reverse(Formula):
    """`(inputs, slots, carried, zs) -> (sums, carried, xs)`, by a `Sweep`.

    The inputs are those of the loop there. Without slots that loop is run before. What
    is carried back starts as given; the `zs` are what each step gets besides. For a
    gradient these are cotangents of the carry and of the `ys`, and what is returned are
    the cotangents of active consts, carry and `xs`.

    Attributes:
        problem: The loop there.
        back: What the way back does to a block.
        layout: Which carries are slots.
        given: Which leaves of a carry the given slots hold, and which leaves of the
            last carry follow upon them. `None` if the loop there has to be run: nothing
            is given, or not what is read.
    """

    problem: Problem
    back: Back
    layout: Any  # Layout | AbstractWhileOrder
    given: Needs | None
    unit = "iteration"
    is_backward = True

    def __init__(
        self,
        problem: Problem,
        back: Back,
        layout: Layout,
        given: Needs | None,
        in_avals: Any,
    ):
        (consts, _, xs), _, carried, _ = in_avals
        ct_types = lambda avals, at: [avals[i].to_ct_aval() for i in at]
        self.in_avals = in_avals
        self.out_aval = (
            ct_types(consts, back.const_of),
            list(carried),
            ct_types(xs, back.x_of),
        )
        self.params = dict(problem=problem, back=back, layout=layout, given=given)
        self.effects = problem.step.jaxpr.effects
        super().__init__()

    @classmethod
    def first(
        cls,
        problem: Problem,
        primal: Problem,
        saves: Saves,
        active: Active,
        wanted: Flags,
        args: Any,
    ) -> Any:
        """The cotangents of a loop.

        Args:
            problem: The loop that is differentiated.
            primal: The same as it was run.
            saves: What it has left.
            active: Which inputs are differentiated.
            wanted: Which of the `ys` have a cotangent.
            args: Its inputs, the slots, and the cotangents of carry and `ys`.
        """
        back = gradient_back(problem, active, wanted)
        in_avals = _types_of(args)
        return cls(primal, back, saves.layout, saves.given, in_avals)(*args)

    def expand(self, inputs: Any, slots: Any, carried: Any, zs: Any) -> Any:
        if (given := self.given) is None:
            given = self.needed
            slots = self._forward(inputs, given)
        (consts, init, xs), problem = inputs, self.problem
        known = Known.of(given, self.again, problem.loop_back)
        slots, last = split(slots, len(slots) - sum(given.final))
        last = put(given.final, given.final, last)
        consts = [*consts, *known.consts(last, init[problem.repetition.lead :])]
        given = (consts, xs, carried, zs)
        step, back = narrowed(self.again, known), slim(self.back, known)
        way = Way(problem.loop, step, back, self.layout)
        cts = self.problem.repetition.reverse(way, given, slots)
        return cts.consts, cts.carry, cts.xs

    def doubled(self, moves: Flags) -> Doubled:
        marks, _, _, _ = self.in_tree.unflatten(moves)
        active, y_active = activity(self.problem.step, marks)
        if not any(map(any, active)):
            return self._doubled_ends()
        problem = tangent_problem(self.problem, active, y_active)
        inputs, _, carried, zs = self.in_avals
        in_avals = (with_tangents(inputs, active), [], carried * 2, zs * 2)
        formula = self._derived(problem, Pushed, active, in_avals)
        return self._as_doubled(formula, active, uses_slots=False)

    def _doubled_ends(self) -> Doubled:
        """The same if only what is carried back has tangents: that is all linear."""
        active = Active(*((False,) * len(group) for group in self.in_avals[0]))
        back = Pushed(self.back, self.again, self._known(active))
        inputs, slots, carried, zs = self.in_avals
        in_avals = (inputs, slots, carried * 2, zs * 2)
        formula = type(self)(self.problem, back, self.layout, self.given, in_avals)
        return self._as_doubled(formula.checked(), active, uses_slots=True)

    def _as_doubled(
        self, formula: "Reverse", active: Active, uses_slots: bool
    ) -> Doubled:
        inputs, slots, carried, zs = self.in_avals
        ends = [True] * (len(carried) + len(zs))
        used = [uses_slots] * len(slots)
        twice = lambda avals: [False] * len(avals) + [True] * len(avals)
        return Doubled(
            formula,
            uses=(*[True] * sum(map(len, inputs)), *used, *ends),
            takes=(*flat(active), *[False] * len(slots), *ends),
            ins=(
                *tangents_behind(inputs, active),
                *[False] * sum(used),
                *twice(carried),
                *twice(zs),
            ),
            gives=(True,) * len(self.out_avals_flat),
            outs=tuple(mark for group in self.out_aval for mark in twice(group)),
        )

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        """A loop there, with the cotangents of what is carried back, and one back."""
        (primals, slots, carried, zs), problem = inputs, self.problem
        active, _ = activity(problem.step, perturbed[0])
        cts = instantiated(cts)
        try:
            # On this way there is what is left of both once they are differentiated.
            primal = settled_problem(problem, active, reverse=True)
            back = left_of(self.back, self.again, self._known(active), reverse=True)
            step = onward(back, primal.step.rewritten(Again()))
        except NotLinearError:
            return self._pull_written_out(perturbed, inputs, cts)
        axes = [problem.loop.x_axes[i] for i in self.back.x_of]
        meter = problem.loop.meter.again.tangents
        loop = dataclasses.replace(
            problem.loop, x_axes=(*problem.loop.x_axes, *axes), meter=meter
        )
        problem = dataclasses.replace(problem, step=step, loop=loop)
        args = tuple([*p, *ct] for p, ct in zip(primals, cts, strict=True))
        count = len(primals[1])
        zero_slots = [zero_cotangent(aval) for aval in self.in_avals[1]]
        if not any(map(any, active)):
            carry, ct_zs, _ = PlannedLoop(problem, None, _types_of(args))(*args)
            zeros = spread(([], [], []), active, self.in_avals[0])
            return zeros, zero_slots, carry[count:], ct_zs
        ct_carry = [
            instantiated(zero_cotangent(c))
            for c in pick(self.in_avals[0][1], active.carry)
        ]
        ends = ([*carried, *ct_carry], zs)
        in_avals = (_types_of(args), [], *_types_of(ends))
        formula = self._derived(problem, Pulled, active, in_avals)
        saves = Saves(formula.layout, formula.needed)
        there = PlannedLoop(problem, saves.at_primal, in_avals[0])
        carry, ct_zs, slots = there(*args)
        in_avals = (in_avals[0], _types_of(slots), *in_avals[2:])
        formula = type(self)(problem, formula.back, saves.layout, saves.given, in_avals)
        sums, carried_on, ct_xs = formula(args, slots, *ends)
        ct_init = carried_on[len(carried) :]
        ct_primals = spread((sums, ct_init, ct_xs), active, self.in_avals[0])
        return ct_primals, zero_slots, carry[count:], ct_zs

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = activity(self.problem.step, self.in_tree.unflatten(moves)[0])
        problem = settled_problem(self.problem, active, reverse)
        back = left_of(self.back, self.again, self._known(active), reverse)
        return self.with_params(problem=problem, back=back).checked()

    def checked(self) -> Self:
        """The same, which has the loop there run if too little of it is given."""
        if self.given is None or self.given.serves(self.needed):
            return self
        return self.with_params(given=None)

    @property
    def reads(self) -> Flags:
        reads = jax.tree.map(lambda _: True, self.in_avals)
        if self.given is not None:
            # The way back starts from slots. That there is from the initial carry.
            inputs, *others = reads
            consts, _, xs = inputs
            known = Known.of(self.given, self.again, self.problem.loop_back)
            init = [False] * self.problem.repetition.lead + known.firsts
            reads = (consts, init, xs), *others
        return tuple(jax.tree.leaves(reads))

    @property
    def needed(self) -> Needs:
        """Which leaves of the carries it must be given."""
        loop, block = self.problem.loop_back, self.layout.block
        return needs_of(self.back, self.again, loop, block)

    @property
    def jaxprs(self) -> list[Any]:
        return [self.problem.step.jaxpr, self.back.base.step.jaxpr]

    def with_bars(self, change: BarChange) -> Self:
        change = change.in_reverse
        back = self.back.mapped(lambda step: step.rewritten(change))
        return self.with_params(problem=self.problem.with_bars(change), back=back)

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [any(moves_in)] * len(self.out_avals_flat)

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        self.problem.repetition.check_batched(self, axis_data)
        return super().batched(axis_data, args, dims)

    @property
    def again(self) -> Step:
        """The step to advance by: the loop there, and the bars in it, were shown."""
        return again(self.problem)

    def _known(self, active: Active) -> Active:
        """Of the active inputs those that the way back knows of."""
        return active._replace(carry=active.carry[self.problem.repetition.lead :])

    def _derived(
        self, problem: Problem, kind: Callable[..., Back], active: Active, in_avals: Any
    ) -> "Reverse":
        """A derivative, of which the loop there is this one."""
        layout = problem.layout(all_active(problem.step)).by_carries()
        back = kind(self.back, self.again, self._known(active))
        return type(self)(problem, back, layout, None, in_avals)

    def _forward(self, inputs: Any, needs: Needs) -> list[Any]:
        """What is saved, from running the loop there."""
        problem = self.problem.with_bars(Again(backward=True))
        problem = dataclasses.replace(problem, step=without_outputs(problem.step))
        return run_and_save(problem, Saves(self.layout, needs), inputs)[2]

    def _pull_written_out(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        """The same by JAX, of two loops between which every carry is kept."""
        primals, _, *ends = inputs
        written_out = self.problem.repetition.written_out
        run = functools.partial(written_out, self.problem, self.back, self.again)
        marks = Active(*map(inexact_only, perturbed[0], primals))
        marked = lambda m, ends: run(merge(primals, marks, m), ends)
        _, pull = jax.vjp(marked, select(primals, marks), tuple(ends))
        ct_marked, ct_ends = pull(Taken(*cts))
        zero_slots = [zero_cotangent(aval) for aval in self.in_avals[1]]
        return (spread(ct_marked, marks, self.in_avals[0]), zero_slots, *ct_ends)


def _saves_of(
    problem: Problem, active: Active, y_active: Flags, asked_for: Saves | None
) -> Saves:
    """What the forward sweep of a gradient leaves for the way back.

    If the loop is asked to leave slots for another way back as well, then these are in
    the same layout, and hold what either of the two reads.
    """
    layout = asked_for.layout if asked_for else problem.layout(active)
    layout = listed(layout, active, problem.still)
    if layout.stores_residuals:
        return Saves(layout, Needs((), ()))
    wanted = tuple(a and problem.loop.rows > 0 for a in y_active)
    problem = problem.under(layout)
    needs = needs_of_gradient(problem, active, wanted, layout.block)
    if asked_for is not None:
        needs = needs.with_those_of(asked_for.needs)
    return Saves(layout, needs)


def run_and_save(
    problem: Problem, saves: Saves | None, inputs: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs a loop: the last carry, `ys`, and what is saved."""
    carry, ys, saved = problem.repetition.run(problem, saves, inputs)
    return carry, ys, [*saved, *_last(problem, saves, carry)]


def _last(problem: Problem, saves: Saves | None, carry: Arrays) -> list[Any]:
    """The leaves of the last carry that are saved."""
    if saves is None:
        return []
    return pick(carry[problem.repetition.lead :], saves.needs.final)


def _types_of(inputs: Any) -> Any:
    return jax.tree.map(jax.typeof, inputs)
