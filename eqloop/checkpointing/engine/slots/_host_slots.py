"""Slots in host memory, so that the device does not have to hold the carries."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ...._arrays import (
    Arrays,
    Flags,
    explicit_sharding,
    mesh_axis_of,
    on_mesh,
    pick,
    placed_as,
    stack_type,
)
from ...._compat import is_widened
from ...._device import planning_device
from ...._programs import constant
from ...._types import Aval, Index, Value
from ...steps._loop import element, store
from .._costs import Rates
from .._forward import BySegments, Reached
from ._slots import AbstractSlots, Carries, bits_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class HostSlots(AbstractSlots):
    """Carries are sent to the host by the primal, and fetched one at a time."""

    @property
    def take_device_memory(self) -> bool:
        # The memory of a CPU is that of its host.
        return planning_device().platform == "cpu"

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

    def rows(self, starts: int, needs_spare: bool) -> int:
        return starts + needs_spare

    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        stored = jax.make_jaxpr(self._stored)(list(carry_types)).out_avals
        stacked = [stack_type(aval, rows) for aval in stored]
        return [aval.update(memory_space=_HOST) for aval in stacked]

    def _stored(self, carry: Arrays) -> list[Value]:
        return list(map(_tiled, self.packed(carry)))

    def holding(
        self, arrays: Arrays, carry_types: Arrays, saved: Flags = ()
    ) -> Carries:
        shapes = [aval.shape for aval in self.packed_types(carry_types)]
        stored = list(map(_of_all_examples, arrays, shapes))
        return super().holding(stored, carry_types, saved)

    def filled(self, carry: Arrays, rows: int) -> Carries:
        """New slots, whose rows all have the carry: the stacked outputs of a scan.

        XLA makes these on the host, and no other array that is as large.
        """
        kept = [jax.device_put(leaf, _HOST) for leaf in self._stored(carry)]
        _, arrays = lax.scan(lambda _, __: (None, kept), None, length=rows)
        # Those of one example, or a batch like any other, which `bare` returns.
        shapes = [jnp.shape(leaf) for leaf in self.packed(carry)]
        arrays = [
            _OfAllExamples(rows, (), shape)
            for rows, shape in zip(arrays, shapes, strict=True)
        ]
        return Carries(arrays, self, tuple(jax.typeof(leaf).dtype for leaf in carry))

    def bare(self, arrays: Arrays) -> list[Value]:
        return [array.rows for array in arrays]

    def read(self, array: Value, row: Index) -> Value:
        # First the row, then the move: so one leaf goes to the device, not all slots.
        leaf = jax.device_put(element(array.rows, row), _DEVICE)
        for number in array.numbers:
            leaf = _own(leaf, number)
        return _of_tiles(leaf, array.shape)

    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        shape = array.rows.shape[1 + len(array.numbers) :]
        rows = _put_own(array.rows, _in_tiles(leaf, shape), row, *array.numbers)
        return dataclasses.replace(array, rows=rows)

    def sweep(
        self, segments: BySegments, held: Flags, init: Arrays
    ) -> tuple[Reached, list[Value]]:
        """Runs the segments in a scan, whose stacked outputs are the slots."""
        # In this way XLA makes the slots on the host, and only carries that are kept
        # are sent there.
        segments, start, division = self.started(segments.opaque(), held, init)
        (group, *others), stops, end = (
            segments.groups,
            segments.starts[1:],
            segments.stop,
        )
        # If all segments have as many steps, the trip count of their loops is static.
        is_static = not (others or segments.needs_spare) and group.stride is not None
        if segments.needs_spare:
            # One more segment, without steps, for the row after those of the starts.
            stops = *stops, end

        def run(reached: Reached, stop: Index) -> tuple[Reached, list[Value]]:
            # Packed on the device, so that a lower precision moves fewer bytes.
            stored = self._stored(pick(reached.carry, division.at_starts))
            kept = [jax.device_put(leaf, _HOST) for leaf in stored]
            if is_static:
                return segments.run(reached, 0, group), kept
            return segments.run_to(reached, stop), kept

        reached, slots = lax.scan(run, start, constant([*stops, end]))
        reached = segments.finished(reached)
        return reached, division.arrays(slots, reached.saved)


def _tiled(leaf: Value) -> Value:
    """A leaf with two axes and two entries at least."""
    # A TPU stores the last two axes of an array in tiles. In the memory of its host, it
    # cannot write a part of one: a row of a matrix of 16 bits, or an entry of a vector.
    # Axes are added behind, as a batch of leaves has that of its examples in front.
    shape = jnp.shape(leaf)
    if jnp.size(leaf) == 1:
        return _in_tiles(leaf, (*(shape or (1,)), 2))
    return _in_tiles(leaf, (*shape, 1)) if len(shape) == 1 else leaf


def _in_tiles(leaf: Value, shape: tuple[int, ...]) -> Value:
    """A leaf in the shape in which it, or a batch with it, was stored."""
    if jnp.shape(leaf) == shape:
        return leaf
    if jnp.size(leaf) == 1:
        return jnp.broadcast_to(jnp.reshape(leaf, (1,) * len(shape)), shape)
    return jnp.expand_dims(leaf, 1)


def _of_tiles(stored: Value, shape: tuple[int, ...]) -> Value:
    """The leaf of this shape."""
    if jnp.shape(stored) == shape:
        return stored
    if math.prod(shape) == 1:
        first = lax.slice(stored, (0,) * stored.ndim, (1,) * stored.ndim)
        return jnp.reshape(first, shape)
    return lax.squeeze(stored, [1])


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
        shape: That of a leaf before it is stored as `_tiled` has it.
    """

    rows: Value
    numbers: tuple[Value, ...]
    shape: tuple[int, ...]


