"""Schedules: how to trade memory for recomputation. One class is one idea."""

import abc
import dataclasses

from ._engine import Active
from ._layout import Layout, Nested, Revolved, Stored
from ._levels import Nest, nests
from ._primitive import Problem


class AbstractSchedule(abc.ABC):
    """The user's wish, from which a layout follows for each loop.

    A schedule is a frozen, hashable value. To add one, subclass this class and say in
    `layout` which carries are stored; the engine does the rest, in all modes.
    """

    @abc.abstractmethod
    def layout(self, problem: Problem, active: Active) -> Layout:
        """The layout for one loop, given which of its inputs are differentiated."""


@dataclasses.dataclass(frozen=True)
class StoreAll(AbstractSchedule):
    """Plain `jax.lax.scan`: every residual is kept and nothing is computed twice."""

    def layout(self, problem: Problem, active: Active) -> Layout:
        return Stored(problem.loop.length)


@dataclasses.dataclass(frozen=True)
class Recursive(AbstractSchedule):
    base: int = 16

    def layout(self, problem: Problem, active: Active) -> Layout:
        length = problem.loop.length
        if length == 0:
            return Stored(0)
        block = 1 if problem.policy is None else min(self.base, length)
        return Nested(nests(length, self.base, block))


@dataclasses.dataclass(frozen=True)
class Chunked(AbstractSchedule):
    chunk_size: int

    def layout(self, problem: Problem, active: Active) -> Layout:
        length, chunk = problem.loop.length, min(self.chunk_size, problem.loop.length)
        if length == 0:
            return Stored(0)
        count, rest = divmod(length, chunk)
        if problem.policy is None:
            parts = [Nest((count, chunk))] + [Nest((rest,))] * (rest > 0)
        else:
            parts = [Nest((count,), chunk)] + [Nest((1,), rest)] * (rest > 0)
        return Nested(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Binomial(AbstractSchedule):
    checkpoints: int
    block: int = 1

    def layout(self, problem: Problem, active: Active) -> Layout:
        if problem.loop.length == 0:
            return Stored(0)
        return Revolved(problem.loop.length, self.checkpoints, self.block)
