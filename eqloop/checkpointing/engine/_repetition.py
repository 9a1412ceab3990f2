"""How a loop decides whether to run another step.

A scan runs as many steps as it is long: `Counted`. Other loops end when their carry
says so (`whiles/`). The two primitives are the same for all of them, and ask one of
these classes for everything that differs.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar

import jax

from ..._arrays import Arrays, pick, with_batch_axis
from ..._programs import Formula
from ..._types import Aval, BatchAxis, PyTree, Value
from ...progress import sweep_with_bar
from . import _forward
from ._by_segments import BySegments
from ._derived import there_and_back
from ._forward import Active
from ._layout import AbstractLayout, Layout
from ._loop_spec import LoopSpec
from ._problem import Problem, batched_problem
from ._step import Step
from ._sweep import Cotangents, Sweep
from .leaves._saves import Saves

if TYPE_CHECKING:
    from ._backward_step import BackwardStep, Taken
    from ._primitive import PlannedLoop

# The layouts by which loops of one kind run.
L = TypeVar("L", bound=AbstractLayout)


class AbstractRepetition(abc.ABC, Generic[L]):
    """How a loop goes on: a frozen, hashable dataclass.

    All of its loops run by one kind of layout, `L`.
    """

    # The advice in an error, where a callback keeps the loop from being reversed.
    instead_of_effects: ClassVar[str]
    # How many leaves at the start of the carry do not exist on the way back. A while
    # loop has one, its condition: the way back counts steps instead.
    lead: ClassVar[int]
    # Whether it may have `xs`, and so a row for each step.
    has_xs: ClassVar[bool] = True

    @property
    def own_leaves(self) -> int:
        """How many leaves at the start of the carry belong to the loop, not the user.

        They may not be left out, even if no output depends on them.
        """
        return self.lead

    def layout(self, problem: Problem, active: Active) -> L:
        """The layout that the loop's schedule decides on."""
        return problem.planner.layout(LoopSpec(problem, active))

    def planned(self, problem: Problem) -> Problem:
        """The loop that the schedule is shown, see `Problem.planned`."""
        return problem

    def run_as_planned(self, problem: Problem) -> Problem:
        """The loop that runs by the plan of this one, see `Problem.run`."""
        return problem

    def in_lockstep(self) -> Self:
        """The same for a loop of which no example of a batch stops by itself."""
        return self

    @abc.abstractmethod
    def run(
        self, problem: Problem, saves: Saves[L] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the loop.

        Args:
            problem: The loop.
            saves: What to store for the way back; `None` for nothing.
            inputs: Consts, the initial carry and `xs`.

        Returns:
            The final carry, `ys`, and what is stored: integers and slots. Leaves of
            the last carry are added by the primitive.
        """

    @abc.abstractmethod
    def saved_types(self, step: Step, saves: Saves[L]) -> list[Aval]:
        """The types of what `run` stores."""

    @abc.abstractmethod
    def reverse(
        self, sweep: Sweep, layout: L, saved: Arrays, carried: Arrays
    ) -> Cotangents:
        """Runs a reverse sweep.

        Args:
            sweep: The sweep, past all steps that the loop may have.
            layout: How the loop was stored.
            saved: What `run` has stored.
            carried: What is carried back from the end.
        """

    @abc.abstractmethod
    def reversed_step(self, step: Step) -> Step:
        """The step for the way back, without the leaves that `lead` counts."""

    @abc.abstractmethod
    def check(self, problem: Problem, active: Active, inputs: PyTree) -> None:
        """Raises an error for what cannot be differentiated in reverse mode."""

    def batched(
        self, formula: "PlannedLoop", axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        """The loop under `vmap`, see `Formula.batched`, if all examples run as long.

        Of what is stored, the integers are the same for all examples. Slots have their
        rows along the first axis, so they are batched along the second; the leaves of
        the last carry have no rows, and are batched along the first.
        """
        dims = tuple(map(tuple, dims))
        problem, carry, ys = batched_problem(formula.problem, axis_data, dims)
        consts, init, xs = args
        init = [
            with_batch_axis(c, dim, axis_data) if flag else c
            for c, dim, flag in zip(init, dims[1], carry, strict=True)
        ]
        args = (list(consts), init, list(xs))
        batched = type(formula)(problem, formula.saves, args)
        at = lambda axis, flags: [axis if flag else None for flag in flags]
        saved = list[int | None]()
        if formula.saves is not None:
            held, final = formula.saves.needs
            known = carry[self.lead :]
            saved = at(1, pick(known, held)) + at(0, pick(known, final))
        # Integers come first; their number depends on how the loop goes on.
        integers = len(batched.out_aval[2]) - len(saved)
        return batched, args, [*at(0, carry), *at(1, ys), *[None] * integers, *saved]

    @abc.abstractmethod
    def written_out(
        self,
        problem: Problem,
        back: "BackwardStep",
        step: Step,
        inputs: PyTree,
        ends: PyTree,
    ) -> "Taken":
        """A whole reverse sweep for JAX to differentiate, see `there_and_back`.

        It is asked for if the backward step is not linear in what it carries back.
        """


@dataclasses.dataclass(frozen=True)
class Counted(AbstractRepetition[Layout]):
    """A number of steps that is known beforehand.

    Attributes:
        ending: For planning only: set if the loop stands for a scan that may end early,
            which is planned as if it ran all of its steps.
    """

    ending: AbstractRepetition[Layout] | None = None

    instead_of_effects: ClassVar[str] = "Use `schedule=el.StoreAll()`"
    lead: ClassVar[int] = 0

    def run_as_planned(self, problem: Problem) -> Problem:
        if self.ending is None:
            return problem
        loop = dataclasses.replace(problem.loop, stops=True)
        return dataclasses.replace(problem, loop=loop, repetition=self.ending)

    def run(
        self, problem: Problem, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]]:
        step, loop = problem.step, problem.loop
        # A loop whose reversal reads no leaf of the carry, a sum for example, has slots
        # without any arrays.
        if saves is None or not any(saves.held):
            return (*_forward.primal(step, loop, *inputs), [])
        order, held = saves.layout.order.by_carries(), saves.held
        consts, init, xs = order.checked(step, loop, held, inputs)
        segments = BySegments(step, loop, order, consts, xs)
        return saves.layout.slots.sweep(segments, held, init)

    def saved_types(self, step: Step, saves: Saves[Layout]) -> list[Aval]:
        rows = len(saves.layout.order.by_carries().starts) + 1
        return saves.layout.slots.types(pick(step.carry_types, saves.held), rows)

    def reverse(
        self, sweep: Sweep, layout: Layout, saved: Arrays, carried: Arrays
    ) -> Cotangents:
        run = lambda sweep, carried: sweep.run(layout, saved, carried)
        return sweep_with_bar(run, sweep, carried, [*jax.tree.leaves(saved), *sweep.zs])

    def reversed_step(self, step: Step) -> Step:
        return step

    def check(self, problem: Problem, active: Active, inputs: PyTree) -> None:
        """Nothing is refused."""

    def written_out(
        self,
        problem: Problem,
        back: "BackwardStep",
        step: Step,
        inputs: PyTree,
        ends: PyTree,
    ) -> "Taken":
        return there_and_back(back, step, problem.loop, inputs, ends)
