"""Keeps steps in free slots: their residuals, or else their carry.

A slot is made for a carry. But the residuals of a step are often arrays of the same
types, such as fields on the same grid, and then a few slots can hold them. For this the
backward step is divided into two programs (`_step_parts.py`).

For a carry `(h, v)`, and residuals `a`, `b` and `c`, all of one type:

    slots      array of h   array of v
    row 0      a            b
    row 1      c            -
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ...._arrays import Arrays, pick
from ...._programs import equations, run
from ...._types import Aval, Index
from .._backward_step import BackwardStep
from .._step_parts import StepParts, parts_of
from .._sweep import Cotangents, Sweep
from ..reversals._together import can_join
from ..slots._slots import AbstractSlots, Carries

# A shape and a dtype.
_ArrayType: TypeAlias = tuple[tuple[int, ...], np.dtype]


class ResidualPlace(NamedTuple):
    """The place of one residual in the slots of a step.

    Attributes:
        leaf: The leaf of the carry whose array it is in.
        row: The row, counted from the step's first one.
    """

    leaf: int
    row: int


def places_of(
    types: Sequence[Aval], slot_types: Sequence[Aval]
) -> list[ResidualPlace] | None:
    """Places for some arrays in slots; `None` if a slot has no leaf of some type.

    Args:
        types: The types of the arrays.
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
        # An array fits only leaves of its own type. So types do not compete for places,
        # and taking them in turn needs the fewest rows.
        row, leaf = divmod(taken[key], len(alike[key]))
        places.append(ResidualPlace(alike[key][leaf], row))
        taken[key] += 1
    return places


def rows_of(places: Sequence[ResidualPlace]) -> int:
    """How many slots the places are in."""
    return max((place.row + 1 for place in places), default=1)


@dataclasses.dataclass(frozen=True)
class Kept:
    """How steps are kept in free slots, and reversed from there.

    Attributes:
        sweep: The way back.
        parts: The backward step in two programs, if residuals are kept; `None` if the
            carry is, and the step is run once more when it is reversed.
        places: Where the residuals of a step are.
        fixed: The residuals that are the same for all steps, see `StepParts.fixed`.
    """

    sweep: Sweep
    parts: StepParts | None = None
    places: Sequence[ResidualPlace] = ()
    fixed: Arrays = ()

    @property
    def rows(self) -> int:
        """How many slots a step takes."""
        return rows_of(self.places)

    def write(
        self, carries: Carries, carry: Arrays, position: Index, row: Index
    ) -> Carries:
        """Keeps the step at a position, in the slots from a row on."""
        if self.parts is None:
            return carries.write(carry, row)
        x, _ = self.sweep.step_at(position)
        # The step is advanced right after this. XLA computes what both have in common
        # once, so the residuals come at no extra run; see `_comes_apart`.
        ahead = run(self.parts.ahead, *self.sweep.consts, *carry, *x)
        slots, arrays = carries.slots, list(carries.arrays)
        kept = slots.packed(pick(ahead, self.parts.kept))
        for place, leaf in zip(self.places, kept, strict=True):
            arrays[place.leaf] = slots.write(arrays[place.leaf], leaf, row + place.row)
        return dataclasses.replace(carries, arrays=arrays)

    def pull(
        self, carries: Carries, position: Index, row: Index, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past the step at a position, kept from a row on."""
        if self.parts is None:
            return self.sweep.pull(carries.read(row), position, 1, cts)
        slots, arrays = carries.slots, carries.arrays
        stored = [slots.read(arrays[p.leaf], row + p.row) for p in self.places]
        dtypes = [aval.dtype for aval in self.parts.kept_types]
        sweep, kept = self.sweep, slots.unpacked(stored, dtypes)
        x, z = sweep.step_at(position)
        # Only the rest is run: this saves the evaluation that a kept carry would need.
        residuals = self.parts.residuals(sweep.consts, x, kept, self.fixed)
        taken = self.parts.take(residuals, (cts.carry, z))
        return sweep.added_step(cts, taken, position)


def kept_of(sweep: Sweep, carries: Carries, rows: int) -> Kept:
    """How steps are kept: by their residuals if possible, and else by their carry.

    Args:
        sweep: The way back.
        carries: The slots. The first one is in use.
        rows: How many slots each step may take.
    """
    slots = carries.slots
    back = sweep.back
    # Examples that have stopped are left out by `Sweep.pull`, which residuals bypass.
    # And slots of a lower precision would round residuals, which nobody asked for.
    if sweep.own is not None or slots.precision or not _comes_apart(back):
        return Kept(sweep)
    parts = parts_of(back)
    places = _places_in(slots, parts, back.types[1])
    # The order counts `rows` slots for each step. With more, the residuals of a step
    # would overwrite those of the next one. A carry always fits.
    if places is None or rows_of(places) > rows:
        return Kept(sweep)
    return Kept(sweep, parts, places, parts.fixed(sweep.consts))


def rows_per_step(back: BackwardStep, slots: AbstractSlots) -> int | None:
    """How many slots the residuals of a step take; `None` if slots cannot hold them.

    Args:
        back: The backward step, cut down to the leaves that slots hold.
        slots: The slots.
    """
    if not back.types[1] or not _comes_apart(back):
        return None
    parts = parts_of(back)
    places = _places_in(slots, parts, back.types[1])
    return None if places is None else rows_of(places)


@functools.lru_cache(maxsize=512)
def _comes_apart(back: BackwardStep) -> bool:
    """Whether the residuals and the next carry can be computed at no extra cost.

    Two programs compute them, next to each other. XLA computes what both have in common
    once. But it does not merge loops, so it would run a loop in the step twice.
    """
    step = back.base.step
    loops = (eqn.primitive.name == "scan" for eqn in equations(step.jaxpr))
    return can_join(step) and not any(loops)


def _places_in(
    slots: AbstractSlots, parts: StepParts, carry_types: Arrays
) -> list[ResidualPlace] | None:
    packed = slots.packed_types
    return places_of(packed(parts.kept_types), packed(carry_types))