jax.tree_util.register_dataclass(
    _OfAllExamples, data_fields=["rows", "numbers"], meta_fields=["shape"]
)


def _of_all_examples(slot: Value, shape: tuple[int, ...]) -> _OfAllExamples:
    """Slots that may be batched, as an array that is not."""
    numbers = list[Value]()
    # The innermost `vmap` answers first, and then those around it.
    while True:
        answer = _Answer()
        number = _example_p.bind(slot, answer=answer)
        answer.is_read = True
        # No `vmap` is left around that has these slots in its batch.
        if not answer.slots:
            return _OfAllExamples(slot, tuple(reversed(numbers)), shape)
        (slot,) = answer.slots
        numbers.append(number)


@dataclasses.dataclass(eq=False)
class _Answer:
    """What a `vmap` answers, while it is being asked.

    Attributes:
        slots: The slots of all of its examples, if they are batched.
        is_read: Whether the answer was read. What is said later nobody hears.
    """

    slots: list[Value] = dataclasses.field(default_factory=list)
    is_read: bool = False


_EXAMPLE_NUMBER = jax.typeof(np.int32(0))

# The number of the example to which slots belong; 0 if they are not batched.
_example_p = jex.Primitive("example")
_example_p.def_abstract_eval(lambda slot, answer: on_mesh(_EXAMPLE_NUMBER))
_example_p.def_impl(lambda slot, answer: jnp.int32(0))


def _number_examples(
    args: Arrays, dims: Sequence[int], answer: _Answer
) -> tuple[Value, int]:
    (slot,), (dim,) = args, dims
    # The way back expands only when nothing around it is left to batch.
    assert not answer.is_read, (
        "slots on the host cannot be batched after the way back was traced"
    )
    # The batch is behind the rows already, where the forward sweep put it.
    answer.slots.append(jnp.moveaxis(slot, dim, 1))
    size, mesh_axis = slot.shape[dim], mesh_axis_of(slot, dim)
    like = stack_type(on_mesh(_EXAMPLE_NUMBER), size, mesh_axis=mesh_axis)
    return placed_as(jnp.arange(size, dtype=jnp.int32), like), 0


def _lower_example(ctx: Any, slot: Value, answer: _Answer) -> list[Value]:
    # A `vmap` would have replaced this, so there is a single example.
    return [mlir.ir_constant(np.int32(0))]


batching.primitive_batchers[_example_p] = _number_examples
mlir.register_lowering(_example_p, _lower_example)


@custom_vmap
def _own(leaves: Value, number: Index) -> Value:
    """The leaf of an example, among those of all examples."""
    return element(_on_every_device(leaves), number)


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
    block = jnp.expand_dims(_on_every_device(leaf), range(1 + len(numbers)))
    # JAX takes a Python number for one of 64 bits, if those are enabled.
    at = [jnp.asarray(i, jnp.int32) for i in (row, *numbers, *[0] * jnp.ndim(leaf))]
    stored = lax.dynamic_update_slice(_on_every_device(rows), block, at)
    return placed_as(stored, rows)


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
    # Other batches, such as a row for each example, have no row in common. JAX makes
    # scatters of them.
    stored = jax.vmap(_stored_on_host, _mapped_axes(is_batched))(
        rows, leaf, row, *numbers
    )
    return stored, True


def _on_every_device(x: Value) -> Value:
    """An array that may be split over devices, as JAX slices no axis that is.

    It is for the type of an example's own leaf. What runs are the rules for a batch.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def _mapped_axes(is_batched: Sequence[bool]) -> list[int | None]:
    return [0 if flag else None for flag in is_batched]
