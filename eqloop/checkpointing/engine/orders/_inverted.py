"""Reversal by an inverse: the carry before a step is computed from the one after it."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._arrays import Arrays, Flags, as_array, axes_of, pick, vary, where_run
from ...._types import Aval, Index, PyTree, Value
from ....progress import tied
from ...steps._loop import Loop
from ...steps._step import Step
from .._pace import Pace
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import Carries
from ._order import AbstractSlotOrder, Event

# By how many `eps` the result of the inverse may be off: relative to the largest number
# in its leaf, and to the largest one in the carry. A leaf may be computed from others
# that cancel, and then its error is as large as theirs.
_OFF_BY = 1000, 100

# The way back may miss the carry from which it should have come by so much, relative to
# the largest number in a leaf, and by so many `eps` of the largest one in the carry.
# Rounding errors have grown over many steps by then. Those of few bits grow fast. The
# gradient is off by about as much.
_MISSED_BY, _EPS_MISSED, _EPS_OF_CARRY = 0.01, 100, 1000


@dataclasses.dataclass(frozen=True)
class Inverted(AbstractSlotOrder):
    """The way back runs the inverse, part by part, from the end of each part.

    The primal stores the carry at the start of each part, and the last carry. The next
    part down starts from a stored carry again, so the rounding errors of the inverse
    add up only within a part.

    Attributes:
        steps: How many steps the loop has.
        parts: How many parts there are.
        checks: Whether to check that the inverse undoes the first step.
        missed: Raises an error, if the inverse does not come back to the carry at the
            start of a part. It is given the name of a leaf, its greatest number, and
            by how much it was missed. `None` if that is not checked.
    """

    steps: int
    parts: int
    checks: bool
    missed: Callable[[str, Value, Value], NoReturn] | None

    @property
    def length(self) -> int:
        return self.steps

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The number of parts and their size, of longer parts and then of others."""
        # Sizes differ by one at most. So two loops are enough, with static trip counts.
        size, more = divmod(self.steps, self.parts)
        groups = (more, size + 1), (self.parts - more, size)
        return tuple(group for group in groups if all(group))

    @property
    def starts(self) -> Sequence[int]:
        sizes = [size for count, size in self.groups for _ in range(count)]
        return [sum(sizes[:i]) for i in range(len(sizes))]

    @property
    def keeps_last(self) -> bool:
        return True

    @property
    def slots(self) -> int:
        return self.parts

    @property
    def undone(self) -> int:
        return self.steps

    @property
    def advances(self) -> int:
        """The inverse runs once for each step, and counts as an evaluation."""
        return self.steps

    @property
    def is_flat(self) -> bool:
        return self.parts == 1

    # How it is run.

    def checked(
        self, step: Step, loop: Loop, held: Flags, inputs: PyTree
    ) -> tuple[Arrays, Arrays, Arrays]:
        if not self.checks:
            return inputs
        consts, init, xs = inputs
        # What is saved is read by the inverse, and is no result of it.
        held = tuple(h and not s for h, s in zip(held, step.saves, strict=True))
        if not any(held):
            return inputs
        x = loop.x(xs, jnp.zeros((), jnp.int32))
        # Only the first step is checked. Its carry is at hand, so the check takes one
        # step and one inverse, however long the loop is.
        after, _ = step(consts, init, x)
        again = step.before(consts, after, x)
        if loop.stops:
            # It may run no step at all, and then there is nothing to undo.
            again = [
                jnp.where(init[0], *both) for both in zip(again, init, strict=True)
            ]
        missed = _Missed.by_none(pick(step.carry_types, held))
        first, last, again = (pick(carry, held) for carry in (init, after, again))
        missed = missed.or_by(first, last, again, _of_first_step)
        more = ", save(before, x)" if any(step.saves) else ""
        raised = functools.partial(_not_undone, more)
        report = functools.partial(_report, raised, _names(loop, held))
        # The initial carry depends on the check, which would otherwise be removed, as
        # nothing reads its result. A number that is known while tracing is tied as an
        # array.
        return consts, _unless(missed, report, list(map(as_array, init))), xs

    def reverse(self, sweep: Sweep, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.steps, self.parts
        # What is saved is read by the inverse, and is no result of it.
        saved = carries.saved or (False,) * len(carries.arrays)
        compared = tuple(self.missed is not None and not flag for flag in saved)
        state = cts, _Missed.by_none(pick(sweep.step.carry_types, compared))
        for count, size in reversed(self.groups):
            position, row = position - count * size, row - count
            parts = (count, size), position, row
            state = _reverse_parts(sweep, carries, *parts, state, compared)
        cts, where = state
        if self.missed is None or not any(compared):
            return cts
        report = functools.partial(_report, self.missed, _names(sweep.loop, compared))
        # What is asked for may be any of the cotangents.
        groups = cts.consts, cts.carry, cts.xs
        consts, carry, xs = _unless(where, report, groups)
        return dataclasses.replace(cts, consts=consts, carry=carry, xs=xs)

    # What it costs.

    def reversed_in(self, pace: Pace, reversal: AbstractReversal) -> float:
        return (
            self.steps * pace.block(reversal, 1) + self.parts * 3 * pace.rate.iteration
        )

    @property
    def kind(self) -> Hashable:
        return "inverted", self.parts == 1

    # How it is shown.

    def reversal_history(self, start: int, slots: int) -> Iterator[Event]:
        for position in reversed(range(start, start + self.steps)):
            yield Event("again", position, slots)
            yield Event("reversal", position, slots)


def _reverse_parts(
    sweep: Sweep,
    carries: Carries,
    parts: tuple[int, int],
    start: int,
    row: int,
    state: tuple[Cotangents, "_Missed"],
    compared: Flags,
) -> tuple[Cotangents, "_Missed"]:
    """Reverses equal parts: `parts` are their number and their size.

    The first starts at `start`, and its carry is in `row`.
    """
    # `state` are the cotangents after the last part, and where the way back was off.
    # `compared` are the leaves that are compared at the start of each part.
    count, size = parts

    def back(i: Index, state: PyTree) -> PyTree:
        cts, missed = state
        part = count - 1 - i
        begin = start + part * size
        # A loop that may end early goes back from where it has ended. All rows behind
        # that hold its last carry.
        steps = size if sweep.count is None else jnp.clip(sweep.count - begin, 0, size)
        own = sweep.own

        def step_back(i: Index, state: tuple[list[Value], Cotangents]) -> PyTree:
            carry, cts = state
            position = begin + steps - 1 - i
            # The step is pulled at the carry that the inverse gives, which is that of
            # the primal up to rounding. No carry is read from a slot here.
            before = sweep.previous(carries.with_saved(carry, position), position)
            if own is not None:
                before = where_run(position < own, before, carry)
            return before, sweep.pull(before, position, 1, cts)

        # The carry at the end of this part: that at the start of the next one, or the
        # last carry of the loop.
        last = carries.read(row + part + 1)
        unroll = None if sweep.count is not None else min(sweep.loop.unroll, size)
        again, cts = lax.fori_loop(0, steps, step_back, (last, cts), unroll=unroll)
        if any(compared):
            every = carries.read(row + part), last, again
            first, last, again = (pick(carry, compared) for carry in every)
            missed = missed.or_by(first, last, again, _of_way_back)
        return cts, missed

    return lax.fori_loop(0, count, back, state)


class _Missed(NamedTuple):
    """Which leaves the way back has missed at the start of a part, by more than may be.

    Attributes:
        offs: For each leaf the greatest difference; 0 if it was not missed.
        sizes: Its greatest number.
    """

    offs: Value
    sizes: Value

    @classmethod
    def by_none(cls, types: Sequence[Aval]) -> "_Missed":
        """None of the leaves, which are of these types, was missed so far."""
        axes = frozenset[str]().union(*map(axes_of, types))
        none = vary(jnp.zeros(len(types), jnp.float32), axes)
        return cls(none, none)

    def or_by(
        self,
        first: Arrays,
        last: Arrays,
        again: Arrays,
        allowed: Callable[[float], tuple[float, float]],
    ) -> "_Missed":
        """This, or by another part, for which the inverse has made `again` of `last`.

        `allowed` takes the `eps` of a leaf.
        """
        # It returns by how much a leaf may be missed, relative to its greatest number
        # and to the greatest one in the carry.
        first, last, again = (
            [lax.stop_gradient(_as_numbers(leaf)) for leaf in carry]
            for carry in (first, last, again)
        )
        sizes = [
            jnp.maximum(_greatest(one), _greatest(other))
            for one, other in zip(first, last, strict=True)
        ]
        largest = functools.reduce(jnp.maximum, sizes)
        offs = list[Value]()
        for stored, found, size in zip(first, again, sizes, strict=True):
            off, dtype = _greatest(found, stored), jax.typeof(stored).dtype
            of_leaf = of_carry = 0.0
            if jnp.issubdtype(dtype, jnp.inexact):
                of_leaf, of_carry = allowed(float(jnp.finfo(dtype).eps))
            is_near = off <= of_leaf * size + of_carry * largest
            # Where numbers are not finite, there is no way back.
            is_near |= ~jnp.isfinite(largest)
            # A way back that is not finite itself is off by more than any number.
            off = jnp.where(jnp.isnan(off), jnp.inf, off)
            offs.append(jnp.where(is_near, 0.0, off))
        missed = jnp.stack(offs) > 0
        return _Missed(
            jnp.where(missed, jnp.stack(offs), self.offs),
            jnp.where(missed, jnp.stack(sizes), self.sizes),
        )


def _greatest(leaf: Value, other: Value | None = None) -> Value:
    """The greatest number in a leaf, or its greatest difference from another."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        # Which is all that matters: such leaves have to be equal.
        equal = leaf == (leaf if other is None else other)
        return jnp.max(1 - equal.astype(jnp.float32), initial=0.0)
    # Few bits have no room for the difference.
    wide = np.float32 if leaf.dtype.itemsize < 4 else leaf.dtype
    numbers = leaf.astype(wide)
    if other is not None:
        numbers = numbers - other.astype(wide)
    return jnp.max(jnp.abs(numbers), initial=0.0).astype(jnp.float32)


def _of_first_step(eps: float) -> tuple[float, float]:
    # For dtypes of few bits, so many `eps` are more than the number itself. Without a
    # bound, no error would ever be found.
    of_leaf, of_carry = (min(n * eps, 0.1) for n in _OFF_BY)
    return of_leaf, of_carry


def _of_way_back(eps: float) -> tuple[float, float]:
    of_leaf = min(max(_MISSED_BY, _EPS_MISSED * eps), 1.0)
    return of_leaf, min(_EPS_OF_CARRY * eps, _MISSED_BY)


def _unless(
    missed: _Missed, report: Callable[[Value, Value], Value], values: PyTree
) -> PyTree:
    """Values that are wrong if a carry was missed: then an error is raised."""
    if not isinstance(missed.offs, jax.core.Tracer):
        # An error from here is easier to read than one from a callback.
        report(*map(np.asarray, missed))
        return values
    told = jax.ShapeDtypeStruct((), jnp.int32)
    # Under `vmap`, each example has its own largest numbers, and so its own tolerance.
    number = jax.pure_callback(report, told, *missed, vmap_method="sequential")
    return tied(number, values)


def _names(loop: Loop, which: Sequence[bool]) -> Sequence[str] | None:
    """The user's names for some leaves of the carry, if they are known."""
    paths = loop.carry_paths
    return pick(paths, which) if len(paths) == len(which) else None


def _report(
    missed: Callable[[str, Value, Value], NoReturn],
    names: Sequence[str] | None,
    offs: Value,
    sizes: Value,
) -> Value:
    for i in map(int, np.flatnonzero(offs)):
        name = f"leaf {i} of the carry" if names is None else names[i]
        missed(name, sizes[i], offs[i])
    return np.zeros((), np.int32)


def _as_numbers(leaf: Value) -> Value:
    """A leaf as a callback can take it: the data of keys."""
    is_key = jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _not_undone(more: str, name: str, size: Value, off: Value) -> NoReturn:
    raise ValueError(
        f"Reversible: `inverse` does not undo the first step. At {name}, whose largest "
        f"entry is {size:.3g}, it is off by {off:.3g}. After `carry, _ = f(before, "
        f"x)`, `inverse(carry, x{more})` must be `before`. If it differs by rounding "
        f"alone, pass `check=False`."
    )
