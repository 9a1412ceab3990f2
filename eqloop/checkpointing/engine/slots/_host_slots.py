"""Slots in host memory, so that the device does not have to hold the carries."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from ...._arrays import Arrays, Flags, pick, stack_type
from ...._compat import is_widened
from ...._programs import constant
from ...._types import Aval, Index, Value
from .._by_segments import BySegments, Reached
from .._costs import Rates
from .._loop import element, store, zero
from ._slots import AbstractSlots, Carries, bits_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class HostSlots(AbstractSlots):
    """Carries are sent to the host by the primal, and fetched one at a time."""

    @property
    def take_device_memory(self) -> bool:
        # The memory of a CPU is that of its host.
        return jax.default_backend() == "cpu"

    @property
    def place(self) -> str:
        return "on the host"

    def move_time(self, nbytes: int, rate: Rates) -> float:
        return rate.iteration + nbytes * rate.byte_to_host

    def stored_dtype(self, dtype: np.dtype) -> np.dtype:
        # JAX cannot place keys on the host, but their data.
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.dtype(jnp.uint32)
        # Floats are stored as integers, which have no cotangents. If a loop around this
        # one carries slots, JAX makes zero cotangents for them. It makes these on the
        # device, and the types of slots on the host differ. JAX cannot take the bits of
        # complex numbers.
        as_bits = is_widened(dtype) or jnp.issubdtype(dtype, jnp.floating)
        return bits_of(dtype) if as_bits else dtype

    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        packed = self.packed_types(carry_types)
        stacked = [stack_type(aval, rows) for aval in packed]
        return [aval.update(memory_space=_HOST) for aval in stacked]

    def holding(self, arrays: Arrays, carry_types: Arrays) -> Carries:
        return super().holding(list(map(_of_all_examples, arrays)), carry_types)

    def read(self, array: Value, row: Index) -> Value:
        leaf = jax.device_put(element(array.rows, row), _DEVICE)
        for number in array.numbers:
            leaf = _own(leaf, number)
        return leaf

    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        rows = _put_own(array.rows, leaf, row, *array.numbers)
        return dataclasses.replace(array, rows=rows)

    def sweep(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the segments in a scan, whose stacked outputs are the slots.

        In this way XLA makes the slots on the host, and only carries that are kept are
        sent there.
        """
        segments = segments.opaque()

        def run(reached: Reached, stop: Index) -> tuple[Reached, list[Value]]:
            stored = self.packed(pick(reached.carry, held))
            kept = [jax.device_put(leaf, _HOST) for leaf in stored]
            return segments.run_to(reached, stop), kept

        # One more segment, without steps, for the row after those of the starts.
        length = segments.loop.length
        stops = constant([*segments.starts[1:], length, length])
        reached, slots = lax.scan(run, segments.start(init), stops)
        return reached.carry, reached.ys, slots


@dataclasses.dataclass(frozen=True)
class _OfAllExamples:
    """The slots of a leaf, which all examples of the `vmap`s around share.

    A `vmap` moves the batch axis of what loops carry to the front. Slots have their
    rows there, so all of them would be transposed, in the memory of the host and by its
    processor. And it turns slices into gathers and scatters. So slots are no batch:
    each example finds its own leaf in what is read, see `_own`.

    Attributes:
        rows: The slots. After the axis of the rows come those of the `vmap`s.
        numbers: The number of the example in each of the `vmap`s, the outermost first.
    """

    rows: Value
    numbers: tuple[Value, ...]


jax.tree_util.register_dataclass(
    _OfAllExamples, data_fields=["rows", "numbers"], meta_fields=[]
)


def _of_all_examples(slot: Value) -> _OfAllExamples:
    """Slots that may be batched, as an array that is not."""
    numbers = list[Value]()
    # The innermost `vmap` answers first, and then those around it.
    while (found := _batch_of_slots(slot)) is not None:
        slot, number = found
        numbers.append(number)
    return _OfAllExamples(slot, tuple(reversed(numbers)))


def _batch_of_slots(slot: Value) -> tuple[Value, Value] | None:
    """The slots of all examples of a `vmap`, and the number of each in it.

    Returns:
        Both, or `None` if the slots are not batched. Nor are they in a program that
        will be batched only after it was traced.
    """
    answer = list[Value]()

    @custom_vmap
    def number_in(slot: Value) -> Value:
        return zero()

    @number_in.def_vmap
    def number_in_batch(
        size: int, is_batched: Sequence[bool], slot: Value
    ) -> tuple[Value, bool]:
        # Back to where it was: XLA sees that nothing is moved.
        answer.append(jnp.moveaxis(slot, 0, 1))
        return jnp.arange(size, dtype=jnp.int32), True

    number = number_in(slot)
    return (answer[0], number) if answer else None


@custom_vmap
def _own(leaves: Value, number: Index) -> Value:
    """The leaf of an example, among those of all examples."""
    return element(leaves, number)


@_own.def_vmap
def _each_own(
    size: int, is_batched: Sequence[bool], leaves: Value, number: Index
) -> tuple[Value, bool]:
    if list(is_batched) == [False, True]:
        return leaves, True  # these are the examples, in the order of their numbers
    return jax.vmap(element, _mapped_axes(is_batched))(leaves, number), True


def _stored_on_host(rows: Value, leaf: Value, row: Index, *numbers: Index) -> Value:
    """The slots of all examples, with the leaf of one of them in a row."""
    leaf = jax.device_put(leaf, _HOST)
    if not numbers:
        return store(rows, leaf, row)
    block = jnp.expand_dims(leaf, range(1 + len(numbers)))
    at = (row, *numbers, *[0] * jnp.ndim(leaf))
    return lax.dynamic_update_slice(rows, block, at)


_put_own = custom_vmap(_stored_on_host)


@_put_own.def_vmap
def _row_of_batch(
    size: int,
    is_batched: Sequence[bool],
    rows: Value,
    leaf: Value,
    row: Index,
    *numbers: Index,
) -> tuple[Value, bool]:
    of_rows, of_leaf, of_row, *of_numbers = is_batched
    if of_numbers[-1:] == [True] and not any((of_rows, of_row, *of_numbers[:-1])):
        # The leaves of all examples, in the order of their numbers: a whole row.
        leaves = leaf if of_leaf else jnp.broadcast_to(leaf, (size, *leaf.shape))
        return _put_own(rows, leaves, row, *numbers[:-1]), False
    stored = jax.vmap(_stored_on_host, _mapped_axes(is_batched))(
        rows, leaf, row, *numbers
    )
    return stored, True


def _mapped_axes(is_batched: Sequence[bool]) -> list[int | None]:
    return [0 if flag else None for flag in is_batched]
