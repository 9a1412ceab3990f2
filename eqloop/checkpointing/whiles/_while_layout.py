"""Layouts of loops of unknown length: which carries are stored as the loop goes on.

`Bounded` has nested levels for the greatest number of steps, of which only the first
are run. `_online.py` has the other layout. There are functions here by which layouts
run a loop until its carry says stop, or up to some position.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, axes_of, pick, put_on_mesh, vary
from ..._programs import constant, mark
from ..._types import Aval, Index, Value
from ..engine._forward import Active
from ..engine._layout import AbstractLayout, Layout, Stored
from ..engine._problem import Problem
from ..engine._sweep import AbstractReversal, Cotangents, Sweep
from ..engine.orders._levels import nests
from ..engine.orders._nested import Nested
from ..engine.reversals._block_reversals import ByResiduals
from ..engine.slots._slots import AbstractSlots, DeviceSlots
from ..rewrites import _short_loops
from ..rewrites._later_steps import Steps, later_step, steps_to_run
from ..rewrites._short_loops import without_short_loops
from ..steps._dce import dce_step
from ..steps._loop import zero
from ..steps._step import NoWayBackError, Step

# The most that a counter of 32 bits can hold; no loop is as long.
UNLIMITED = 2**31 - 1

# How many steps have been run, and the carry.
State: TypeAlias = tuple[Any, list[Any]]


class WhileDescription(NamedTuple):
    """What a layout stores, and how often a gradient evaluates the step.

    Attributes:
        length: The most steps that the loop may run, `None` if there is no bound.
        slots: How many carries are stored at once, at the most.
        setting: The setting that the user has chosen, as it is written in the code.
        evaluations: How often a gradient of `length` steps evaluates the step, if that
            is known.
        in_words: The same in words.
        levels: How many segments each nested level has, if there are levels.
    """

    length: int | None
    slots: int
    setting: str
    evaluations: int | None
    in_words: str
    levels: tuple[tuple[int, ...], ...] = ()


class AbstractWhileLayout(AbstractLayout):
    """Which carries of a while loop are stored: a frozen, hashable dataclass.

    It is its own schedule, the same for every loop. A forward sweep stores a few
    integers, the first of which is the number of steps that were run, and then the
    slots. These hold carries without their first leaf, which says whether to go on.
    """

    slots: AbstractSlots = DeviceSlots()
    reversal: AbstractReversal = ByResiduals()
    kept: tuple[str, ...] | None = None

    def _decide(self, problem: Problem[Any], active: Active) -> Self:
        """Itself, for every loop and every derivative: it is its own planner."""
        return self

    def notes(self, step: Step) -> list[str]:
        """What is done to a step where it is run and reversed, for a plan."""
        return [_short_loops.NOTE] if without_short_loops(step) is not step else []

    @property
    def block(self) -> int:
        return 1

    @property
    def carries(self) -> int:
        return self.rows

    @property
    def stores_residuals(self) -> bool:
        return False

    def by_carries(self) -> Self:
        return self

    @property
    @abc.abstractmethod
    def integers(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the integers that are stored before the slots."""

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """How many slots there are."""

    @property
    @abc.abstractmethod
    def described(self) -> "WhileDescription":
        """What it stores and how often it runs steps, for the table of a plan."""

    @abc.abstractmethod
    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], Stored]:
        """Runs the loop, and gives its final carry and what `reverse` needs.

        `held` marks the leaves of a carry that slots hold, but for the first one.
        """

    @abc.abstractmethod
    def reverse(self, sweep: Sweep, stored: Stored, ct_carry: Arrays) -> Cotangents:
        """Takes cotangents of the final carry back, given what `forward` has stored."""

    def stored_types(self, carry_types: Sequence[Aval], held: Flags) -> Stored:
        """The types of what `forward` stores."""
        # Traced, since the type must name the mesh that is in use.
        axes = axes_of(carry_types[0])
        zero = lambda n: vary(put_on_mesh(jnp.zeros(n, jnp.int32)), axes)
        zeros = lambda: list(map(zero, self.integers))
        integers = jax.make_jaxpr(zeros)().out_avals
        carries = self.slots.types(pick(carry_types[1:], held), self.rows)
        return Stored.of(integers, carries)


