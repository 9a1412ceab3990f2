"""Slots: room for stored carries, and the forward sweep that leaves carries there.

To store carries elsewhere or in another form, subclass `AbstractSlots` in a file of its
own. The slots of inner levels, which are few and soon read, are on the device always.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._arrays import Arrays, Flags, pick, stack_of, stack_type
from ...._compat import is_widened
from ...._programs import constant
from ...._types import Aval, Index, PyTree, Value
from .._by_segments import BySegments
from .._costs import Rates
from .._kept_rows import scan
from .._loop import element, part, store, zero


@dataclasses.dataclass(frozen=True)
class AbstractSlots(abc.ABC):
    """Where carries are stored, and in which form: a frozen, hashable dataclass.

    Attributes:
        precision: The dtype that floating-point leaves have there, unless they have as
            few bits already; `None` for their own.
    """

    precision: np.dtype | None = dataclasses.field(default=None, kw_only=True)

    @property
    @abc.abstractmethod
    def take_device_memory(self) -> bool:
        """Whether they count among the bytes that a gradient takes."""

    @property
    @abc.abstractmethod
    def place(self) -> str:
        """Where they are, as a plan says it."""

    @abc.abstractmethod
    def move_time(self, nbytes: int, rate: Rates) -> float:
        """How long it takes to write so many bytes there, or to read them, roughly.

        In nanoseconds.
        """

    @property
    def outlast_primal(self) -> bool:
        """Whether what the primal stores is there until a cotangent comes.

        If it is not, the way back runs the loop once more for the carries.
        """
        return True

    @abc.abstractmethod
    def stored_dtype(self, dtype: np.dtype) -> np.dtype:
        """The dtype in which leaves of a dtype are stored, see `packed`."""

    @abc.abstractmethod
    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        """The types of so many slots."""

    @abc.abstractmethod
    def read(self, array: Value, row: Index) -> Value:
        """What is in a row of an array of them, on the device."""

    def read_part(self, array: Value, row: Index, count: int) -> Value:
        """What is in so many rows from one on."""
        rows = row + jnp.arange(count, dtype=jnp.int32)
        return lax.map(lambda row: self.read(array, row), rows)

    @abc.abstractmethod
    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        """An array of them with a leaf in a row, which is on the device."""

    def sweep(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs a loop and stores the carries that its order starts from, by segments.

        Args:
            segments: The loop.
            held: Which leaves of a carry are stored.
            init: The initial carry.

        Returns:
            The final carry, `ys`, and the slots. They have a row for each start, and
            one more for carries that are not kept. The last carry is there if the order
            asks for it.
        """
        segments, count = segments.opaque(), len(segments.starts)

        def body(
            segment: Index, stride: int | None, state: PyTree
        ) -> tuple[Value, Carries]:
            reached, carries = state
            carries = carries.write(pick(reached.carry, held), segment)
            return segments.run(reached, segment, stride), carries

        carries = self.filled(pick(init, held), count + 1)
        reached, carries = segments.each(body, (segments.start(init), carries))
        if segments.order.keeps_last:
            carries = carries.write(pick(reached.carry, held), count)
        return reached.carry, reached.ys, carries.arrays

    @property
    def near(self) -> "DeviceSlots":
        """The slots of inner levels, in the same form."""
        return DeviceSlots(precision=self.precision)

    def released(self, arrays: Arrays, outputs: PyTree) -> PyTree:
        """The outputs of a reverse sweep, after which slots are read no more."""
        return outputs

    def packed(self, carry: Arrays) -> list[Value]:
        """A carry in the form in which it is stored."""
        dtypes = [jax.typeof(leaf).dtype for leaf in carry]
        lowered = [lowered_dtype(dtype, self.precision) for dtype in dtypes]
        carry = list(map(_rounded, carry, lowered))
        return list(map(_as_stored, carry, map(self.stored_dtype, lowered)))

    def unpacked(self, stored: Arrays, dtypes: Sequence[np.dtype]) -> list[Value]:
        """A carry as it was, given what was stored of it, and its dtypes."""
        lowered = [lowered_dtype(dtype, self.precision) for dtype in dtypes]
        return list(map(_rounded, map(_restored, stored, lowered), dtypes))

    def packed_types(self, carry_types: Arrays) -> list[Aval]:
        """The types of a carry in that form."""
        return list(jax.make_jaxpr(self.packed)(list(carry_types)).out_avals)

    def filled(self, carry: Arrays, rows: int) -> "Carries":
        """Slots on the device, with a carry in each of them."""
        arrays = [stack_of(leaf, rows) for leaf in self.packed(carry)]
        return Carries(arrays, self, tuple(jax.typeof(leaf).dtype for leaf in carry))

    def holding(self, arrays: Arrays, carry_types: Arrays) -> "Carries":
        """The carries in slots that a sweep has left."""
        return Carries(list(arrays), self, tuple(aval.dtype for aval in carry_types))


