"""Files that hold carries: written behind, read ahead, and never left over. No JAX.

The files have no names, so nothing is left behind however a process ends. Each run of a
loop has its own, one for each leaf of the carry.
"""

import contextlib
import itertools
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import numpy as np

from ...._types import PyTree, Value

# How many rows may wait to be written, which bounds the memory of a run.
_MOST_WAITING = 2


class SpillFiles:
    """The files of all runs that are under way.

    Args:
        directory: Where the files are.
        owner: The transform that they belong to, for error messages.
    """

    def __init__(self, directory: str, owner: str = "Spill"):
        self._directory, self._owner = directory, owner
        self._runs: dict[int, _FilesOfRun] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def open(self, leaves: int) -> int:
        """Makes the files of a run, and returns its number."""
        with self._lock, self._explained():
            number = next(self._numbers)
            self._runs[number] = _FilesOfRun(self._directory, leaves)
        return number

    def write(self, number: int, leaf: int, row: int, array: Value) -> None:
        """Has a row of a leaf written, by another thread."""
        self._tried(number, lambda run: run.write(leaf, row, array))

    def read(self, number: int, leaf: int, row: int) -> Value:
        """A row of a leaf, as it was last written."""
        return self._tried(number, lambda run: run.read(leaf, row))

    def close(self, number: int) -> None:
        """Deletes the files of a run. It may be called more than once."""
        with self._lock:
            run = self._runs.pop(number, None)
        # Outside of the lock, as this waits for the thread of the run.
        if run is not None:
            run.close()

    @property
    def count(self) -> int:
        """How many runs are under way."""
        return len(self._runs)

    def _tried(self, number: int, use: Callable[["_FilesOfRun"], PyTree]) -> PyTree:
        try:
            with self._explained():
                return use(self._runs[number])
        except OSError:
            self.close(number)
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of an error what could not be done, and what to do instead."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"{self._owner}: a carry could not be stored in {self._directory!r}: "
                f"{error.strerror or error}. Store fewer carries, in a lower precision "
                f"(`el.Cast`), or in a directory with more room."
            ) from error


class _FilesOfRun:
    """The files of one run. One thread writes and reads, in the order of the calls."""

    def __init__(self, directory: str, leaves: int):
        self._files = [_LeafFile(directory) for _ in range(leaves)]
        self._worker = ThreadPoolExecutor(1, "eqloop-spill")
        self._waiting: deque[Future[None]] = deque()
        self._ahead: dict[int, tuple[int, Future[Any]]] = {}
        # The leaves of a carry may be written by several threads of the program.
        self._lock = threading.Lock()

    def write(self, leaf: int, row: int, array: Value) -> None:
        with self._lock:
            # A row that was read ahead is out of date when it is written again.
            if self._ahead.get(leaf, (None,))[0] == row:
                del self._ahead[leaf]
            # A copy, as JAX may use the memory of the array again after the callback.
            job = self._worker.submit(self._files[leaf].put, row, np.array(array))
            self._waiting.append(job)
            # This holds the program back to the speed of the disk. Copies of rows would
            # fill the memory otherwise.
            self._wait_until_left(_MOST_WAITING)

    def read(self, leaf: int, row: int) -> Value:
        with self._lock:
            # The only thread keeps the order in any case. But an error of a write
            # should be raised before its row is read.
            self._wait_until_left(0)
            at, job = self._ahead.pop(leaf, (None, None))
            if job is None or at != row:
                job = self._worker.submit(self._files[leaf].get, row)
            array = job.result()
            if row:  # on the way back, the one before it is next
                ahead = self._worker.submit(self._files[leaf].get, row - 1)
                self._ahead[leaf] = row - 1, ahead
            return array

    def close(self) -> None:
        # Nobody asks for rows that were read ahead but not yet taken.
        self._worker.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()

    def _wait_until_left(self, count: int) -> None:
        """Waits until no more than so many rows are still to be written."""
        while len(self._waiting) > count:
            self._waiting.popleft().result()


class _LeafFile:
    """The rows of one leaf, all of one type and shape."""

    def __init__(self, directory: str):
        # Not in a `with` statement: the file stays open while the run lasts.
        make = tempfile.TemporaryFile
        self._file: IO[bytes] = make(dir=directory, buffering=0)
        self._like: Any = None
        self._rows: set[int] = set()

    def put(self, row: int, array: Value) -> None:
        if self._like is None:
            self._like = np.empty((0, *array.shape), array.dtype)
        # As bytes, since `write` may take only some of them, and a slice is then left.
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.seek(row * array.nbytes)
        while data:
            data = data[self._file.write(data) :]
        self._rows.add(row)

    def get(self, row: int) -> Value:
        """The row; `None` if it was never written, as it may be if it is read ahead."""
        if row not in self._rows:
            return None
        array = np.empty(self._like.shape[1:], self._like.dtype)
        data = array.reshape(-1).view(np.uint8).data
        self._file.seek(row * array.nbytes)
        while data:
            count = self._file.readinto(data)  # pyright: ignore
            if not count:
                raise OSError("the file ends too early")
            data = data[count:]
        return array

    def close(self) -> None:
        self._file.close()
