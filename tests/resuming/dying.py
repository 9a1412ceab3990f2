"""A process that dies at the n-th thing it does to the disk, without being one."""

import contextlib
import errno
import os
import shutil
from typing import Any

import pytest

from eqloop.resuming import _disk, _row_file

# What changes what is on the disk, and what waits for it.
_OPERATIONS = ("fsync", "mkdir", "pwrite", "replace", "truncate", "unlink")


class Killed(BaseException):
    """As if by `kill -9`: nothing that handles errors handles it."""


class Disk:
    """Counts what is done to the disk, and has the process die on the way.

    Args:
        dies_at: At the how manieth operation; never, if it is `None`. Of what is
            written then, half is written.
    """

    def __init__(self, dies_at: int | None = None) -> None:
        self.count, self.dies_at = 0, dies_at

    def happens(self) -> bool:
        """Counts an operation, and tells whether it is to be made in half."""
        self.count += 1
        if self.dies_at is not None and self.count > self.dies_at:
            raise Killed
        return self.count == self.dies_at

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        return call if name not in _OPERATIONS else self._counted(name, call)

    def _counted(self, name: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            if self.happens():
                if name == "pwrite":
                    descriptor, data, at = args
                    call(descriptor, data[: len(data) // 2], at)
                raise Killed
            # The disk of a test has time: nobody pulls the plug.
            return None if name == "fsync" else call(*args)

        return counted

    def rmtree(self, path: Any) -> None:
        """Removes a folder; in half, a file of it."""
        if self.happens():
            next(path.iterdir()).unlink()
            raise Killed
        shutil.rmtree(path)

    @contextlib.contextmanager
    def file(self, path: Any, mode: str) -> Any:
        """Opens a file, of which each part that is written counts."""
        with open(path, mode) as file:
            if mode == "wb":
                file = _File(file, self)
            yield file


class Full(Disk):
    """A disk on which there is room for so many operations."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        super().__init__()
        self.room, self.code = room, code

    def happens(self) -> bool:
        self.count += 1
        if self.count > self.room:
            raise OSError(self.code, os.strerror(self.code))
        return False


class _File:
    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> None:
        if self._disk.happens():
            self._file.write(data[: len(data) // 2])
            raise Killed
        self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def on(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    """Has everything of the library that touches the disk go through this one."""
    for module in (_disk, _row_file):
        patch.setattr(module, "os", disk)
        patch.setattr(module, "open", disk.file, raising=False)
    patch.setattr(_disk, "shutil", disk)
