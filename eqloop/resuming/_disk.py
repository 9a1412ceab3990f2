"""Writes that are either made or not: what was on disk before is never touched.

Files are written aside, brought to the disk (`fsync`), and only then renamed into
place. A folder is renamed as a whole, so that its files come to be there all at once.
The folder above is brought to the disk as well, or a crash of the machine could undo
the renaming.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .._arrays import raw_bytes
from ._processes import is_leader, wait_for_all

# What starts so was being written when a process died.
ASIDE = ".writing-"
# The file that a run holds, so that it has its directory alone.
LOCK = "lock"


@contextlib.contextmanager
def explaining_errors(doing: str, path: Path) -> Iterator[None]:
    """Says of an error of the disk what was being done, and that nothing is lost."""
    # The error is of the class of the one that was raised.
    try:
        yield
    except OSError as error:
        raise OSError(
            error.errno,
            f"Resumable: {path} could not be {doing}: {error.strerror or error}. What "
            f"was finished before is on disk and was not changed. Once this is fixed, "
            f"call it again with the same arguments, and it continues from there.",
        ) from error


def make_folder(path: Path) -> None:
    """Makes a folder, and those above it, unless they are there."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    with explaining_errors("made", path):
        for folder in reversed(missing):
            os.mkdir(folder)
            _sync(folder.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file, so that it is there as a whole or not at all."""
    aside = path.with_name(ASIDE + path.name)
    with explaining_errors("written", path):
        write_bytes(aside, [json.dumps(content, indent=1).encode()])
        put(aside, path)


def begin_folder(path: Path) -> Path:
    """Makes a folder for what is to be a folder, beside its place."""
    aside = path.with_name(ASIDE + path.name)
    if is_leader():
        with explaining_errors("written", path):
            remove(aside)
            os.mkdir(aside)
    wait_for_all(f"{aside} was made")
    return aside


def finish_folder(aside: Path, path: Path) -> None:
    """Puts a folder into its place, with all that was written to it."""
    with explaining_errors("written", path):
        _sync(aside)
        put(aside, path)


def put(aside: Path, path: Path) -> None:
    """Puts what was written aside into its place."""
    os.replace(aside, path)
    _sync(path.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder: it is gone at once, and its files with it."""
    aside = path.with_name(ASIDE + path.name)
    with explaining_errors("removed", path):
        remove(aside)
        os.replace(path, aside)
        remove(aside)


def remove_leftovers(folder: Path) -> None:
    """Removes what was being written when an earlier process died."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(ASIDE):
                with explaining_errors("removed", path):
                    remove(path)


def remove(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        os.unlink(path)


def write_bytes(path: Path, parts: Any) -> None:
    """Writes a new file, and waits until it is on the disk."""
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """The first bytes of a `.npy` file; the numbers come after them, in C's order."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    content = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(header, content)
    return header.getvalue()


def checksum(array: np.ndarray) -> int:
    """A number that is another one if the array is damaged."""
    return zlib.crc32(raw_bytes(array))


def _sync(folder: Path) -> None:
    """Brings to the disk which files a folder has."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# One run in a directory at a time.


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other runs out of a directory."""
    # The system opens the lock when the process ends, in whichever way it does.
    import fcntl  # not there on Windows, where all else is to be importable

    path = directory / LOCK
    with explaining_errors("opened", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Resumable: another run is in {directory}: {_holder(descriptor)}. "
                f"Wait until it has ended, or give each run a directory of its own."
            ) from None
        with explaining_errors("written", path):
            os.ftruncate(descriptor, 0)
            who = {"process": os.getpid(), "host": socket.gethostname()}
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        who = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {who['process']} on {who['host']}"
    except (ValueError, KeyError):  # it has just been opened
        return "a process that has just started"