@dataclasses.dataclass(frozen=True)
class Carries:
    """Carries in slots.

    Attributes:
        arrays: The slots, an array for each leaf.
        slots: What kind they are.
        dtypes: The dtype of each leaf of a carry.
    """

    arrays: list[Value]
    slots: AbstractSlots
    dtypes: tuple[np.dtype, ...]

    def read(self, row: Index) -> list[Value]:
        """The carry in a row."""
        leaves = [self.slots.read(array, row) for array in self.arrays]
        return self.slots.unpacked(leaves, self.dtypes)

    def read_part(self, row: Index, count: int) -> list[Value]:
        """The carries in so many rows from one on, along the leading axis."""
        leaves = [self.slots.read_part(array, row, count) for array in self.arrays]
        return self.slots.unpacked(leaves, self.dtypes)

    def write(self, carry: Arrays, row: Index) -> "Carries":
        """The same with a carry in a row."""
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
        """The same with so many carries in the first rows, one after the other.

        Args:
            carry: That in the first row.
            count: How many rows are filled, the first one included.
            move: From a row and its carry to the carry of the next row.
            unroll: How many moves an iteration makes.
        """

        def fill(i: Index, state: tuple[list[Value], Carries]) -> PyTree:
            carry, carries = state
            carry = move(i, carry)
            return carry, carries.write(carry, i + 1)

        state = list(carry), self
        return lax.fori_loop(0, count - 1, fill, state, unroll=unroll)[1]


jax.tree_util.register_dataclass(
    Carries, data_fields=["arrays"], meta_fields=["slots", "dtypes"]
)


@dataclasses.dataclass(frozen=True)
class StoredSteps:
    """Consecutive steps whose carries are all stored.

    Attributes:
        carries: The carries.
        row: Where that before the first step is.
        start: The position of the first step.
        count: How many steps there are.
        most: How many there are at most.
        products: What else is known of each step (`_known_products.py`), if anything:
            of the first step in the row where its carry is.
    """

    carries: Carries
    row: Index
    start: Index
    count: Value
    most: int
    products: Arrays = ()

    def from_step(self, offset: Index, count: Index, most: int) -> "StoredSteps":
        """So many of them, from one on."""
        row, start = self.row + offset, self.start + offset
        return StoredSteps(self.carries, row, start, count, most, self.products)


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
        # XLA would widen some small ones for the whole loop. It keeps their bits.
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
    ) -> tuple[list[Value], list[Value], list[Value]]:
        # XLA does away with outputs that nobody needs if there is one loop; of loops in
        # loops, only if all trip counts are static.
        step, loop, order = segments.step, segments.loop, segments.order
        if not step.y_types or (segments.are_static and loop.kept is None):
            return super().sweep(segments, held, init)
        # Carries that are not kept are written, too: to the next free row, which is
        # written again before it is read. A branch would have a GPU wait for the host.
        starts = constant([*segments.starts, order.length])
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
        (_, carry, _, carries), ys = scan(body, read, state, [], loop)
        if order.keeps_last:
            carries = carries.write(pick(carry, held), count)
        return carry, ys, carries.arrays


def lowered_dtype(dtype: np.dtype, precision: np.dtype | None) -> np.dtype:
    """The dtype of a leaf that is stored with so much precision, or its own."""
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
    """A leaf of the carry in another dtype: the bits of numbers, the data of keys."""
    # A literal of the program is a leaf, too, and has no dtype of its own.
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
    """How keys of a dtype are implemented: JAX tells this of arrays alone."""
    found: list[Value] = []
    ask = lambda key: found.append(jax.random.key_impl(key))
    jax.eval_shape(ask, jax.ShapeDtypeStruct((), dtype))
    return found[0]