@dataclasses.dataclass(frozen=True)
class ForwardOnly:
    """The layout of a loop without reverse mode, whose steps are not limited.

    Attributes:
        name: What the error calls the loop.
        advice: What it says one should do.
    """

    max_steps: int = UNLIMITED
    name: str = "WhileLoop"
    advice: str = (
        "Use `el.BoundedWhileLoop(cond, body, max_steps=...)` if there is a bound "
        "on the number of steps, `el.CheckpointedWhileLoop(cond, body)` if there "
        "is none"
    )

    @property
    def runner(self) -> None:
        """The engine runs it."""

    def _decide(self, problem: Problem[Any], active: Active) -> NoReturn:
        raise NoWayBackError(
            f"{self.name} cannot be differentiated in reverse mode (`jax.grad`, "
            f"`jax.vjp`), as that needs memory for a number of steps that is unknown. "
            f"{self.advice}, or forward mode (`jax.jvp`, `jax.jacfwd`)."
        )


def first_state(init: Arrays) -> State:
    """The state before the first step."""
    return vary(zero(), axes_of(init[0])), list(init)


def run_until(step: Step, consts: Arrays, state: State, stop: Index) -> State:
    """Runs steps up to a position, or until the carry says stop."""
    move = next_carry(step, consts)

    def body(state: State) -> State:
        mark(state[0])
        return state[0] + 1, move(state[1])

    return lax.while_loop(lambda state: goes_on(state, stop), body, state)


def goes_on(state: State, stop: Index) -> jax.Array:
    """Whether another step is run before a position."""
    # The step has put the user's condition into this leaf. So a loop that is run in
    # segments evaluates it no more often than one that is not.
    position, carry = state
    return carry[0] & (position < stop)


def next_carry(step: Step, consts: Arrays) -> Callable[[list[Value]], list[Value]]:
    """The step as a function from carry to carry."""
    return lambda carry: step(consts, carry, [])[0]


@dataclasses.dataclass(frozen=True)
class Bounded(AbstractWhileLayout):
    """The order of a loop of `max_steps` steps, of which only the first ones are run.

    The number of steps and the slots are stored. Segments that are not run take no
    time on the way back, but their slots are there.
    """

    max_steps: int
    base: int

    @property
    def order(self) -> Nested:
        """The order of a loop that runs all `max_steps` steps."""
        return Nested(nests(self.max_steps, self.base))

    @property
    def integers(self) -> Sequence[tuple[int, ...]]:
        return [()]

    @property
    def rows(self) -> int:
        return len(self.order.starts)

    @property
    def described(self) -> WhileDescription:
        order, setting = self.order, f"base={self.base}"
        count, in_words = order.evaluations, f"<= {order.evaluations}"
        most = self.max_steps, order.slots
        return WhileDescription(*most, setting, count, in_words, order.levels)

    def forward(
        self, step: Step, held: Flags, consts: Arrays, init: Arrays
    ) -> tuple[list[Value], Stored]:
        step = dce_step(step)

        # The slots are stacked by a scan, and not carried by the while loop within it.
        # Under `vmap`, a while loop selects between old and new carry for each example
        # at every step, and so would copy all slots.
        def segment(state: State, stop: Index) -> tuple[State, list[Value]]:
            kept = self.slots.packed(pick(state[1][1:], held))
            return run_until(step, consts, state, stop), kept

        # Segments after the end run no step: the carry says stop when they begin. Their
        # slots hold the final carry, which is never read.
        stops = constant([*self.order.starts[1:], self.max_steps])
        (count, carry), slots = lax.scan(segment, first_state(init), stops)
        return carry, Stored.of([count], slots)

    def reverse(self, sweep: Sweep, stored: Stored, ct_carry: Arrays) -> Cotangents:
        step, back = dce_step(sweep.step), sweep.back.with_steps(without_short_loops)
        sweep = dataclasses.replace(sweep, step=step, back=back)
        return Layout(self.order, self.slots).reverse(sweep, stored, ct_carry)


def run_all(steps: Steps, consts: Arrays, init: Arrays, max_steps: int) -> State:
    """Runs a loop. Returns how many steps it ran, and the final carry."""
    state = first_state(init)
    if steps.later is not steps.first:
        state = run_until(steps.first, consts, state, 1)
    return run_until(steps.later, consts, state, max_steps)


class Sweeps(NamedTuple):
    """The way back past the first step, and past every other one; see `Steps`."""

    first: Sweep
    later: Sweep


def sweeps_past(sweep: Sweep) -> Sweeps:
    """The way back past the steps of a loop, with short loops written out."""
    steps, back = steps_to_run(sweep.step), sweep.back
    back = back.with_steps(without_short_loops)
    first = dataclasses.replace(sweep, step=steps.first, back=back)
    back_later = back.with_steps(later_step)
    if steps.later is steps.first and back_later == back:
        return Sweeps(first, first)
    return Sweeps(first, dataclasses.replace(sweep, step=steps.later, back=back_later))
