"""Slots in host memory, so that the device need not hold the carries."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..._array_types import axes_of, vary
from ..._compat import is_widened
from ..._constant import constant
from ..._partition import Arrays, Flags, pick
from ..._tangents import zero_array
from ...progress import hops
from ._costs import Rates
from ._forward import iterate, zero
from ._loop import Loop, element, opaque, stack_type, store
from ._order import AbstractSlotOrder
from ._slots import AbstractSlots, bits_of
from ._step import Step

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


@dataclasses.dataclass(frozen=True)
class HostSlots(AbstractSlots):
    """Sent there as the primal stores them, and fetched one at a time."""

    @property
    def take_device_memory(self) -> bool:
        # The memory of a CPU is that of its host.
        return jax.default_backend() == "cpu"

    @property
    def place(self) -> str:
        return "on the host"

    def move_time(self, nbytes: int, rate: Rates) -> float:
        return rate.iteration + nbytes * rate.byte_to_host

    def stored_dtype(self, dtype: Any) -> Any:
        # Of keys JAX knows on the host no more than their data.
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.dtype(jnp.uint32)
        # Bits have no cotangents. JAX makes the zero cotangents of slots that a loop
        # around hands on, and makes them on the device, which those of slots on the
        # host are not. Of a complex number it cannot take the bits.
        as_bits = is_widened(dtype) or jnp.issubdtype(dtype, jnp.floating)
        return bits_of(dtype) if as_bits else dtype

    def types(self, carry_types: Arrays, rows: int) -> list[Any]:
        packed = self.packed_types(carry_types)
        stacked = [stack_type(aval, rows) for aval in packed]
        return [aval.update(memory_space=_HOST) for aval in stacked]

    def read(self, array: Any, row: Any) -> Any:
        return jax.device_put(_element_at(0)(array, row), _DEVICE)

    def write(self, array: Any, leaf: Any, row: Any) -> Any:
        return _store_at(0)(array, jax.device_put(leaf, _HOST), row)

    def sweep(
        self,
        step: Step,
        loop: Loop,
        order: AbstractSlotOrder,
        held: Flags,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Nothing is sent to the host but what is kept.

        The slots are what a scan stacks, for that is how XLA knows to make them there.
        """
        consts, xs = opaque(consts), opaque(xs)

        def move(state: tuple[Any, list[Any], list[Any]]) -> Any:
            position, carry, ys = state
            carry, y = step(consts, carry, loop.x(xs, position))
            return position + 1, carry, _keep(loop, ys, y, position)

        def run(state: Any, stop: Any) -> Any:
            if loop.stops:
                goes_on = lambda state: state[1][0] & (state[0] < stop)
                return lax.while_loop(goes_on, move, state)
            return iterate(move, state, lambda state: stop - state[0], loop.unroll)

        def last_y(state: tuple[Any, list[Any], list[Any]]) -> list[Any]:
            row, _ = loop.row(loop.index(state[0] - 1))
            return [element(b, row) for b in state[2]] if loop.rows else []

        def segment(told: tuple[Any, Any], stop: Any) -> tuple[Any, list[Any]]:
            number, state = told
            stored = self.packed(pick(state[1], held))
            kept = [jax.device_put(leaf, _HOST) for leaf in stored]
            return hops(gauge, number, state, stop, run, last_y), kept

        ys = [zero_array(stack_type(y, loop.rows)) for y in step.y_types]
        # The last row is for the carries that find no free slot.
        stops = constant([*order.starts[1:], order.length, order.length])
        gauge = loop.meter.here
        number = gauge.open([*consts, *init, *xs])
        axes = axes_of(init[0]) if loop.stops else frozenset()
        state = jax.tree.map(lambda x: vary(x, axes), (zero(), list(init), ys))
        (_, (_, carry, ys)), slots = lax.scan(segment, (number, state), stops)
        return carry, ys, slots


def _keep(loop: Loop, ys: Arrays, y: Arrays, position: Any) -> list[Any]:
    """`ys` with the outputs of the step at a position, if they are kept."""
    if not loop.rows:
        return list(ys)
    row, is_kept = loop.row(loop.index(position))
    if is_kept is not True:
        before = [element(b, row) for b in ys]
        y = [jnp.where(is_kept, *pair) for pair in zip(y, before, strict=True)]
    return [store(b, leaf, row) for b, leaf in zip(ys, y, strict=True)]


# JAX makes gathers and scatters of slices under `vmap`, whose indices would have to be
# on the host as well. The rows are the same for the whole batch, so slices will do.


@functools.cache
def _element_at(axis: int) -> Callable[..., Any]:
    @custom_vmap
    def at(slot: Any, row: Any) -> Any:
        return element(slot, row, axis)

    @at.def_vmap
    def batched(size: int, is_batched: Any, slot: Any, row: Any) -> Any:
        del size
        return _element_at(axis + 1)(slot, row), is_batched[0]

    return at


@functools.cache
def _store_at(axis: int) -> Callable[..., Any]:
    @custom_vmap
    def at(slot: Any, leaf: Any, row: Any) -> Any:
        return store(slot, leaf, row, axis)

    @at.def_vmap
    def batched(size: int, is_batched: Any, slot: Any, leaf: Any, row: Any) -> Any:
        repeated = lambda x: jnp.broadcast_to(x, (size, *x.shape))
        slot = slot if is_batched[0] else repeated(slot)
        leaf = leaf if is_batched[1] else repeated(leaf)
        return _store_at(axis + 1)(slot, leaf, row), True

    return at
