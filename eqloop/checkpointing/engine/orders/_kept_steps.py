"""Keeps steps in free slots: their residuals, or else their carry.

A slot is made for a carry. But the residuals of a step are often arrays of the same
types, such as fields on the same grid, and then a few slots can hold them. For this the
backward step is divided into two programs: `ahead`, from the inputs of a step to its
residuals, and `rest`, from these and the cotangents to the cotangents before the step.

For a carry `(h, v)`, and residuals `a`, `b` and `c`, all of one type:

    slots      array of h   array of v
    row 0      a            b
    row 1      c            -
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
from .._backward_step import BackwardStep, BlockResult, program_of
from .._sweep import Cotangents
from .._walk import Walk
from ..reversals._together import can_join
from ..slots._slots import AbstractSlots, Carries

# A shape and a dtype.
_ArrayType: TypeAlias = tuple[tuple[int, ...], np.dtype]


@dataclasses.dataclass(frozen=True)
class AbstractKept(abc.ABC):
    """How steps are kept in free slots, and reversed from there.

    Attributes:
        walk: The way back.
    """

    walk: Walk

    @property
    @abc.abstractmethod
    def rows(self) -> int:
        """How many slots a step takes."""

    @abc.abstractmethod
    def write(
        self, carries: Carries, carry: Arrays, position: Index, row: Index
    ) -> Carries:
        """Keeps the step at a position, in the slots from a row on."""

    @abc.abstractmethod
    def pull(
        self, carries: Carries, position: Index, row: Index, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past the step at a position, kept from a row on."""


@dataclasses.dataclass(frozen=True)
class KeptCarries(AbstractKept):
    """Keeps the carry; the step is run once more when it is reversed."""

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
        return self.walk.pull(carries.read(row), position, 1, cts)


class ResidualPlace(NamedTuple):
    """The place of one residual in the slots of a step.

    Attributes:
        leaf: The leaf of the carry whose array it is in.
        row: The row, counted from the step's first one.
    """

    leaf: int
    row: int


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A backward step in two programs.

    Attributes:
        ahead: From consts, a carry and `x` to the residuals.
        rest: From the residuals, `z` and `carried` to the outputs, see `BlockResult`.
        source: For each residual that is itself a const or a leaf of `x`, the place of
            that input: it need not be kept. `None` for the others.
        varies: Which residuals differ from step to step.
    """

    ahead: jex.ClosedJaxpr
    rest: jex.ClosedJaxpr
    source: tuple[int | None, ...]
    varies: tuple[bool, ...]

    @property
    def kept(self) -> list[bool]:
        """Which residuals have to be kept for each step."""
        at = zip(self.source, self.varies, strict=True)
        return [source is None and varies for source, varies in at]

    @property
    def kept_types(self) -> list[Aval]:
        return pick(self.ahead.out_avals, self.kept)


@functools.lru_cache(maxsize=128)
def parts_of(back: BackwardStep) -> StepParts:
    """Divides a backward step into two programs."""
    consts, carry, x = map(len, back.types)
    program = program_of(back)
    known = consts + carry + x
    others = len(program.in_avals) - known
    # What follows from consts, carry and `x` goes ahead; what needs `z` or cotangents
    # is the rest. What passes from one to the other are the residuals.
    ahead, rest = parted(program, (True,) * known + (False,) * others)
    inputs = ahead.jaxpr.invars
    # Consts and `x` can be read again when the step is reversed; a carry cannot.
    of_carry = range(consts, consts + carry)
    at_hand = {var: i for i, var in enumerate(inputs) if i not in of_carry}
    source = tuple(at_hand.get(var) for var in ahead.jaxpr.outvars)
    varies = (False,) * consts + (True,) * (carry + x)
    return StepParts(ahead, rest, source, reached(ahead, varies))


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
class KeptResiduals(AbstractKept):
    """Keeps the residuals; the step is reversed without being run again.

    Attributes:
        parts: The backward step, in two programs.
        places: Where the residuals of a step are.
        fixed: The residuals that are the same for all steps.
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
        x, _ = self.walk.sweep.step_at(position)
        # The step is advanced right after this. XLA computes what both have in common
        # once, so the residuals come at no extra run; see `_comes_apart`.
        ahead = run(self.parts.ahead, *self.walk.sweep.consts, *carry, *x)
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
        sweep, back = self.walk.sweep, self.walk.sweep.back
        x, z = sweep.step_at(position)
        # The carry is not known here. `source` names only consts and leaves of `x`.
        inputs = [*sweep.consts, *[None] * len(back.types[1]), *x]
        own, fixed = iter(slots.unpacked(stored, dtypes)), iter(self.fixed)
        known = [
            inputs[source] if source is not None else next(own if varies else fixed)
            for source, varies in zip(self.parts.source, self.parts.varies, strict=True)
        ]
        # Only the rest is run: this saves the evaluation that a kept carry would need.
        outs = run(self.parts.rest, *known, *z, *cts.carry)
        sums, carried, xs = split(outs, len(back.const_of), len(back.end_types[0]))
        return sweep.added_step(cts, BlockResult(sums, carried, xs), position)


def kept_of(walk: Walk, carries: Carries, rows: int) -> AbstractKept:
    """How steps are kept: by their residuals if possible, and else by their carry.

    Args:
        walk: The way back.
        carries: The slots. The first one is in use.
        rows: How many slots each step may take.
    """
    sweep, slots = walk.sweep, carries.slots
    back = sweep.back
    # Examples that have stopped are left out by `Walk.pull`, which residuals bypass.
    # And slots of a lower precision would round residuals, which nobody asked for.
    if sweep.own is not None or slots.precision or not _comes_apart(back):
        return KeptCarries(walk)
    parts = parts_of(back)
    places = _places_in(slots, parts, back.types[1])
    # The order counts `rows` slots for each step. With more, the residuals of a step
    # would overwrite those of the next one. A carry always fits.
    if places is None or rows_of(places) > rows:
        return KeptCarries(walk)
    # Residuals that are the same for all steps are computed once, from any carry.
    x, _ = sweep.step_at(0)
    ahead = run(parts.ahead, *sweep.consts, *carries.read(0), *x)
    is_fixed = [
        source is None and not varies
        for source, varies in zip(parts.source, parts.varies, strict=True)
    ]
    return KeptResiduals(walk, parts, places, pick(ahead, is_fixed))


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
