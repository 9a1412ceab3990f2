"""Slots in files, for carries that neither the device nor the host can hold.

The program has no array of slots. In its place it carries a handle for each leaf: the
number of the run, by which callbacks find the files. Writing a row returns a new
handle, though the number is the same. So a later read depends on the write, and XLA
cannot exchange them.

Under `vmap` the handle is batched if the leaf is, and the whole batch is one row of the
file.

JAX may run a callback in a thread of its own. `jax.enable_x64` as a context manager is
in effect only in the thread that entered it: there, JAX would round numbers of 64 bits.
So these are passed as words of 32 bits (`to_words`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from ...._arrays import Arrays, axes_of, explicit_sharding, placed_as, vary
from ...._compat import is_widened
from ...._types import Aval, Index, PyTree, Value
from .._costs import Rates
from ._slots import AbstractSlots, Carries, bits_of, lowered_dtype
from ._spill_files import SpillFiles

_NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
_WORD = np.dtype(np.uint32)


@dataclasses.dataclass(frozen=True)
class FileSlots(AbstractSlots):
    """Carries are written and read by callbacks, during a reverse sweep.

    Attributes:
        directory: Where the files are.
        files: The files of all runs that are under way.
    """

    directory: str
    files: SpillFiles = dataclasses.field(repr=False, compare=False)

    @property
    def take_device_memory(self) -> bool:
        return False

    @property
    def place(self) -> str:
        return f"in files in {self.directory!r}"

    def move_time(self, nbytes: int, rate: Rates) -> float:
        return rate.callback + nbytes * rate.byte_to_file

    @property
    def outlast_primal(self) -> bool:
        # Files of the primal could never be closed: nobody can say whether none, one or
        # several reverse sweeps will read them.
        return False

    def stored_dtype(self, dtype: np.dtype) -> np.dtype:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jnp.dtype(jnp.uint32)
        return bits_of(dtype) if is_widened(dtype) else dtype

    def packed(self, carry: Arrays) -> list[Value]:
        # JAX may run the callback in a thread without 64 bits.
        return list(map(to_words, super().packed(carry)))

    def unpacked(self, stored: Arrays, dtypes: Sequence[np.dtype]) -> list[Value]:
        lowered = [lowered_dtype(dtype, self.precision) for dtype in dtypes]
        kept = map(self.stored_dtype, lowered)
        return super().unpacked(list(map(of_words, stored, kept)), dtypes)

    def types(self, carry_types: Arrays, rows: int) -> list[Aval]:
        return [_NUMBER for _ in carry_types]

    def filled(self, carry: Arrays, rows: int) -> Carries:
        """New files, with nothing in them."""
        count = len(carry)
        opened = lambda: np.asarray(self.files.open(count), np.int32)
        # This has an effect: each run needs files of its own, and XLA may merge two
        # calls of a pure callback, or remove them.
        number = io_callback(opened, _NUMBER)
        types = self.packed_types([jax.typeof(leaf) for leaf in carry])
        arrays = [_Handle(number, i, aval) for i, aval in enumerate(types)]
        return Carries(arrays, self, tuple(jax.typeof(leaf).dtype for leaf in carry))

    def read(self, array: Value, row: Index) -> Value:
        def load(number: np.ndarray, row: np.ndarray) -> np.ndarray:
            return self.files.read(_one(number), array.leaf, _one(row))

        aval = jax.ShapeDtypeStruct(array.aval.shape, array.aval.dtype)
        loaded = jax.pure_callback(
            load, aval, array.number, row, vmap_method="broadcast_all"
        )
        # Each device has files of its own, which the type of the number does not show.
        return vary(placed_as(loaded, array.aval), axes_of(array.aval))

    def write(self, array: Value, leaf: Value, row: Index) -> Value:
        def save(number: np.ndarray, row: np.ndarray, leaf: np.ndarray) -> np.ndarray:
            self.files.write(_one(number), array.leaf, _one(row), leaf)
            return number

        # XLA does not know of the file. Whoever reads the row later takes the new
        # handle, so the write is neither removed nor moved behind the read.
        number = jax.pure_callback(
            save, _NUMBER, array.number, row, leaf, vmap_method="broadcast_all"
        )
        return dataclasses.replace(array, number=number)

    def released(self, arrays: Arrays, outputs: PyTree) -> PyTree:
        if not arrays:
            return outputs

        def closed(numbers: list[np.ndarray], *_: object) -> None:
            # What steps save is in files of its own.
            for number in set(map(_one, numbers)):
                self.files.close(number)

        # The files may be closed when all outputs of the sweep have been computed.
        # A small part of each is enough, and less to copy to the host.
        ends = list(map(_proof, jax.tree.leaves(outputs)))
        io_callback(closed, None, [array.number for array in arrays], *ends)
        return outputs


@dataclasses.dataclass(frozen=True)
class _Handle:
    """Stands for the array of a leaf's slots.

    Attributes:
        number: The number of the run.
        leaf: The place of the leaf among those that are stored.
        aval: The type in which the leaf is stored.
    """

    number: Index
    leaf: int
    aval: Aval


jax.tree_util.register_dataclass(
    _Handle, data_fields=["number"], meta_fields=["leaf", "aval"]
)


def _proof(leaf: Value) -> Value:
    """A small array that depends on a leaf, to pass to a callback in its place."""
    if explicit_sharding(leaf) is not None:
        return jnp.sum(leaf)  # an axis that is split over devices is not sliced
    return leaf.reshape(-1)[:1]


def _one(numbers: np.ndarray) -> int:
    """The number that is the same for all examples of a batch."""
    return int(np.asarray(numbers).reshape(-1)[0])


def to_words(leaf: Value) -> Value:
    """The words of each number, along a new last axis, if it has 64 bits or more."""
    dtype = jax.typeof(leaf).dtype
    if not _is_long(dtype):
        return leaf
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # JAX cannot take the bits of complex numbers, but those of their parts.
        parts = jnp.stack([lax.real(leaf), lax.imag(leaf)], axis=-1)
        words = lax.bitcast_convert_type(parts, _WORD)
        return words.reshape(*parts.shape[:-1], 4)
    return lax.bitcast_convert_type(leaf, _WORD)


def of_words(words: Value, dtype: np.dtype) -> Value:
    """The numbers of a dtype, given their words."""
    if not _is_long(dtype):
        return words
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.bitcast_convert_type(words, dtype)
    parts = words.reshape(*words.shape[:-1], 2, 2)
    parts = lax.bitcast_convert_type(parts, np.dtype(np.float64))
    return lax.complex(parts[..., 0], parts[..., 1])


def _is_long(dtype: np.dtype) -> bool:
    # A `complex64` has 64 bits, but its parts are floats of 32 bits.
    return dtype.itemsize >= 8 and dtype != np.complex64
