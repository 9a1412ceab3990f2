"""Kernels for TPUs: a number of 1,024 rows is a tile of 8 by 128 in vector memory.

Outside of a kernel the axis of rows comes last, in whole tiles. A block has its part of
all arrays in vector memory for as long as it runs, and what rows share is in that of
scalars, as one axis. All numbers have 32 bits there.
"""

import contextvars
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._types import Value

# The rows of a block: a number of all of them is one register.
TILE = 1024
_LANES = 128
_WIDE = {"b": "int32", "i": "int32", "u": "uint32"}

# Whether a kernel for a TPU is being traced.
_is_tiled = contextvars.ContextVar("_is_tiled", default=False)


def shape_of(block: int) -> tuple[int, ...]:
    """The shape of a number of the rows of a block."""
    return (block // _LANES, _LANES) if _is_tiled.get() else (block,)


def is_flag(dtype: Any) -> bool:
    """Whether numbers are flags."""
    return dtype == np.dtype(bool)


def carried(x: Value) -> Value:
    """A number as loops carry it, which have no flags in tiles."""
    return x.astype(jnp.int32) if _is_tiled.get() and is_flag(x.dtype) else x


def where(hit: Value, a: Value, b: Value) -> Value:
    """A choice, which there is not of flags in tiles."""
    if _is_tiled.get() and is_flag(a.dtype):
        return (hit & a) | (~hit & b)
    return jnp.where(hit, a, b)


def memory() -> dict[str, int]:
    """The bytes of vector memory of a TPU, and of its memory of scalars."""
    from jax.experimental.pallas import tpu

    known = tpu.get_tpu_info()
    sizes = known.vmem_capacity_bytes, known.smem_capacity_bytes
    return dict(zip(("vectors", "scalars"), sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class _TiledArray:
    """How an array lies in the memory of a TPU.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        axis: Its axis of rows; `None` if rows share it.
        rows: How many rows it has there.
    """

    shape: tuple[int, ...]
    dtype: Any
    axis: int | None
    rows: int

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """Its type there."""
        shape = [math.prod(self.shape)]
        if self.axis is not None:
            shape = [n for i, n in enumerate(self.shape) if i != self.axis]
            shape += [self.rows // _LANES, _LANES]
        return jax.ShapeDtypeStruct(shape, _WIDE.get(self.dtype.kind, "float32"))

    @property
    def spec(self) -> Any:
        """What a block has of it."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu

        if self.axis is None:
            return pl.BlockSpec(memory_space=tpu.SMEM)
        shape = *self.type.shape[:-2], TILE // _LANES, _LANES
        return pl.BlockSpec(shape, lambda n: (*[0] * (len(shape) - 2), n, 0))

    def opened(self, x: Value) -> Value:
        """The array as it lies there. Rows too many are the last one again."""
        if self.axis is not None:
            x = jnp.moveaxis(x, self.axis, -1)
            more = [(0, 0)] * (x.ndim - 1) + [(0, self.rows - x.shape[-1])]
            x = jnp.pad(x, more, mode="edge")
        return jnp.reshape(x.astype(self.type.dtype), self.type.shape)

    def closed(self, x: Value) -> Value:
        """The array, from what lies there."""
        if self.axis is None:
            return jnp.reshape(x, self.shape).astype(self.dtype)
        x = jnp.reshape(x, (*x.shape[:-2], self.rows))[..., : self.shape[self.axis]]
        return jnp.moveaxis(x, -1, self.axis).astype(self.dtype)


class _TiledReference:
    """A reference to an array, as to one that has its own shape."""

    def __init__(self, ref: Any, array: _TiledArray):
        self._ref, self._array = ref, array

    def _at(self, index: Any) -> Any:
        if (axis := self._array.axis) is not None:
            return (*index[:axis], *index[axis + 1 :], slice(None), slice(None))
        at = 0
        for i, n in zip(index, self._array.shape, strict=True):
            at = at * n + i
        return (at,)

    def __getitem__(self, index: Any) -> Value:
        found, dtype = self._ref[self._at(index)], self._array.dtype
        return found != 0 if is_flag(dtype) else found.astype(dtype)

    def __setitem__(self, index: Any, value: Value) -> None:
        self._ref[self._at(index)] = value.astype(self._array.type.dtype)


def of_tiles(
    kernel: Callable[..., None],
    types: Sequence[jax.ShapeDtypeStruct],
    blocks: int,
    axes: tuple[Sequence[int | None], Sequence[int | None]],
    interpret: Any,
    name: str,
) -> Callable[..., list[Value]]:
    """A kernel for a TPU. `axes` are those of rows, of each input and output."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu

    of = lambda x, axis: _TiledArray(x.shape, np.dtype(x.dtype), axis, blocks * TILE)

    def run(*inputs: Value) -> list[Value]:
        ins, outs = list(map(of, inputs, axes[0])), list(map(of, types, axes[1]))

        def body(*refs: Any) -> None:
            token = _is_tiled.set(True)
            try:
                pairs = zip(refs, [*ins, *outs], strict=True)
                kernel(pl.program_id(0), *(_TiledReference(*pair) for pair in pairs))
            finally:
                _is_tiled.reset(token)

        # What rows share is written by all blocks.
        are_apart = all(out.axis is not None for out in outs)
        params = tpu.CompilerParams(
            dimension_semantics=("parallel" if are_apart else "arbitrary",),
            vmem_limit_bytes=None if interpret else memory()["vectors"],
        )
        made = pl.pallas_call(
            body,
            grid=(blocks,),
            in_specs=[x.spec for x in ins],
            out_specs=[x.spec for x in outs],
            out_shape=[x.type for x in outs],
            interpret=interpret,
            compiler_params=params,
            name=name,
        )(*(x.opened(value) for x, value in zip(ins, inputs, strict=True)))
        return [x.closed(value) for x, value in zip(outs, made, strict=True)]

    return run
