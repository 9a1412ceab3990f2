"""Reversal by an inverse: the carry before a step is computed from the one after it."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._arrays import Arrays, Flags, as_array, pick, where_run
from ...._types import Index, PyTree, Value
from ....progress import tied
from .._costs import StepCost
from .._loop import Loop
from .._pace import Pace
from .._step import Step
from .._sweep import Cotangents
from .._walk import Walk
from ..reversals._block_reversals import AbstractReversal
from ..slots._slots import Carries
from ..slots._words import read_words, to_words
from ._order import AbstractSlotOrder, Event

# By how many `eps` the result of the inverse may be off: relative to the largest number
# in its leaf, and to the largest one in the carry. A leaf may be computed from others
# that cancel, and then its error is as large as theirs.
_OFF_BY = 1000, 100


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
    """

    steps: int
    parts: int
    checks: bool = True

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
    def block_sizes(self) -> Sequence[int]:
        return [1]

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
        paths, has_saved = loop.carry_paths, any(step.saves)
        names = pick(paths, held) if len(paths) == len(held) else None
        carries = [list(map(_as_numbers, pick(c, held))) for c in (init, after, again)]
        is_traced = lambda leaf: isinstance(leaf, jax.core.Tracer)
        if not any(map(is_traced, jax.tree.leaves(carries))):
            # Outside of `jit`. An error from here is easier to read than one from a
            # callback.
            found = (list(map(np.asarray, carry)) for carry in carries)
            _compare(names, has_saved, *found)
            return inputs
        dtypes = [jax.typeof(leaf).dtype for leaf in carries[0]]

        def compare(*carries: Arrays) -> Value:
            read = lambda carry: list(map(read_words, map(np.asarray, carry), dtypes))
            return _compare(names, has_saved, *map(read, carries))

        # Three carries: before the step, after it, and what the inverse makes of that.
        carries = [list(map(to_words, carry)) for carry in carries]
        told = jax.ShapeDtypeStruct((), jnp.int32)
        # Under `vmap`, examples are compared one by one: each has its own largest
        # numbers, and so its own tolerance.
        checked = jax.pure_callback(compare, told, *carries, vmap_method="sequential")
        # The initial carry depends on the callback, which is pure and would otherwise
        # be removed, as nothing reads its result.
        # A number that is known while tracing is tied as an array.
        return consts, tied(checked, list(map(as_array, init))), xs

    def reverse(self, walk: Walk, carries: Carries, cts: Cotangents) -> Cotangents:
        position, row = self.steps, self.parts
        for count, size in reversed(self.groups):
            position, row = position - count * size, row - count
            cts = _reverse_parts(walk, carries, (count, size), position, row, cts)
        return cts

    # What it costs.

    def slot_bytes(self, cost: StepCost, first: bool) -> int:
        # One more than parts: the last carry, from which the last part goes back.
        return self.bytes_of_primal(cost) if first else 0

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
    walk: Walk,
    carries: Carries,
    parts: tuple[int, int],
    start: int,
    row: int,
    cts: Cotangents,
) -> Cotangents:
    """Reverses equal parts.

    Args:
        walk: The way back.
        carries: The slots.
        parts: The number of parts and their size.
        start: The position at which the first of them starts.
        row: The row of the carry at `start`.
        cts: The cotangents after the last of them.
    """
    count, size = parts

    def back(i: Index, cts: Cotangents) -> Cotangents:
        part = count - 1 - i
        begin = start + part * size
        # A loop that may end early goes back from where it has ended. All rows behind
        # that hold its last carry.
        steps = size if walk.count is None else jnp.clip(walk.count - begin, 0, size)
        own = walk.sweep.own

        def step_back(i: Index, state: tuple[list[Value], Cotangents]) -> PyTree:
            carry, cts = state
            position = begin + steps - 1 - i
            # The step is pulled at the carry that the inverse gives, which is that of
            # the primal up to rounding. No carry is read from a slot here.
            before = walk.previous(carries.with_saved(carry, position), position)
            if own is not None:
                before = where_run(position < own, before, carry)
            return before, walk.pull(before, position, 1, cts)

        # The carry at the end of this part: that at the start of the next one, or the
        # last carry of the loop.
        state = (carries.read(row + part + 1), cts)
        unroll = None if walk.count is not None else min(walk.unroll, size)
        return lax.fori_loop(0, steps, step_back, state, unroll=unroll)[1]

    return lax.fori_loop(0, count, back, cts)


def _as_numbers(leaf: Value) -> Value:
    """A leaf as a callback can take it: the data of keys."""
    is_key = jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _compare(names: Sequence[str] | None, has_saved: bool, *carries: Arrays) -> Value:
    """Compares the carry before a step with what the inverse gives for it.

    Args:
        names: The paths of the leaves.
        has_saved: Whether the inverse is given what the step has saved.
        carries: The carry before the step, the one after it, and that which the
            inverse gives.

    Returns:
        Zero.

    Raises:
        ValueError: If they differ.
    """
    # The inverse computes from the carry after the step, so its rounding errors may be
    # as large as the numbers in that one allow.
    sizes = [max(map(_largest, pair)) for pair in zip(*carries[:2], strict=True)]
    for i, (before, _, again) in enumerate(zip(*carries, strict=True)):
        off = _largest(np.subtract(again, before, dtype=_wide(before)))
        if off > _allowed(before.dtype, sizes[i], max(sizes)):
            name = f"leaf {i} of the carry" if names is None else names[i]
            more = ", save(before, x)" if has_saved else ""
            raise ValueError(
                f"Reversible: `inverse` does not undo the first step. At {name}, whose "
                f"largest entry is {_largest(before):.3g}, it is off by {off:.3g}. "
                f"After `carry, _ = f(before, x)`, `inverse(carry, x{more})` must be "
                f"`before`. If it differs by rounding alone, pass `check=False`."
            )
    return np.zeros((), np.int32)


def _wide(array: Value) -> Value:
    return np.complex128 if np.iscomplexobj(array) else np.float64


def _largest(array: Value) -> float:
    return float(np.max(np.abs(array.astype(_wide(array))), initial=0.0))


def _allowed(dtype: np.dtype, size: float, largest: float) -> float:
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    # For dtypes of few bits, so many `eps` are more than the number itself. Without a
    # bound, no error would ever be found.
    of_leaf, of_carry = (min(n * float(jnp.finfo(dtype).eps), 0.1) for n in _OFF_BY)
    return of_leaf * size + of_carry * largest
