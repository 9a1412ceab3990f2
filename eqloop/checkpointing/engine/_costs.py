"""The cost of a step, and the rates at which a backend does its work.

`planning` finds these numbers, from the traced step and the device. Orders and
reversals add them up to the memory and the time of a whole gradient.
"""

import dataclasses
import math

from ..._types import Aval


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The cost of one step of a loop that is differentiated.

    Bytes first. Work is in nanoseconds, at the rates of the backend.

    Attributes:
        carry: Bytes of a carry.
        read: Bytes of the leaves of a carry that the reversal of a single step reads.
        held: Bytes of the leaves that a slot holds: those that are read, and those that
            are needed to compute such leaves of later carries.
        held_types: The types of the leaves that a slot holds.
        saved: Bytes of what a step saves for its inverse (`Step.saved`).
        saved_types: The types of that.
        x: Bytes of one element of `xs`.
        ct_x: Bytes of the cotangent of `x`.
        ct_y: Bytes of the cotangents of the outputs of a step.
        ct_consts: Bytes of the sums of the cotangents of the consts.
        products: Bytes that a batch of steps holds at once of what it adds to the
            cotangents of the consts. Large products are made and added part by part.
        known: Bytes of a step's products, kept from when it is run again until it is
            reversed together with others.
        maps: Bytes of the linear map by which the cotangent of the carry goes back past
            a step that is reversed together with others.
        residuals: Bytes that one step adds to the residuals of a block.
        everything: Bytes that are stored if all residuals of the loop are.
        evaluation: The work of evaluating the step.
        reversal: The work of taking cotangents back, given the residuals.
        started_once: The part of `evaluation` and `reversal` that a batch of steps has
            only once: starting those operations that do not run step by step. Those
            that take the cotangent of the carry back do.
        dots_once: How many of the operations that are started once are dots.
    """

    carry: int
    read: int
    held: int
    held_types: tuple[Aval, ...]
    saved: int
    saved_types: tuple[Aval, ...]
    x: int
    ct_x: int
    ct_y: int
    ct_consts: int
    products: int
    known: int
    maps: int
    residuals: int
    everything: int
    evaluation: float
    reversal: float
    started_once: float
    dots_once: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """The time of single operations on a backend, in nanoseconds.

    Attributes:
        flop: One multiplication or addition of a contraction.
        entry: One entry of an elementwise result.
        costly_entry: The same for a transcendental function.
        equation: Any equation, however small.
        dot_of_batch: A dot of a batch of steps, in addition. XLA writes out the product
            of a small matrix and a vector, and calls a library for that of two
            matrices.
        byte: One byte written to a buffer that lives longer than an iteration.
        cached_byte: One byte that a kernel reads or writes of an array that is no
            larger than `cache`.
        cache: The bytes of an array that is likely to be in the cache of the device.
        byte_of_sums: One byte of a sum that each step adds to, read or written.
        iteration: One iteration of a loop whose trip count is static.
        dynamic_iteration: One iteration of a loop whose trip count is not.
        run: One run of consecutive steps in a binomial sweep: finding out which steps
            come next, and entering the loops that run them.
        byte_to_host: One byte of a carry that is sent to the host, or fetched from it.
        byte_to_file: One byte of a carry that is written to a file, or read from one.
        callback: One call of a function on the host.
    """

    flop: float
    entry: float
    costly_entry: float
    equation: float
    dot_of_batch: float
    byte: float
    byte_of_sums: float
    cached_byte: float
    cache: int
    iteration: float
    dynamic_iteration: float
    run: float
    byte_to_host: float
    byte_to_file: float
    callback: float


def reversal_time(cost: StepCost, rate: Rates) -> float:
    """The time of reversing a step, given its residuals."""
    # Every step reads and writes the sums of the consts' cotangents.
    return cost.reversal + rate.iteration + 2 * cost.ct_consts * rate.byte_of_sums


def residuals_time(cost: StepCost, rate: Rates, count: float = math.inf) -> float:
    """The time of storing the residuals of a step and of reading them.

    `count` is for how many steps they are stored together.
    """
    # Those of few steps stay in the cache: the wave equation takes a sixth less time in
    # blocks that do.
    is_cached = count * cost.residuals <= rate.cache
    return 2 * cost.residuals * (rate.cached_byte if is_cached else rate.byte)
