"""One run in a directory at a time."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from ._disk import explaining_errors

LOCK = "lock"


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
