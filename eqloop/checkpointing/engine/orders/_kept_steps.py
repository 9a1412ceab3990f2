"""What is kept of steps in free slots, from which they are reversed later.

A slot is made for a carry. The residuals of a step are often arrays of the same types,
such as fields on the same grid, and then some slots can hold them instead. A step is
taken apart for this: into a program that runs ahead, from its inputs to its residuals,
and one from these to what is carried back.
"""

import abc
import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.extend.core as jex
import numpy as np

from ...._arrays import Arrays, pick, split
from ...._programs import equations, parted, reached, run
from ...._types import Aval, Index
from .._backward_step import BackwardStep, Taken, program_of
from .._sweep import Cotangents, Sweep
from ..reversals._together import can_join
from ..slots._slots import AbstractSlots, Carries

# A shape and a dtype.
_ArrayType: TypeAlias = tuple[tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class AbstractKept(abc.ABC):
    """What is kept of each step, and how the step is reversed from it.

    Attributes:
        sweep: The loop.
    """

    sweep: Sweep

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """How many slots that takes."""

    @abc.abstractmethod
    def write(
        self, carries: Carries, carry: Arrays, position: Index, row: Index
    ) -> Carries:
        """Keeps it of the step at a position, in the slots from a row on."""

    @abc.abstractmethod
    def pull(
        self, carries: Carries, position: Index, row: Index, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past the step at a position."""


@dataclasses.dataclass(frozen=True)
class KeptCarries(AbstractKept):
    """The carry, from which the step is run once more."""

    @property
    def rows(self) -> int:
        return 1

    def write(
        self, carries: Carries, carry: Arrays, position: Index, row: Index
    ) -> Carries:
        return carries.write(carry, row)

    def pull(
        self, carries: Carries, position: Index, row: Index, cts: Cotangents
    ) -> Cotangents:
        return self.sweep.pull(carries.read(row), position, 1, cts)


class ResidualPlace(NamedTuple):
    """Where the slots have a residual of a step.

    Attributes:
        leaf: The leaf of the carry whose slots it is in.
        row: How many rows behind the first one.
    """

    leaf: int
    row: int


@dataclasses.dataclass(frozen=True)
class StepParts:
    """The reversal of a step, in two programs.

    Attributes:
        ahead: From consts, a carry and `x` to what the other one needs of them.
        rest: From that, what the step gets besides, and what is carried back, to what
            is taken of the step, see `Taken`.
        source: For each result of `ahead` the input that it is, if it is a const or
            belongs to `x`, and need not be kept.
        varies: Which results differ from step to step.
    """

    ahead: jex.ClosedJaxpr
    rest: jex.ClosedJaxpr
    source: tuple[int | None, ...]
    varies: tuple[bool, ...]

    @property
    def kept(self) -> list[bool]:
        """Which results are kept of each step."""
        at = zip(self.source, self.varies, strict=True)
        return [source is None and varies for source, varies in at]

    @property
    def kept_types(self) -> list[Aval]:
        return pick(self.ahead.out_avals, self.kept)


@functools.lru_cache(maxsize=128)
def parts_of(back: BackwardStep) -> StepParts:
    """The reversal of a step, taken apart."""
    consts, carry, x = map(len, back.types)
    program = program_of(back)
    known, every = consts + carry + x, len(program.in_avals)
    ahead, rest = parted(program, (True,) * known + (False,) * (every - known))
    inputs = ahead.jaxpr.invars
    carried = range(consts, consts + carry)
    at_hand = {var: i for i, var in enumerate(inputs) if i not in carried}
    source = tuple(at_hand.get(var) for var in ahead.jaxpr.outvars)
    varies = (False,) * consts + (True,) * (carry + x)
    return StepParts(ahead, rest, source, reached(ahead, varies))


def places_of(
    types: Sequence[Aval], slot_types: Sequence[Aval]
) -> list[ResidualPlace] | None:
    """Where arrays of some types can be in slots, if there are such leaves for all.

    Args:
        types: The types of what is to be stored.
        slot_types: The types of the leaves of a slot.
    """
    alike: dict[_ArrayType, list[int]] = collections.defaultdict(list)
    for leaf, aval in enumerate(slot_types):
        alike[aval.shape, aval.dtype].append(leaf)
    taken: collections.Counter[_ArrayType] = collections.Counter()
    places: list[ResidualPlace] = []
    for key in ((aval.shape, aval.dtype) for aval in types):
        if key not in alike:
            return None
        row, leaf = divmod(taken[key], len(alike[key]))
        places.append(ResidualPlace(alike[key][leaf], row))
        taken[key] += 1
    return places


def rows_of(places: Sequence[ResidualPlace]) -> int:
    """How many slots it takes to have arrays in such places."""
    return max((place.row + 1 for place in places), default=1)


@dataclasses.dataclass(frozen=True)
class KeptResiduals(AbstractKept):
    """The residuals, from which the step is reversed without being run again.

    Attributes:
        parts: The reversal of a step, taken apart.
        places: Where the residuals are.
        fixed: Of the results of `parts.ahead` those that are the same for all steps.
    """

    parts: StepParts
    places: Sequence[ResidualPlace]
    fixed: Arrays

    @property
    def rows(self) -> int:
        return rows_of(self.places)

    def write(
        self, carries: Carries, carry: Arrays, position: Index, row: Index
    ) -> Carries:
        _, x, _ = self.sweep.step_at(position)
        ahead = run(self.parts.ahead, *self.sweep.consts, *carry, *x)
        slots, arrays = carries.slots, list(carries.arrays)
        kept = slots.packed(pick(ahead, self.parts.kept))
        for place, leaf in zip(self.places, kept, strict=True):
            arrays[place.leaf] = slots.write(arrays[place.leaf], leaf, row + place.row)
        return dataclasses.replace(carries, arrays=arrays)

    def pull(
        self, carries: Carries, position: Index, row: Index, cts: Cotangents
    ) -> Cotangents:
        slots, arrays = carries.slots, carries.arrays
        stored = [slots.read(arrays[p.leaf], row + p.row) for p in self.places]
        dtypes = [aval.dtype for aval in self.parts.kept_types]
        take = lambda cts: self._past(position, slots.unpacked(stored, dtypes), cts)
        return self.sweep.reversal.past(self.sweep, take, position, 1, cts)

    def _past(self, position: Index, kept: Arrays, cts: Cotangents) -> Cotangents:
        back = self.sweep.back
        at, x, z = self.sweep.step_at(position)
        inputs = [*self.sweep.consts, *[None] * len(back.types[1]), *x]
        own, fixed = iter(kept), iter(self.fixed)
        known = [
            inputs[source] if source is not None else next(own if varies else fixed)
            for source, varies in zip(self.parts.source, self.parts.varies, strict=True)
        ]
        outs = run(self.parts.rest, *known, *z, *cts.carry)
        sums, carried, xs = split(outs, len(back.const_of), len(back.end_types[0]))
        return self.sweep.added_step(cts, Taken(sums, carried, xs), at)


def kept_of(sweep: Sweep, carries: Carries, rows: int) -> AbstractKept:
    """What is kept of steps in so many slots each: residuals, if these can hold them.

    Args:
        sweep: The loop.
        carries: The slots. The first of them is in use.
        rows: How many slots each step may take.
    """
    back, slots = sweep.back, carries.slots
    # Examples that stopped have to be left out, and residuals are not to be rounded.
    if sweep.own is not None or slots.precision or not _comes_apart(back):
        return KeptCarries(sweep)
    parts = parts_of(back)
    places = _places_in(slots, parts, back.types[1])
    if places is None or rows_of(places) > rows:
        return KeptCarries(sweep)
    _, x, _ = sweep.step_at(0)
    ahead = run(parts.ahead, *sweep.consts, *carries.read(0), *x)
    is_fixed = [
        source is None and not varies
        for source, varies in zip(parts.source, parts.varies, strict=True)
    ]
    return KeptResiduals(sweep, parts, places, pick(ahead, is_fixed))


def rows_per_step(back: BackwardStep, slots: AbstractSlots) -> int | None:
    """How many slots the residuals of a step take, if slots can hold them.

    Args:
        back: The reversal, given no more of a carry than a slot holds.
        slots: The slots.
    """
    if not back.types[1] or not _comes_apart(back):
        return None
    parts = parts_of(back)
    places = _places_in(slots, parts, back.types[1])
    return None if places is None else rows_of(places)


@functools.lru_cache(maxsize=512)
def _comes_apart(back: BackwardStep) -> bool:
    """Whether residuals and the next carry take no longer than the carry alone.

    They are computed by two programs, next to each other. What both compute XLA does
    once, but it would run a loop in the step twice.
    """
    step = back.base.step
    loops = (eqn.primitive.name == "scan" for eqn in equations(step.jaxpr))
    return can_join(step) and not any(loops)


def _places_in(
    slots: AbstractSlots, parts: StepParts, carry_types: Arrays
) -> list[ResidualPlace] | None:
    packed = slots.packed_types
    return places_of(packed(parts.kept_types), packed(carry_types))
