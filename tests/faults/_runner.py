"""Runs tests in a copy of the checkout, in which one file may have a fault.

Each run is a process of its own, forked after what takes long to import has been, and
before JAX has started a backend. Compiled programs are kept on disk from one run to the
next: JAX finds them by their text, so a program that a fault changes is compiled anew.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build")
_OPTIONS = ("-n", "0", "-q", "-x", "-p", "no:cacheprovider", "--no-header")
# What the tests import, but for the library itself.
SLOW_TO_IMPORT = ("equinox", "hypothesis", "jax.numpy", "jax.experimental.hijax")


class Only:
    """A plugin for pytest: runs these tests and no others, in this order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.place = {test: i for i, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves the others out."""
        chosen = [item for item in items if item.nodeid in self.place]
        items[:] = sorted(chosen, key=lambda item: self.place[item.nodeid])


class Checkout:
    """A copy of a checkout, where tests are run."""

    def __init__(
        self, root: Path, to: Path, imports: Sequence[str] = SLOW_TO_IMPORT
    ) -> None:
        self.root, self.log = to / "checkout", to / "log"
        shutil.copytree(root, self.root, ignore=_NOT_COPIED)
        os.environ["PYTHONPATH"] = str(self.root)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(to / "compiled")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        for name in imports:
            __import__(name)

    def run(
        self,
        arguments: Sequence[str],
        *,
        package: str = "eqloop",
        plugins: Sequence[Any] = (),
        seconds: float = float("inf"),
    ) -> bool:
        """Whether pytest passes. It fails if it takes longer than it may."""
        child = os.fork()
        if not child:
            self._become(package, [*_OPTIONS, *arguments], plugins)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return status == 0
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False

    def passes_with(
        self, file: str, text: str, tests: Sequence[str], **options: Any
    ) -> bool:
        """Whether tests pass while a file has another text."""
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        with self.changed(file, text):
            return self.run(list(files), plugins=[Only(tests)], **options)

    @contextlib.contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """The copy, while a file has another text."""
        path = self.root / file
        before, times = path.read_text(), path.stat()
        # Python keeps what it compiled of the file without a fault, and of no other.
        path.write_text(text)
        sys.dont_write_bytecode = True
        try:
            yield
        finally:
            path.write_text(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _become(
        self, package: str, arguments: list[str], plugins: Sequence[Any]
    ) -> None:
        """Runs pytest in place of this process."""
        code = 1
        try:
            os.setsid()
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.root)
            sys.path[0] = str(self.root)
            for name in list(sys.modules):
                if name.partition(".")[0] in ("tests", package):
                    del sys.modules[name]
            library = __import__(package)
            if not Path(library.__file__).is_relative_to(self.root):
                raise ImportError(f"{library.__file__} is not in the copy")
            code = int(pytest.main(arguments, plugins=plugins))
        finally:
            os._exit(code)
