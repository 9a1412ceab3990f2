"""Steps that are run again, to store the carry before each of them.

A segment runs again from its first carry, one step after the other. If the first
carries of several segments are there, these can run side by side, as one batch:

    one segment       s0 s1 s2 s3, and later s4 s5 s6 s7
    side by side      s0 s1 s2 s3
                      s4 s5 s6 s7

Each step of the loop is then a step of all of them. The product of a matrix and a
vector becomes one of two matrices, which reads the matrix once for all segments, and
small operations are started once. So to run steps again takes a part of the time that
it took to run them at first, where one had to wait for the other.

A reversal is given one of the two, and asks it for what it needs (`rerun`).

It gains: without segments side by side, what is planned for an H100 starts 1.15 times
as many kernels in the median, and up to 1.6 times as many. On a CPU, nothing is gained.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ...._arrays import Arrays, stack_type, zero_array
from ...._programs import run, unwatched
from ...._types import Index, PyTree, Value
from .._loop import store
from .._sweep import Sweep
from ..slots._slots import AbstractSlots, Carries, StoredSteps
from ._known_products import Products

_Stored = TypeVar("_Stored")


@dataclasses.dataclass(frozen=True)
class AbstractRerun(abc.ABC):
    """Consecutive steps to run again.

    Attributes:
        slots: The slots to store their carries in.
        start: The position of the first step.
    """

    slots: AbstractSlots
    start: Index

    @property
    @abc.abstractmethod
    def most(self) -> int:
        """How many steps there are at most, which is known while tracing."""

    @abc.abstractmethod
    def stored(self, sweep: Sweep) -> StoredSteps:
        """Runs them, and stores the carry before each step."""

    @abc.abstractmethod
    def with_products(self, sweep: Sweep, products: Products) -> StoredSteps:
        """The same, with the products of each step."""

    def _as_stored(
        self, count: Index, carries: Carries, rows: Arrays = ()
    ) -> StoredSteps:
        return StoredSteps(carries, 0, self.start, count, self.most, rows)


@dataclasses.dataclass(frozen=True)
class Segment(AbstractRerun):
    """Steps that run one after the other.

    Attributes:
        carry: The carry before the first step.
        count: How many steps there are. It may be known only when they run.
        length: How many there are at most.
    """

    carry: Arrays
    count: Index
    length: int

    @property
    def most(self) -> int:
        return self.length

    def stored(self, sweep: Sweep) -> StoredSteps:
        settings = self.slots, self.carry, self.start, self.count, self.most
        return self._as_stored(self.count, carries_within(sweep, *settings))

    def with_products(self, sweep: Sweep, products: Products) -> StoredSteps:
        # Both the step and the program of its products compute the products. The two
        # are next to each other, so XLA merges them.
        def body(i: Index, state: PyTree) -> PyTree:
            carry, carries, rows = state
            x = sweep.loop.x(sweep.xs, sweep.position(self.start + i))
            values = run(products.program, *sweep.consts, *carry, *x)
            rows = [store(row, v, i) for row, v in zip(rows, values, strict=True)]
            carry, carries = sweep.next(carry, self.start + i), carries.write(carry, i)
            return carry, carries, rows

        rows = [zero_array(stack_type(aval, self.most)) for aval in products.types]
        state = list(self.carry), self.slots.filled(self.carry, self.most), rows
        unroll = min(sweep.loop.unroll, self.most)
        _, carries, rows = lax.fori_loop(0, self.count, body, state, unroll=unroll)
        return self._as_stored(self.count, carries, rows)


@dataclasses.dataclass(frozen=True)
class SideBySide(AbstractRerun):
    """Segments of equal length, one after the other, that run side by side.

    Attributes:
        carries: The first carry of each segment, stacked along the first axis.
        side_by_side: How many segments there are.
        each: How many steps each of them has.
    """

    carries: Arrays
    side_by_side: int
    each: int

    @property
    def most(self) -> int:
        return self.side_by_side * self.each

    def stored(self, sweep: Sweep) -> StoredSteps:
        found = self._run(sweep, lambda own, one: one.stored(own).carries)
        return self._as_stored(self.most, jax.tree.map(_end_to_end, found))

    def with_products(self, sweep: Sweep, products: Products) -> StoredSteps:
        def stored(own: Sweep, one: Segment) -> tuple[Carries, list[Value]]:
            steps = one.with_products(own, products)
            return steps.carries, list(steps.products)

        return self._as_stored(
            self.most, *jax.tree.map(_end_to_end, self._run(sweep, stored))
        )

    def _run(
        self, sweep: Sweep, stored: Callable[[Sweep, Segment], _Stored]
    ) -> _Stored:
        """What is stored of each segment, stacked along the first axis."""
        loop = sweep.loop
        axes = list(loop.x_axes[: len(sweep.xs)])
        block = loop.block(sweep.xs, sweep.position(self.start), self.most)

        def of_segment(carry: Arrays, xs: Arrays) -> _Stored:
            own = dataclasses.replace(
                sweep, loop=loop.part(self.each), xs=xs, first=None
            )
            segment = Segment(self.slots, 0, carry, self.each, self.each)
            # `block` has marked the steps. Positions within a segment mean nothing.
            with unwatched():
                return stored(own, segment)

        xs = [self._cut(x, axis) for x, axis in zip(block, axes, strict=True)]
        if loop.reverse:  # the last segment comes first in `xs`
            xs = [jnp.flip(x, axis) for x, axis in zip(xs, axes, strict=True)]
        # All segments have the same static length. So under `vmap` they are one loop
        # with a known number of trips, and nothing is selected.
        return jax.vmap(of_segment, in_axes=(0, axes))(list(self.carries), xs)

    def _cut(self, x: Value, axis: int) -> Value:
        """Splits the axis of all steps into one of segments, and one of their steps."""
        shape = (*x.shape[:axis], self.side_by_side, self.each, *x.shape[axis + 1 :])
        return x.reshape(shape)


def _end_to_end(row: Value) -> Value:
    """Joins the axis of segments and the one of their steps."""
    return row.reshape(-1, *row.shape[2:])


def carries_within(
    sweep: Sweep,
    slots: AbstractSlots,
    carry: Arrays,
    start: Index,
    count: Index,
    most: int,
) -> Carries:
    """Runs steps again and stores the carry before each of them.

    Args:
        sweep: The sweep.
        slots: The slots to store the carries in.
        carry: The carry before the first step.
        start: The position of the first step.
        count: How many steps there are. It may be known only when they run.
        most: How many steps there are at most, which is known while tracing.
    """
    move = lambda i, carry: sweep.next(carry, start + i)
    # One move less than steps: the first carry is there. The last step is not run.
    unroll = max(min(sweep.loop.unroll, most - 1), 1)
    return slots.filled(carry, most).run_on(carry, count, move, unroll)
