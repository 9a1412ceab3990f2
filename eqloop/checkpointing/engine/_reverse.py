"""The primitive for the way back of a loop (`_planned_loop.py`), and its derivatives.

It is a primitive so that second derivatives keep to the schedule's memory, too. If JAX
differentiated the loops of a reverse sweep, it would store residuals of all steps. Here
the derivative of a reverse sweep is a forward loop and a reverse sweep again, which are
planned anew:

    reverse        h0 <- h1 <- h2 <- h3      cotangents of the carry, from h3 to h0
    its reverse    h0 -> h1 -> h2 -> h3      cotangents of these, along with the carry
                   h0 <- h1 <- h2 <- h3      and then those of the carry itself

The first line is linear in the cotangents that it carries. So its derivative with
respect to them, the second line, needs no values of the first.
"""

import abc
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex

from ..._arrays import (
    Flags,
    cast_like,
    closed_under,
    inexact_only,
    instantiated,
    pick,
    put,
    split,
    type_of,
    union,
    with_tangent_types,
    zero_cotangent,
)
from ..._programs import (
    Doubled,
    Formula,
    behind,
    is_only_transposed,
    joined,
    reached,
    vmapped,
)
from ..._types import BatchAxis, PyTree, Value
from ...progress import Again, BarChange, tied
from ..steps._step import Step, reaching, without_outputs
from ._backward_step import BackwardStep, BlockResult
from ._derived import (
    NotLinearError,
    differentiated_once,
    forward_step_of_reverse,
    jvp_of_back,
    vjp_of_back,
)
from ._forward import Active, at_end
from ._layout import AbstractLayout, Needs, Saves, Stored
from ._leaves import StoredLeaves, needs_of, restricted, restricted_back
from ._primal import MaybeSaves, Outputs, StoredResiduals, run_storing
from ._problem import Problem
from ._sweep import Sweep
from ._transformed import activity, again, all_active, settled_problem, tangent_problem


