"""The reverse sweep of a loop, as a primitive of its own.

It is a primitive so that second derivatives keep to the schedule's memory, too. If JAX
differentiated the loops of a reverse sweep, it would store residuals of all steps. Here
the derivative of a reverse sweep is a forward loop and a reverse sweep again, a
`PlannedLoop` and a `Reverse`, which are planned anew:

    reverse        h0 <- h1 <- h2 <- h3      cotangents of the carry, from h3 to h0
    its reverse    h0 -> h1 -> h2 -> h3      cotangents of these, along with the carry
                   h0 <- h1 <- h2 <- h3      and then those of the carry itself

The first line is linear in the cotangents that it carries. So its derivative with
respect to them, the second line, needs no values of the first.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Self

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
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
from ..._programs import Doubled, Formula, behind, joined, mapped, reached
from ..._types import BatchAxis, PyTree, Value
from ...progress import Again, BarChange
from ._backward_step import BackwardStep, Taken, program_of
from ._derived import NotLinearError, Pulled, Pushed, left_of, onward
from ._forward import Active
from ._layout import AbstractLayout
from ._problem import (
    Problem,
    activity,
    again,
    all_active,
    settled_problem,
    tangent_problem,
)
from ._step import Step, reaching, without_outputs
from ._sweep import Sweep
from .leaves._needed_leaves import needs_of
from .leaves._restricted_steps import Restricted, StoredLeaves, restricted
from .leaves._saves import Needs, Saves
from .reversals._known_products import KnownProducts, Products

if TYPE_CHECKING:
    from ._primitive import PlannedLoop


class Reverse(Formula):
    """`(inputs, slots, carried, zs) -> (sums, carried, xs)`, by a `Sweep`.

    In a gradient, the inputs are those of the forward loop, the slots are the ones that
    it has filled, `carried` are the cotangents of the final carry, and `zs` those of
    `ys`. The outputs are the cotangents of the active consts, leaves of the initial
    carry, and `xs`.

    In a derivative of a gradient, `carried` and `zs` have more in them; which entries
    these are is up to the backward step (`_backward_step.py`).

    Attributes:
        forward_loop: The class `PlannedLoop`. It cannot be imported here, because its
            file imports this one.
        problem: The forward loop.
        back: The backward step.
        layout: Which carries are in slots, and how the loop is reversed.
        given: Which leaves of a carry the slots hold, and which leaves of the last
            carry follow behind the slots. `None` if the forward loop has to run first,
            because there are no slots, or a leaf that is read is not in them.
        products: The products of the last steps. Their rows come last in `slots`.
            `None` if there are none.
    """

    forward_loop: "type[PlannedLoop]"
    problem: Problem
    back: BackwardStep
    layout: AbstractLayout
    given: Needs | None
    products: Products | None
    unit = "iteration"
    is_backward = True

    def __init__(
        self,
        forward_loop: "type[PlannedLoop]",
        problem: Problem,
        back: BackwardStep,
        layout: AbstractLayout,
        given: Needs | None,
        inputs: PyTree,
        products: Products | None = None,
    ):
        in_avals = jax.tree.map(type_of, inputs)
        (consts, _, xs), _, carried, _ = in_avals
        ct_types = lambda avals, at: [avals[i].to_ct_aval() for i in at]
        self.forward_loop = forward_loop
        self.in_avals = in_avals
        self.out_aval = (
            ct_types(consts, back.const_of),
            list(carried),
            ct_types(xs, back.x_of),
        )
        params = dict(problem=problem, back=back, layout=layout)
        self.params = params | dict(given=given, products=products)
        self.effects = problem.step.jaxpr.effects
        super().__init__()

    def expand(
        self, inputs: PyTree, slots: PyTree, carried: PyTree, zs: PyTree
    ) -> PyTree:
        # `slots` are [*integers, *carries in slots, *leaves of the last carry, *rows of
        # products]. Only loops that stop have integers: the number of steps, and more.
        of_products = len(self.products.types) if self.products else 0
        slots, rows = split(slots, len(slots) - of_products)
        if (given := self.given) is None:
            given = self.needed
            slots = self._forward(inputs, given)
        (consts, init, xs), problem = inputs, self.problem
        slots, last = split(slots, len(slots) - sum(given.final))
        step, back = self.again, self.back
        # If slots lack leaves, the programs of the step and of the backward step are
        # cut down to the leaves that are there.
        known = None if all(given.held) else self._known_of_carry(given)
        if known is not None:
            last = put(given.final, given.final, last)
            consts = [*consts, *known.consts(last, init[problem.repetition.lead :])]
            step, back = restricted(step, known), Restricted(back, known)
        settings = step, problem.loop, back, self.layout.reversal
        products = self._known_products(rows, known)
        first = pick(init[problem.repetition.lead :], given.held)
        sweep = Sweep(*settings, consts, xs, zs, products, init=first)
        cts = problem.repetition.reverse(sweep, self.layout, slots, carried)
        return cts.consts, cts.carry, cts.xs

    def doubled(self, moves: Flags) -> Doubled:
        marks, _, _, _ = self.in_tree.unflatten(moves)
        active, y_active = activity(self.problem.step, marks)
        if not any(map(any, active)):
            return self._doubled_ends()
        # The carries move, so their tangents are needed at every step. The slots that
        # are there lack them: the forward loop is planned, and run, once more.
        problem = tangent_problem(self.problem, active, y_active)
        inputs, _, carried, zs = self.in_avals
        in_avals = (with_tangent_types(inputs, active), [], carried * 2, zs * 2)
        formula = self._derived(problem, Pushed, active, in_avals)
        return self._as_doubled(formula, active, uses_slots=False)

    def _doubled_ends(self) -> Doubled:
        """The same if only `carried` and `zs` have tangents.

        The carries do not move then, so the slots that are there will do.
        """
        active = Active(*((False,) * len(group) for group in self.in_avals[0]))
        back = Pushed(self.back, self.again, self._known(active))
        inputs, slots, carried, zs = self.in_avals
        in_avals = (inputs, slots, carried * 2, zs * 2)
        settings = self.problem, back, self.layout, self.given
        formula = Reverse(self.forward_loop, *settings, in_avals, self.products)
        return self._as_doubled(formula.checked(), active, uses_slots=True)

    def _as_doubled(
        self, formula: "Reverse", active: Active, uses_slots: bool
    ) -> Doubled:
        _, slots, *ends = self.in_avals
        all_of = lambda groups: tuple((True,) * len(group) for group in groups)
        no_slots, moving_ends = (False,) * len(slots), all_of(ends)
        moves = (*active, no_slots, *moving_ends)
        doubled = Doubled.of(formula, moves, all_of(self.out_aval))
        if uses_slots:
            return doubled
        uses = joined((*all_of(active), no_slots, *moving_ends))
        return dataclasses.replace(
            doubled, uses=uses, ins=behind((*active, *moving_ends))
        )

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        """Reverse mode of the reverse sweep: a forward loop, and a reverse sweep.

        See the top of this file. The forward loop carries `[*carry, *cotangents of what
        is carried back]`, and its consts and `xs` have the cotangents of the outputs
        behind them.
        """
        (primals, slots, carried, zs), problem = inputs, self.problem
        active, _ = activity(problem.step, perturbed[0])
        cts = instantiated(cts)
        try:
            # The forward loop and the backward step have been differentiated once, so
            # what is differentiated now are the rules of custom derivatives in them.
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
        zeros, zero_slots, *_ = self.zero_cts()
        if not any(map(any, active)):
            # Only the cotangents are differentiated: the forward loop does it all.
            carry, ct_zs, _ = self.forward_loop(problem, None, args)(*args)
            return zeros, zero_slots, carry[count:], ct_zs
        # At the end of the loop, the carry has no cotangent: a reverse sweep reads the
        # carries before steps, and the last one is before none.
        ct_carry = [
            instantiated(zero_cotangent(c))
            for c in pick(self.in_avals[0][1], active.carry)
        ]
        ends = ([*carried, *ct_carry], zs)
        formula = self._derived(problem, Pulled, active, (args, [], *ends))
        saves = Saves(formula.layout, formula.needed)
        forward = self.forward_loop(problem, saves.at_primal, args)
        carry, ct_zs, slots = forward(*args)
        given = (args, slots, *ends)
        settings = problem, formula.back, saves.layout, saves.given
        formula = Reverse(self.forward_loop, *settings, given)
        sums, carried_on, ct_xs = formula(*given)
        ct_init = carried_on[len(carried) :]
        ct_primals = map(put, zeros, active, (sums, ct_init, ct_xs))
        return tuple(ct_primals), zero_slots, carry[count:], ct_zs

    def settled(self, moves: Flags, reverse: bool) -> Self:
        active, _ = activity(self.problem.step, self.in_tree.unflatten(moves)[0])
        problem = settled_problem(self.problem, active, reverse)
        back = left_of(self.back, self.again, self._known(active), reverse)
        return self.with_params(problem=problem, back=back).checked()

    def checked(self) -> Self:
        """The same, unless its slots lack a leaf: then it runs the forward loop first.

        That happens where a derivative reads leaves that the gradient did not.
        """
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
            init = [False] * self.problem.repetition.lead + init
            reads = (consts, init, xs), *others
        return tuple(jax.tree.leaves(reads))

    @property
    def needed(self) -> Needs:
        """Which leaves of the carries the backward step reads, or needs to compute."""
        loop, block = self.problem.loop_back, self.layout.block
        return needs_of(self.back, self.again, loop, block)

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
        (consts, init, xs), slots, carried, zs = self.in_tree.unflatten(marks)
        carry, _ = reaching(self.problem.step, consts, init, xs)
        lead = self.problem.repetition.lead
        # A batch has all outputs batched; and if the number of steps is reached, or a
        # carry in a slot, so is everything.
        if axis_name is not None or any((*carry[:lead], *slots)):
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

    def _known_products(
        self, rows: Arrays, known: StoredLeaves | None
    ) -> KnownProducts | None:
        """The stored products of the last steps, with programs that take them.

        Args:
            rows: The rows of the products.
            known: Which leaves of a carry are known, if not all are.
        """
        if self.products is None:
            return None
        step = without_outputs(self.products.step)
        back = self.back.with_products(self.products)
        if known is not None:
            step = restricted(step, known)
            back = None if back is None else Restricted(back, known)
        first = self.problem.loop.length - self.layout.steps_with_products
        return KnownProducts(rows, first, step, back)

    def _known(self, active: Active) -> Active:
        """The active inputs, without the leaves of the carry that `lead` counts."""
        return active._replace(carry=active.carry[self.problem.repetition.lead :])

    def _known_of_carry(self, given: Needs) -> StoredLeaves:
        """Which leaves of each carry are known, given what slots hold."""
        return StoredLeaves.of(given, self.again, self.problem.loop_back)

    def _derived(
        self,
        problem: Problem,
        kind: Callable[..., BackwardStep],
        active: Active,
        in_avals: PyTree,
    ) -> "Reverse":
        """The derivative whose forward loop is given; it has no slots yet."""
        # `by_carries`, as a `Reverse` goes back from stored carries. By `StoreAll` it
        # stores all of them, and no residuals.
        layout = problem.layout(all_active(problem.step)).by_carries()
        back = kind(self.back, self.again, self._known(active))
        formula = Reverse(self.forward_loop, problem, back, layout, None, in_avals)
        layout = layout.for_needs(problem.step, formula.needed)
        return formula.with_params(layout=layout)

    def _forward(self, inputs: PyTree, needs: Needs) -> list[Value]:
        """Runs the forward loop for the carries that it leaves in slots."""
        problem = self.problem.with_bars(Again(backward=True))
        problem = dataclasses.replace(problem, step=without_outputs(problem.step))
        forward = self.forward_loop(problem, Saves(self.layout, needs), inputs)
        # Not called but expanded: this is within the expansion of a primitive already,
        # and nothing differentiates it any more.
        return forward.expand(*inputs)[2]

    def _pull_written_out(
        self, perturbed: PyTree, inputs: PyTree, cts: PyTree
    ) -> PyTree:
        """The same by JAX's own derivative of two loops, with every carry stored.

        For a custom rule that is not linear in its cotangents. Then the derivative with
        respect to these depends on their values at every step.
        """
        primals, _, *ends = inputs
        written_out = self.problem.repetition.written_out
        run = functools.partial(written_out, self.problem, self.back, self.again)
        marks = Active(*map(inexact_only, perturbed[0], primals))
        of_marked = lambda m, ends: run(tuple(map(put, primals, marks, m)), ends)
        _, pull = jax.vjp(of_marked, tuple(map(pick, primals, marks)), tuple(ends))
        ct_marked, ct_ends = pull(Taken(*cts))
        zeros, zero_slots, *_ = self.zero_cts()
        return (tuple(map(put, zeros, marks, ct_marked)), zero_slots, *ct_ends)
