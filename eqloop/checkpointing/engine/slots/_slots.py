"""Slots: room for stored carries, and the forward sweep that leaves carries there.

To store carries elsewhere or in another form, subclass `AbstractSlots` in a file of its
own. This is about the slots that the primal fills. Those of inner levels, which are few
and read soon, are always on the device.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._arrays import Arrays, Flags, pick, put, stack_of, stack_type, union
from ...._compat import is_widened
from ...._programs import constant
from ...._types import Aval, Index, PyTree, Value
from ...steps._loop import element, part, store, zero
from .._costs import Rates
from .._forward import BySegments, Group, Reached
from .._kept_rows import scan


@dataclasses.dataclass(frozen=True)
class AbstractSlots(abc.ABC):
    """Where carries are stored, and in which form: a frozen, hashable dataclass.

    A carry goes through two conversions before it is written to a row, see `packed`:
    floats are rounded to `precision`, and then a dtype that cannot be stored is
    replaced by one that can, bit by bit. For a form that changes values in another way,
    override `packed`, `unpacked` and `near` together.

    Attributes:
        precision: The dtype in which floating-point leaves are stored, unless their own
            has no more bits; `None` for their own.
    """

    precision: np.dtype | None = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def take_device_memory(self) -> bool:
        """Whether they count as memory of the device."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Where they are, in the words of a plan."""

    @abc.abstractmethod
    def move_time(self, nbytes: int, rate: Rates) -> float:
        """Roughly how many nanoseconds it takes to write or to read so many bytes."""

    @property
    def outlast_primal(self) -> bool:
        """Whether the carries that the primal stores are still there on the way back.

        If they are not, the reverse sweep runs the loop once more to store them.
        """
        return True

    def rows(self, starts: int, needs_spare: bool) -> int:
        """How many rows `sweep` leaves behind, if an order stores `starts` carries.

        `needs_spare` says whether the order needs a row more.
        """
        return starts + 1

    @abc.abstractmethod
    def stored_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which leaves of a dtype are stored, with the same bits."""

    @abc.abstractmethod
    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        """The types of the arrays that hold so many slots, one for each leaf."""

    @abc.abstractmethod
    def read(self, array: Value, row: Index) -> Value:
        """The leaf in a row of one of these arrays, on the device."""

    def read_part(self, array: Value, row: Index, count: int) -> Value:
        """The leaves in `count` rows from one on."""
        # One row at a time, so that `read` is all that a kind of slots has to have.
        rows = row + jnp.arange(count, dtype=jnp.int32)
        return lax.map(lambda row: self.read(array, row), rows)

    @abc.abstractmethod
    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        """The array with a leaf, which is on the device, written to a row."""

    def sweep(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[Reached, list[Value]]:
        """Runs a loop and stores the `held` leaves of carries at `segments.starts`.

        It returns the state at the end, and the slots: one more row than starts.
        """
        # That row (see `rows`) holds the carry at the end of the segments if the order
        # asks for it. Otherwise it is for carries that are not kept.
        segments, count = segments.opaque(), len(segments.starts)
        segments, start, division = self.started(segments, held, init)
        at_starts = division.at_starts

        def body(segment: Index, group: Group, state: PyTree) -> tuple[Value, Carries]:
            reached, carries = state
            # Before the segment is run: row `i` has the carry at its start.
            carries = carries.write(pick(reached.carry, at_starts), segment)
            return segments.run(reached, segment, group), carries

        carries = self.filled(pick(init, at_starts), count + 1)
        reached, carries = segments.each(body, (start, carries))
        if segments.keeps_last:
            carries = carries.write(pick(reached.carry, at_starts), count)
        reached = segments.finished(reached)
        return reached, division.arrays(carries.arrays, reached.saved)

    def started(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[BySegments, Reached, "Division"]:
        """The loop at its start, and which of the `held` leaves are stored when.

        If steps save something, the loop writes it in the form of these slots.
        """
        division = Division.of(segments, held)
        saved, rows = division.saved, segments.saved_rows
        if not any(saved):
            return segments, segments.start(init), division
        save = lambda rows, carry, row: rows.write(pick(carry, saved), row)
        segments = dataclasses.replace(segments, save=save)
        start = segments.start(init, self.filled(pick(init, saved), rows))
        return segments, start, division

    def bare(self, arrays: Arrays) -> list[Value]:
        """The arrays of `filled` slots, as `types` has them."""
        return list(arrays)

    @property
    def near(self) -> "DeviceSlots":
        """The slots of inner levels, on the device, which keep only `precision`.

        Slots of another form override this as well, or inner levels lose it.
        """
        return DeviceSlots(precision=self.precision)

    def released(self, arrays: Arrays, outputs: PyTree) -> PyTree:
        """The outputs of a reverse sweep; after it, the slots are not needed."""
        return outputs

    def packed(self, carry: Arrays) -> list[Value]:
        """A carry in its stored form."""
        dtypes = [jax.typeof(leaf).dtype for leaf in carry]
        lowered = [lowered_dtype(dtype, self.precision) for dtype in dtypes]
        # Floats are rounded first, as bits cannot be rounded any more.
        carry = list(map(_rounded, carry, lowered))
        return list(map(_as_stored, carry, map(self.stored_dtype, lowered)))

    def unpacked(self, stored: Arrays, dtypes: Sequence[np.dtype]) -> list[Value]:
        """The carry with these dtypes, given its stored form."""
        lowered = [lowered_dtype(dtype, self.precision) for dtype in dtypes]
        return list(map(_rounded, map(_restored, stored, lowered), dtypes))

    def packed_types(self, carry_types: Arrays) -> list[Aval]:
        """The types of a carry in its stored form."""
        # Asked of `packed` itself, so that the two cannot differ.
        return list(jax.make_jaxpr(self.packed)(list(carry_types)).out_avals)

    def filled(self, carry: Arrays, rows: int) -> "Carries":
        """New slots. On the device, each of them holds the carry."""
        # What is in them does not matter, but the carry knows its type, its mesh and
        # its axes.
        arrays = [stack_of(leaf, rows) for leaf in self.packed(carry)]
        return Carries(arrays, self, tuple(jax.typeof(leaf).dtype for leaf in carry))

    def holding(
        self, arrays: Arrays, carry_types: Arrays, saved: Flags = ()
    ) -> "Carries":
        """The carries in slots that a forward sweep has filled.

        `saved` says which leaves have a row for each step, see `Carries`.
        """
        dtypes = tuple(aval.dtype for aval in carry_types)
        return Carries(list(arrays), self, dtypes, saved=saved)


@dataclasses.dataclass(frozen=True)
class Division:
    """Which of the leaves that are stored have which rows.

    Attributes:
        at_starts: The leaves of a carry that are stored at starts.
        saved: Those that are stored after each step, see `Step.saved`.
    """

    at_starts: list[bool]
    saved: list[bool]

    @classmethod
    def of(cls, segments: BySegments, held: Flags) -> Self:
        """That of a loop, of which these leaves are held."""
        has_rows = segments.saved_rows > 0
        saved = [has_rows and flag for flag in segments.step.saves]
        pairs = list(zip(held, saved, strict=True))
        return cls([h and not s for h, s in pairs], [h and s for h, s in pairs])

    def arrays(self, carries: Arrays, saved: "Carries | None") -> list[Value]:
        """The slots of all leaves in their order, when the loop has been run."""
        if saved is None:
            return list(carries)
        arrays = put([None] * len(self.saved), self.at_starts, carries)
        arrays = put(arrays, self.saved, saved.slots.bare(saved.arrays))
        return pick(arrays, union(self.at_starts, self.saved))


@dataclasses.dataclass(frozen=True)
class Carries:
    """Carries in slots: a PyTree that a loop can carry.

    Attributes:
        arrays: The slots, an array for each leaf.
        slots: What kind they are.
        dtypes: The dtype of each leaf of a carry, which may be stored in another one.
        first: The row that counts as the first.
        saved: Which leaves have a row for each step instead, see `Step.saved`; none if
            it is empty.
    """

    arrays: list[Value]
    slots: AbstractSlots
    dtypes: tuple[np.dtype, ...]
    first: int = 0
    saved: Flags = ()

    def from_row(self, row: int) -> "Carries":
        """The carries of a part of the loop, which counts rows from this one on."""
        return dataclasses.replace(self, first=self.first + row)

    def read(self, row: Index) -> list[Value]:
        """The carry in a row; in place of leaves that are saved, those of some step."""
        row, saved = self._counted(row), self.saved or (False,) * len(self.arrays)
        rows = [0 if flag else row for flag in saved]
        leaves = list(map(self.slots.read, self.arrays, rows))
        return self.slots.unpacked(leaves, self.dtypes)

    def with_saved(self, carry: Arrays, position: Index) -> list[Value]:
        """A carry with the leaves that the step at a position has saved."""
        if not any(self.saved):
            return list(carry)
        arrays, dtypes = pick(self.arrays, self.saved), pick(self.dtypes, self.saved)
        leaves = [self.slots.read(array, position) for array in arrays]
        return put(carry, self.saved, self.slots.unpacked(leaves, dtypes))

    def read_part(self, row: Index, count: int) -> list[Value]:
        """The carries in `count` rows from one on, stacked along the first axis."""
        row = self._counted(row)
        leaves = [self.slots.read_part(array, row, count) for array in self.arrays]
        return self.slots.unpacked(leaves, self.dtypes)

    def write(self, carry: Arrays, row: Index) -> "Carries":
        """These carries with another one in a row."""
        row = self._counted(row)
        arrays = [
            self.slots.write(array, leaf, row)
            for array, leaf in zip(self.arrays, self.slots.packed(carry), strict=True)
        ]
        return dataclasses.replace(self, arrays=arrays)

    def run_on(
        self,
        carry: Arrays,
        count: Index,
        move: Callable[[Index, list[Value]], list[Value]],
        unroll: int | None = None,
    ) -> "Carries":
        """Fills `count` rows, each with the carry that follows from the one before.

        `carry` is in the first row; `move` takes a row and its carry to the next carry.
        """

        def fill(i: Index, state: tuple[list[Value], Carries]) -> PyTree:
            carry, carries = state
            carry = move(i, carry)
            return carry, carries.write(carry, i + 1)

        state = list(carry), self
        # The first row has its carry already, as `filled` puts it in every row.
        return lax.fori_loop(0, count - 1, fill, state, unroll=unroll)[1]

    def _counted(self, row: Index) -> Index:
        return row + self.first if self.first else row


jax.tree_util.register_dataclass(
    Carries, data_fields=["arrays"], meta_fields=["slots", "dtypes", "first", "saved"]
)


@dataclasses.dataclass(frozen=True)
class DeviceSlots(AbstractSlots):
    """In the memory of the device."""

    @property
    def take_device_memory(self) -> bool:
        return True

    @property
    def place(self) -> str:
        return "on the device"

    def move_time(self, nbytes: int, rate: Rates) -> float:
        return rate.iteration + nbytes * rate.byte

    def stored_dtype(self, dtype: np.dtype) -> np.dtype:
        # XLA would convert all slots of some small floats to a wider dtype for the
        # whole loop. It leaves integers alone.
        return bits_of(dtype) if is_widened(dtype) else dtype

    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        return [stack_type(aval, rows) for aval in self.packed_types(carry_types)]

    def read(self, array: Value, row: Index) -> Value:
        return element(array, row)

    def read_part(self, array: Value, row: Index, count: int) -> Value:
        return part(array, row, count)

    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        return store(array, leaf, row)

    def sweep(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[Reached, list[Value]]:
        # Often nobody needs `ys` or slots of this program, and XLA should remove them.
        # It does so for a single loop; for loops in loops only if all trip counts are
        # static. So where they are not, a loop over single steps writes the slots.
        step, loop = segments.step, segments.loop
        is_whole = segments.stop == loop.length and not any(loop.stored)
        is_plain = segments.are_static and loop.kept is None
        if not step.y_types or is_plain or not is_whole or segments.saved_rows:
            return super().sweep(segments, held, init)
        # Every step writes its carry to the next free row, and only a carry that is to
        # be kept moves on to the row after that. So the row of any other carry is
        # written again before it is read. A branch around the write would have a GPU
        # wait for the host.
        # After the last start, the next free row is the extra one, and no position is
        # that of the end. So `row` stays there.
        starts = constant([*segments.starts, loop.length])
        count = len(segments.starts)
        carries = self.filled(pick(init, held), count + 1)

        def body(
            read: tuple[Arrays, ...],
            state: tuple[Value, list[Value], Value, Carries],
            _: object,
        ) -> tuple[tuple[Value, list[Value], Value, Carries], list[Value]]:
            (consts, xs), (position, carry, row, carries) = read, state
            carries = carries.write(pick(carry, held), row)
            is_kept = element(starts, row) == position
            row = row + is_kept.astype(row.dtype)
            carry, y = step(consts, carry, loop.x(xs, position))
            return (position + 1, carry, row, carries), y

        read = (segments.consts, segments.xs)
        state = (zero(), list(init), zero(), carries)
        (position, carry, _, carries), ys = scan(body, read, state, [], loop)
        if segments.keeps_last:
            carries = carries.write(pick(carry, held), count)
        return Reached(None, position, carry, ys), carries.arrays


def lowered_dtype(dtype: np.dtype, precision: np.dtype | None) -> np.dtype:
    """The dtype of a leaf after it is rounded to a precision, see `AbstractSlots`."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if precision is None or not is_float or dtype.itemsize <= precision.itemsize:
        return dtype
    return precision