class AbstractReverse(Formula):
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
        more: The residuals that are stored of the last steps, if any are.
    """

    problem: Problem[Any]
    back: BackwardStep
    layout: AbstractLayout
    given: Needs | None
    more: StoredResiduals | None
    unit = "iteration"
    is_backward = True

    @abc.abstractmethod
    def run(self, problem: Problem, saves: MaybeSaves, inputs: PyTree) -> Outputs:
        """Runs a forward loop by the other primitive, so that it can be planned."""

    def __init__(
        self,
        problem: Problem[Any],
        back: BackwardStep,
        layout: AbstractLayout,
        given: Needs | None,
        inputs: PyTree,
        more: StoredResiduals | None = None,
    ):
        in_avals = jax.tree.map(type_of, inputs)
        (consts, _, xs), _, carried, _ = in_avals
        ct_types = lambda avals, at: [avals[i].to_ct_aval() for i in at]
        self.in_avals = in_avals
        self.out_aval = (
            ct_types(consts, back.one.const_of),
            list(carried),
            ct_types(xs, back.one.x_of),
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
        if stored.integers:
            carried = at_end(carried, stored.integers[0])
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
            step, back = restricted(step, known), restricted_back(back, known)
        rows, length = stored.rows, problem.loop.length
        residuals = self.more and self.more.known(rows, length, consts)
        first = pick(init, given.held)
        paths = problem.loop.carry_paths[problem.lead :]
        paths = tuple(pick(paths, given.held)) if len(paths) == len(init) else ()
        # 3. The way back. The layout's order says which block is next, and moves by the
        # sweep: this runs `step` again, and takes cotangents past steps by `back`.
        sweep = Sweep(
            self.layout.reversal,
            step,
            dataclasses.replace(problem.loop, carry_paths=paths),
            back,
            consts,
            xs,
            zs,
            residuals,
            init=first,
            gauge=problem.loop.meter.back.of(length),
        )
        cts = problem.reverse(sweep, self.layout, stored, carried)
        # The sums may be wider than the consts, and are cast once, here.
        sums = list(map(cast_like, cts.consts, self.out_aval[0]))
        # Without this tie XLA would drop the reports to the bar, which nothing reads.
        return tied(cts.number, (sums, cts.carry, cts.xs))

    def doubled(self, nonzeros: Flags) -> Doubled:
        marks, _, _, _ = self.in_tree.unflatten(nonzeros)
        active, y_active = activity(self.problem.step, marks)
        back = self.back.changed(jvp_of_back, self._known(active), joins_steps=True)
        inputs, stored, carried, zs = self.in_avals
        moves = any(map(any, active))
        # If only `carried` and `zs` have tangents, the carries do not move, and the
        # slots that are there will do. Else their tangents are needed at every step,
        # which these slots lack: the forward loop is planned, and run, once more.
        known = Stored.of() if moves else stored
        in_avals = with_tangent_types(inputs, active), known, carried * 2, zs * 2
        if moves:
            problem = tangent_problem(self.problem, active, y_active)
            formula = self._derived(problem, back, in_avals)
        else:
            settings = self.problem, back, self.layout, self.given
            formula = type(self)(*settings, in_avals, self.more).checked()
        all_of = lambda groups: tuple((True,) * len(group) for group in groups)
        nothing, ends = (False,) * len(stored.flat), all_of((carried, zs))
        nonzeros_in = (*active, nothing, *ends)
        doubled = Doubled.of(formula, nonzeros_in, all_of(self.out_aval))
        if not moves:
            return doubled
        uses = joined((*all_of(active), nothing, *ends))
        return dataclasses.replace(doubled, uses=uses, ins=behind((*active, *ends)))

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        """Reverse mode of the reverse sweep: a forward loop, and a reverse sweep."""
        # See the top of this file. The forward loop carries `[*carry, *cotangents of
        # what is carried back]`, and its consts and `xs` have the cotangents of the
        # outputs behind them.
        (primals, _, carried, zs), problem = inputs, self.problem
        active, _ = activity(problem.step, perturbed[0])
        cts = instantiated(cts)
        try:
            # The forward loop and the backward step have been differentiated once, so
            # what is differentiated now are the rules of custom derivatives in them.
            primal = settled_problem(problem, active, reverse=True)
            back = differentiated_once(self.back, self._known(active), reverse=True)
            step = forward_step_of_reverse(back.one, primal.step.rewritten(Again()))
        except NotLinearError:
            return self._pull_written_out(perturbed, inputs, cts)
        # The forward loop carries the carry and `b`, see `_derived.py`. The cotangents
        # of the returned `xs` are scanned along with `xs`, by the same axes.
        axes = [problem.loop.x_axes[i] for i in self.back.one.x_of]
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
            carry, ct_zs, _ = self.run(problem, None, args)
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
        back = self.back.changed(vjp_of_back, self.again, self._known(active))
        formula = self._derived(problem, back, (args, Stored.of(), *ends))
        saves = Saves(formula.layout, formula.needed)
        carry, ct_zs, stored = run_storing(self.run, problem, saves.at_primal, args)
        given = (args, stored, *ends)
        settings = problem, formula.back, saves.layout, saves.given
        formula = type(self)(*settings, given)
        # Both loops are primitives, so a third derivative comes this way again.
        sums, carried_on, ct_xs = formula(*given)
        ct_init = carried_on[len(carried) :]
        ct_primals = map(put, zeros, active, (sums, ct_init, ct_xs))
        return tuple(ct_primals), none_stored, carry[count:], ct_zs

    def settled(self, nonzeros: Flags, reverse: bool) -> Self:
        active, _ = activity(self.problem.step, self.in_tree.unflatten(nonzeros)[0])
        problem = settled_problem(self.problem, active, reverse)
        back = differentiated_once(self.back, self._known(active), reverse)
        return self.with_params(problem=problem, back=back).checked()

    def checked(self) -> Self:
        """This sweep; if its slots lack a leaf, it runs the forward loop first.

        That happens where a derivative reads leaves that the gradient did not.
        """
        if self.more is not None and self.back.changes:
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
            # buffers whose rows are written once (`steps/_rows_once.py`), or if the
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
        return [self.problem.step.jaxpr, self.back.step.jaxpr]

    def with_bars(self, change: BarChange) -> Self:
        change = change.in_reverse
        back = self.back.with_steps(lambda step: step.rewritten(change))
        return self.with_params(problem=self.problem.with_bars(change), back=back)

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return [any(nonzeros_in)] * len(self.out_avals_flat)

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        (consts, init, xs), stored, carried, zs = self.in_tree.unflatten(marks)
        carry, _ = reaching(self.problem.step, consts, init, xs)
        lead = self.problem.lead
        # A batch has all outputs batched; and if the number of steps is reached, or a
        # carry in a slot, so is everything.
        if axis_name is not None or any((*carry[:lead], *stored.flat)):
            return super().reached_out(marks, axis_name)
        program, around = self.back.one.program, (*consts, *carry[lead:], *xs, *zs)
        counts = len(self.out_aval[0]), len(carried)
        outs = lambda carried: split(reached(program, (*around, *carried)), *counts)
        carried = closed_under(carried, lambda carried: outs(carried)[1])
        sums, _, xs = outs(carried)
        return [*sums, *carried, *xs]

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        return vmapped(self, axis_data, args, dims)

    @property
    def again(self) -> Step:
        """The step that is run again to get from a stored carry to later ones."""
        return again(self.problem)

    def _known(self, active: Active) -> Active:
        return active._replace(carry=active.carry[self.problem.lead :])

    def _known_of_carry(self, given: Needs) -> StoredLeaves:
        return StoredLeaves.of(given, self.again, self.problem.loop_back)

    def _derived(
        self, problem: Problem[Any], back: BackwardStep, in_avals: PyTree
    ) -> Self:
        """The derivative whose forward loop is given; it has no slots yet."""
        # What is only transposed is never run, and no schedule could differentiate it.
        is_run = not is_only_transposed(problem.step.jaxpr)
        layout = problem.layout(all_active(problem.step)) if is_run else self.layout
        # `by_carries`, as a `Reverse` goes back from stored carries. By `StoreAll` it
        # stores all of them, and no residuals.
        layout = layout.by_carries()
        formula = type(self)(problem, back, layout, None, in_avals)
        layout = layout.for_needs(problem.step, formula.needed)
        return formula.with_params(layout=layout)

    def _forward(self, inputs: PyTree, needs: Needs) -> Stored:
        problem = self.problem.with_bars(Again(backward=True))
        # The primal has returned `ys` already, and stored the residuals of some steps,
        # if any.
        step, rest = without_outputs(problem.step), self.layout.steps_with_residuals
        loop = problem.loop.cut_at(problem.loop.length - rest)[0]
        loop = loop if rest else problem.loop
        problem = dataclasses.replace(problem, step=step, loop=loop)
        # No equation: this is within the expansion of a primitive already, and nothing
        # differentiates it any more.
        run = lambda problem, saves, inputs: problem.evaluated(saves, inputs)
        return run_storing(run, problem, Saves(self.layout, needs), inputs)[2]

    def _pull_written_out(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> PyTree:
        """What `pull` returns, by JAX's derivative of loops that store all carries."""
        # This is for a custom rule that is not linear in its cotangents. Then the
        # derivative with respect to these depends on their values at every step.
        primals, _, *ends = inputs
        run = functools.partial(self.problem.written_out, self.back.one, self.again)
        marks = Active(*map(inexact_only, perturbed[0], primals))
        of_marked = lambda m, ends: run(tuple(map(put, primals, marks, m)), ends)
        _, pull = jax.vjp(of_marked, tuple(map(pick, primals, marks)), tuple(ends))
        ct_marked, ct_ends = pull(BlockResult(*cts))
        zeros, none_stored, *_ = self.zero_cts()
        return (tuple(map(put, zeros, marks, ct_marked)), none_stored, *ct_ends)
