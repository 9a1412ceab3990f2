"""Arrays on disk that are written a segment at a time: outputs and cotangents of `xs`.

They are written without being mapped into memory. Pages of a mapping that were written
count as memory of the process, and a full disk would end it with a signal.
"""

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .._arrays import raw_bytes
from ._disk import ASIDE, explaining_errors, npy_header, put, write_bytes


@dataclasses.dataclass(frozen=True)
class RowFile:
    """A `.npy` file of an array that is written piece by piece.

    Attributes:
        shape: The shape of the whole array.
        dtype: Its dtype, as JAX has it. One that NumPy does not know (`bfloat16`) is in
            the file as unsigned integers of that size.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def _header(self) -> bytes:
        return npy_header(self.shape, storable(self.dtype))

    @property
    def _size(self) -> int:
        return len(self._header) + math.prod(self.shape) * self.dtype.itemsize

    def make(self) -> None:
        """Makes the file, unless it is there: nothing but zeros, which take no room."""
        if self.path.exists():
            self.check()
            return
        aside = self.path.with_name(ASIDE + self.path.name)
        with explaining_errors("written", self.path):
            write_bytes(aside, [self._header])
            os.truncate(aside, self._size)
            put(aside, self.path)

    def check(self) -> None:
        """Checks that the file is as long as it has to be, and of this array."""
        with explaining_errors("read", self.path):
            size = self.path.stat().st_size
            with open(self.path, "rb") as file:
                begins = file.read(len(self._header))
        if size != self._size or begins != self._header:
            raise ValueError(
                f"Resumable: {self.path} is damaged: it should have {self._size} bytes "
                f"and the header of a {self.dtype} array of shape {self.shape}, but it "
                f"has {size} bytes. Restore it, or remove the directory to start anew."
            )

    def write(self, pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Writes pieces of the array, each from where it starts, and waits for it."""
        with explaining_errors("written", self.path):
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                for start, piece in pieces:
                    self._write_piece(descriptor, start, piece)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def read(self) -> np.ndarray:
        """The array: a memory map of the file, if there is anything in it."""
        if not math.prod(self.shape):
            return np.zeros(self.shape, self.dtype)
        with explaining_errors("read", self.path):
            # Not in place: the file is what a run goes on from.
            array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return array.view(self.dtype)

    def _write_piece(
        self, descriptor: int, start: np.ndarray, piece: np.ndarray
    ) -> None:
        if not piece.size:
            return
        # The piece is contiguous in the file from this axis on.
        whole = [i for i, n in enumerate(self.shape) if piece.shape[i] != n]
        first = max(whole, default=0)
        strides = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        runs = np.reshape(piece, (math.prod(piece.shape[:first]), -1))
        for index, run in zip(np.ndindex(*piece.shape[:first]), runs, strict=True):
            place = [*np.add(start[:first], index), *start[first:]]
            at = sum(int(i) * n for i, n in zip(place, strides, strict=True))
            at, left = len(self._header) + at * self.dtype.itemsize, raw_bytes(run)
            while left:
                written = os.pwrite(descriptor, left, at)
                left, at = left[written:], at + written


def storable(dtype: np.dtype) -> np.dtype[Any]:
    """The dtype that stands for a dtype in a file.

    >>> import ml_dtypes
    >>> storable("float32"), storable(ml_dtypes.bfloat16)
    (dtype('float32'), dtype('uint16'))
    """
    dtype = np.dtype(dtype)
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")
