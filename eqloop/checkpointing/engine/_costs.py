"""What a step costs, and how long the pieces of a gradient take.

Orders add these numbers up. `planning` finds them out, from the traced step and the
backend in use.
"""

import abc
import dataclasses
from typing import TYPE_CHECKING, Self

from ..._types import Aval

if TYPE_CHECKING:
    from .reversals._block_reversals import AbstractReversal


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one step costs when the loop is differentiated.

    Attributes:
        carry: Bytes of a carry.
        read: Bytes of those leaves of a carry that the reversal of one step reads.
        held: Bytes of the leaves that a slot holds: of those that are read, and of
            those that must be known to get to such leaves of later carries.
        held_types: The types of those leaves.
        x: Bytes of one element of `xs`.
        ct_x: Bytes of its cotangent.
        ct_y: Bytes of the cotangents of its outputs.
        ct_consts: Bytes of the cotangents of what all steps share.
        products: Bytes of what a batch of steps adds to these, of which a large product
            is made part by part.
        known: Bytes of the products of a step that are kept if it is run again before
            it is reversed together with others.
        maps: Bytes of the linear map by which the cotangent of the carry goes back past
            a step that is reversed together with others.
        residuals: Bytes that one step adds to the residuals of a block.
        rows: How many slots can hold the residuals of a step, in the place of carries;
            `None` if they have not the types for it.
        everything: Bytes that are stored if all residuals of the loop are.
        evaluation: The work of evaluating the step.
        reversal: The work of taking cotangents back, given the residuals.
        started_once: The part of both that it takes to start those operations, of
            whatever size, that a batch of steps has once: all but the ones by which the
            cotangent of the carry goes back step by step.
        dots_once: How many of these are dots.
        reads: Entries of outer products that are computed from stored residuals.
    """

    carry: int
    read: int
    held: int
    held_types: tuple[Aval, ...]
    x: int
    ct_x: int
    ct_y: int
    ct_consts: int
    products: int
    known: int
    maps: int
    residuals: int
    rows: int | None
    everything: int
    evaluation: float
    reversal: float
    started_once: float
    dots_once: int
    reads: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """What single operations take on a backend, in nanoseconds.

    Attributes:
        flop: One multiplication or addition of a contraction.
        entry: One entry of an elementwise result.
        costly_entry: The same for a transcendental function.
        equation: Any equation, however small.
        dot_of_batch: A dot of a batch of steps, in addition. XLA writes out the product
            of a small matrix and a vector, and calls a library for that of two
            matrices.
        byte: One byte written to a buffer that lives longer than an iteration.
        byte_of_sums: One byte of a sum that each step adds to, read or written.
        iteration: One iteration of a loop whose trip count is static.
        dynamic_iteration: One iteration of a loop whose trip count is not.
        run: To find out which steps of a binomial sweep come next, and to enter the
            loops that run them.
        byte_to_host: One byte of a carry that is sent to the host, or fetched from it.
        byte_to_file: One byte of a carry that is written to a file, or read from one.
        callback: To call a function on the host.
        entry_of_reads: One entry of an outer product of what was read from stored
            residuals. XLA may fuse the reads into the product, and what is computed
            from them, and then repeats both for every entry.
    """

    flop: float
    entry: float
    costly_entry: float
    equation: float
    dot_of_batch: float
    byte: float
    byte_of_sums: float
    iteration: float
    dynamic_iteration: float
    run: float
    byte_to_host: float
    byte_to_file: float
    callback: float
    entry_of_reads: float


@dataclasses.dataclass(frozen=True)
class AbstractPace(abc.ABC):
    """What orders add up to the time of a gradient, in nanoseconds.

    Attributes:
        cost: What a step costs.
        rate: What single operations take on the backend in use.
        of_known: The same for steps whose products are known, if these can be.
    """

    cost: StepCost
    rate: Rates
    of_known: "AbstractPace | None" = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def is_measured(self) -> bool:
        """Whether that was found by running pieces of this very step."""

    @property
    @abc.abstractmethod
    def advance(self) -> float:
        """One step that is run, by the primal or again."""

    @property
    @abc.abstractmethod
    def everything(self) -> float:
        """One step, run and taken back, of a loop whose residuals are all stored."""

    @abc.abstractmethod
    def block(self, reversal: "AbstractReversal", count: int) -> float:
        """A block of so many steps, taken back from the carry before it."""

    @abc.abstractmethod
    def recomputing(self, cost: StepCost, again: float) -> Self:
        """The same for a step that keeps something else, as a guess.

        Args:
            cost: What that step costs.
            again: How much more it computes again, as work.
        """

    @abc.abstractmethod
    def with_known_products(self, cost: StepCost) -> Self:
        """The same for a step whose products are known, as a guess.

        Args:
            cost: What that step costs.
        """

    @abc.abstractmethod
    def beside(self, other: "AbstractPace") -> Self:
        """The same at a moment when the step was run as fast as in another pace.

        What was measured at two times may differ by how busy the machine was.
        """

    @property
    def slot(self) -> float:
        """A carry, written to a slot and read from it."""
        return 2 * self.cost.held * self.rate.byte + 2 * self.rate.iteration


@dataclasses.dataclass(frozen=True)
class Estimated(AbstractPace):
    """What the work of a step takes at the rates of the backend."""

    @property
    def is_measured(self) -> bool:
        return False

    @property
    def advance(self) -> float:
        return self.cost.evaluation + self.rate.iteration

    @property
    def everything(self) -> float:
        cost, rate = self.cost, self.rate
        return self.advance + reversal_time(cost, rate) + residuals_time(cost, rate)

    def block(self, reversal: "AbstractReversal", count: int) -> float:
        return reversal.block_time(self.cost, count, self.rate)

    def recomputing(self, cost: StepCost, again: float) -> Self:
        return dataclasses.replace(self, cost=cost)

    def with_known_products(self, cost: StepCost) -> Self:
        return dataclasses.replace(self, cost=cost)

    def beside(self, other: AbstractPace) -> Self:
        return self


def reversal_time(cost: StepCost, rate: Rates) -> float:
    """What it takes to take a step back, given its residuals."""
    # The cotangents of what all steps share are a sum, which every step adds to.
    return cost.reversal + rate.iteration + 2 * cost.ct_consts * rate.byte_of_sums


def residuals_time(cost: StepCost, rate: Rates) -> float:
    """What it takes to store the residuals of a step and to read them."""
    return 2 * cost.residuals * rate.byte + cost.reads * rate.entry_of_reads