def _rounded(leaf: Value, dtype: np.dtype) -> Value:
    own = jax.typeof(leaf).dtype
    return leaf if own == dtype else lax.convert_element_type(leaf, dtype)


def bits_of(dtype: np.dtype) -> np.dtype:
    """The unsigned integers with as many bits."""
    return jnp.dtype(f"uint{8 * dtype.itemsize}")


def _as_stored(leaf: Value, dtype: np.dtype) -> Value:
    """A leaf of the carry in a stored dtype: the bits of numbers, the data of keys."""
    # `typeof`, since a leaf may be a Python number, a literal of the program.
    own = jax.typeof(leaf).dtype
    if own == dtype:
        return leaf
    is_key = jnp.issubdtype(own, jax.dtypes.prng_key)
    return (
        jax.random.key_data(leaf) if is_key else lax.bitcast_convert_type(leaf, dtype)
    )


def _restored(stored: Value, dtype: np.dtype) -> Value:
    if stored.dtype == dtype:
        return stored
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return lax.bitcast_convert_type(stored, dtype)
    return jax.random.wrap_key_data(stored, impl=key_impl(dtype))


@functools.cache
def key_impl(dtype: np.dtype) -> Hashable:
    """The implementation of keys of a dtype.

    JAX tells this of arrays only, so it is asked about an array that is being traced.
    """
    answer: list[Value] = []
    ask = lambda key: answer.append(jax.random.key_impl(key))
    jax.eval_shape(ask, jax.ShapeDtypeStruct((), dtype))
    return answer[0]
