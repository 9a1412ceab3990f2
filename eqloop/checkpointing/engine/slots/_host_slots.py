"""Slots in host memory, so that the device does not have to hold the carries."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from ...._arrays import Arrays, Flags, pick, stack_type
from ...._compat import is_widened
from ...._programs import constant
from ...._types import Aval, Index, PyTree, Value
from .._by_segments import BySegments, Reached
from .._costs import Rates
from .._loop import element, store
from ._slots import AbstractSlots, bits_of

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

    def read(self, array: Value, row: Index) -> Value:
        return jax.device_put(_element_at(0)(array, row), _DEVICE)

    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        return _store_at(0)(array, jax.device_put(leaf, _HOST), row)

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


# Under `vmap`, JAX turns slices into gathers and scatters, whose indices would have to
# be on the host as well. But a row is the same for the whole batch, so a slice along
# another axis is enough.


@functools.cache
def _element_at(axis: int) -> Callable[..., PyTree]:
    @custom_vmap
    def at(slot: Value, row: Index) -> Value:
        return element(slot, row, axis)

    @at.def_vmap
    def batched(
        size: int, is_batched: Sequence[bool], slot: Value, row: Index
    ) -> tuple[Value, bool]:
        del size
        return _element_at(axis + 1)(slot, row), is_batched[0]

    return at


@functools.cache
def _store_at(axis: int) -> Callable[..., PyTree]:
    @custom_vmap
    def at(slot: Value, leaf: Value, row: Index) -> Value:
        return store(slot, leaf, row, axis)

    @at.def_vmap
    def batched(
        size: int, is_batched: Sequence[bool], slot: Value, leaf: Value, row: Index
    ) -> tuple[Value, bool]:
        repeated = lambda x: jnp.broadcast_to(x, (size, *x.shape))
        slot = slot if is_batched[0] else repeated(slot)
        leaf = leaf if is_batched[1] else repeated(leaf)
        return _store_at(axis + 1)(slot, leaf, row), True

    return at
