"""Runs a loop forward by segments: from each carry that is stored to the next one.

Between two of them nothing but the step is run. So storing a carry takes time once for
each segment, and not at every step.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, axes_of, stack_type, vary, zero_array
from ..._programs import constant
from ..._types import Index, PyTree, Value
from ...progress import run_with_bar
from ._forward import iterate
from ._loop import Loop, element, opaque, store, zero
from ._step import Step
from .orders._order import AbstractSlotOrder

# A program that has the step in it more often takes longer to compile.
_MOST_GROUPS = 2


class Reached(NamedTuple):
    """How far a loop has come.

    Attributes:
        number: That of its bar.
        position: The position of the next step.
        carry: The carry before it.
        ys: The outputs, so far.
    """

    number: Index
    position: Index
    carry: list[Value]
    ys: list[Value]


class Group(NamedTuple):
    """Segments that follow one another, and are equally long.

    Attributes:
        first: The number of the first of them.
        size: How many there are.
        stride: How many steps each of them has; `None` if they are not equally long.
    """

    first: int
    size: int
    stride: int | None


@dataclasses.dataclass(frozen=True)
class BySegments:
    """A loop in segments, between the carries that an order starts from.

    Attributes:
        step: The step.
        loop: The loop.
        order: Which carries are stored.
        consts: What each step gets.
        xs: What the steps get one element at a time of.
    """

    step: Step
    loop: Loop
    order: AbstractSlotOrder
    consts: Arrays
    xs: Arrays

    def opaque(self) -> "BySegments":
        """The same for loops in loops: what they read is not known to be repeated."""
        return dataclasses.replace(self, consts=opaque(self.consts), xs=opaque(self.xs))

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Where the segments start."""
        return tuple(self.order.starts)

    @property
    def groups(self) -> list[Group]:
        """All segments. For each group the step is in the program once."""
        ends = (*self.starts[1:], self.loop.length)
        sizes = [end - start for start, end in zip(self.starts, ends, strict=True)]
        groups, first = list[Group](), 0
        for stride, equal in itertools.groupby(sizes):
            groups.append(Group(first, len(list(equal)), stride))
            first += groups[-1].size
        has_bar = self.loop.meter.here.is_shown
        if has_bar or self.loop.stops or len(groups) > _MOST_GROUPS:
            return [Group(0, len(sizes), None)]
        return groups

    @property
    def are_static(self) -> bool:
        """Whether all loops have static trip counts."""
        return all(group.stride is not None for group in self.groups)

    def start(self, init: Arrays) -> Reached:
        """Before the first step."""
        loop = self.loop
        ys = [zero_array(stack_type(y, loop.rows)) for y in self.step.y_types]
        number = loop.meter.here.open([*self.consts, *init, *self.xs])
        reached = Reached(number, zero(), list(init), ys)
        if not loop.stops:
            return reached
        return jax.tree.map(lambda x: vary(x, axes_of(init[0])), reached)

    def each(
        self, body: Callable[[PyTree, int | None, PyTree], PyTree], state: PyTree
    ) -> PyTree:
        """Calls `body(segment, stride, state)` for each segment.

        Segments behind the end of a loop that stops have no steps, and the last carry.

        Args:
            body: What is done for one. It returns the state, of the same types.
            state: What the first one gets. It starts with what has been `Reached`.
        """
        if self.loop.stops:
            axes = axes_of(state[0].carry[0])
            state = jax.tree.map(lambda x: vary(x, axes), state)
        for first, size, stride in self.groups:
            run = lambda i, state, at=first, of=stride: body(at + i, of, state)
            state = lax.fori_loop(0, size, run, state)
        return state

    def run(self, reached: Reached, segment: Index, stride: int | None) -> Reached:
        """Runs a segment, from where the one before it has ended."""
        if stride is None:
            ends = constant([*self.starts[1:], self.loop.length])
            return self.run_to(reached, element(ends, segment))
        if stride == 1:
            return self._move(reached)
        unroll = min(self.loop.unroll, stride)
        body = lambda _, reached: self._move(reached)
        return lax.fori_loop(0, stride, body, reached, unroll=unroll)

    def run_to(self, reached: Reached, stop: Index) -> Reached:
        """Runs steps up to a position, unless the loop ends before."""
        # The position comes first for a bar, and the carry second.
        number, *state = reached
        run = lambda state, stop: self._moves(Reached(number, *state), stop)[1:]
        gauge, last_y = self.loop.meter.here, self._last_y
        number, state = run_with_bar(gauge, number, tuple(state), stop, run, last_y)
        return Reached(number, *state)

    def _moves(self, reached: Reached, stop: Index) -> Reached:
        if self.loop.stops:
            goes_on = lambda reached: reached.carry[0] & (reached.position < stop)
            return lax.while_loop(goes_on, self._move, reached)
        left = lambda reached: stop - reached.position
        return iterate(self._move, reached, left, self.loop.unroll)

    def _move(self, reached: Reached) -> Reached:
        number, position, carry, ys = reached
        carry, y = self.step(self.consts, carry, self.loop.x(self.xs, position))
        return Reached(number, position + 1, carry, self._with(ys, y, position))

    def _with(self, ys: Arrays, y: Arrays, position: Index) -> list[Value]:
        """`ys` with the outputs of the step at a position, if they are kept."""
        if not self.loop.rows:
            return list(ys)
        row, is_kept = self.loop.row(self.loop.index(position))
        if is_kept is not True:
            before = [element(b, row) for b in ys]
            y = [jnp.where(is_kept, *pair) for pair in zip(y, before, strict=True)]
        return [store(b, leaf, row) for b, leaf in zip(ys, y, strict=True)]

    def _last_y(self, state: tuple[Value, list[Value], list[Value]]) -> list[Value]:
        position, _, ys = state
        row, _ = self.loop.row(self.loop.index(position - 1))
        return [element(b, row) for b in ys] if self.loop.rows else []
