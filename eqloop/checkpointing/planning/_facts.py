"""What was found out: remembered in the process, and in a file if there is one.

A plan follows from facts alone: what short loops take, in time and memory, and what the
programs of layouts take. Whoever has the facts makes the same plan, and compiles none.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from ..._compat import jax_version, jaxlib_version
from ..._device import compiler_settings, planning_device
from ..._programs import digest_of, warn_once
from ..._tracebacks import border

# Numbers by their names, such as `bytes`, and text.
Fact: TypeAlias = Mapping[str, Any]

_FILE_FORMAT = 2
_IN_CACHE = "eqloop.json"
_guard = threading.RLock()
_known: dict[str, Fact] = {}
_file_in_use: list[pathlib.Path] = []
_caches_read: set[pathlib.Path] = set()
_told: set[str] = set()


@border
def measurements(
    path: str | os.PathLike[str] | None,
) -> contextlib.AbstractContextManager[object]:
    """Keeps what is found out for plans in a file, for this process and later ones.

    A [`Budget`][eqloop.Budget] measures how long a step takes on this device, and
    compiles a few plans for their memory, once in a process. With a file, it also
    writes what it has found there, and does not ask again for what the file contains.
    So it makes the same plans each time, in every process that reads the file, and
    compiles nothing for them. When several processes run one program, they take times
    only from the file, and estimate the others; write the file with one process first.

    If JAX's compilation cache is on (`jax_compilation_cache_dir`), there is such a file
    beside it, `eqloop.json`, without being asked for.

    Args:
        path: The file. It is made if it does not exist. `None` goes back to
            remembering in the process alone, and beside the compilation cache.

    Returns:
        A context manager, which need not be entered: the file is in use from the call
        on. At the end of a `with`, what was in use before is in use again.

    Raises:
        TypeError: If it is not a path.
        ValueError: If there is something else in the file, or no such folder. A file
            of an earlier version is begun anew.

    Examples:
        >>> import pathlib, tempfile
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> folder = tempfile.TemporaryDirectory()
        >>> with el.measurements(pathlib.Path(folder.name) / "times.json"):
        ...     scan = el.Scan(lambda h, x: (h + x, h), schedule=el.Budget("1MiB"))
        ...     plan = scan.plan(0.0, jnp.ones(100))
        >>> folder.cleanup()
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"measurements: `path` must be a path or None, not {path!r} of type "
            f"{type(path).__name__}."
        )
    if path is not None and not (file := pathlib.Path(path).absolute()).parent.is_dir():
        raise ValueError(
            f"measurements: there is no folder {str(file.parent)!r} for the file "
            f"{file.name!r}. Make it, or pass another path."
        )
    with _guard, contextlib.ExitStack() as at_the_end:
        found = {} if path is None else _read(pathlib.Path(path))
        at_the_end.callback(_known.update, dict(_known))
        at_the_end.callback(measurements, *(_file_in_use or [None]))
        for each in (_known, _caches_read, _told):
            each.clear()
        _known.update(found)
        _file_in_use[:] = [] if path is None else [pathlib.Path(path)]
        return at_the_end.pop_all()


def recall(key: str) -> Fact | None:
    """What was found out under a key, if anything was."""
    with _guard:
        _file_beside_cache()
        return _known.get(key)


def remember(found: Mapping[str, Fact]) -> None:
    """Remembers what was found out, under its keys."""
    with _guard:
        _known.update(found)
        if _file_in_use:
            with _going_on(OSError, ValueError):
                _write(_file_in_use[0])
        elif (path := _file_beside_cache()) is not None:
            # A cache that cannot be written to is none, as it is for JAX.
            with _going_on(ValueError), contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path)


@contextlib.contextmanager
def _going_on(*kinds: type[Exception]) -> Iterator[None]:
    """Says once what is wrong with a file: plans are made all the same."""
    try:
        yield
    except kinds as error:
        # A full disk, say, or somebody has put something else into its place.
        text = f"measurements: {error}." if isinstance(error, OSError) else str(error)
        if text not in _told:
            _told.add(text)
            warn_once(f"{text} What is found out is not kept.")


def key_of(parts: Iterable[object]) -> str:
    """A name for what is found out, the same in every process on such a machine."""
    about = jax_version(), jaxlib_version(), _package(), repr(compiler_settings())
    return digest_of(*about, os.cpu_count(), planning_device().key, *parts)


@functools.cache
def _package() -> str:
    """What this package is: of another one, programs take other memory and time."""
    files = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _file_beside_cache() -> pathlib.Path | None:
    """The file beside the compilation cache, if that is on. It is read once."""
    config: Any = jax.config  # its settings have no types
    folder = config.jax_compilation_cache_dir
    is_on = config.jax_enable_compilation_cache
    # A cache may also be a bucket, `gs://...`, which is no directory here.
    if _file_in_use or not is_on or not folder or "://" in str(folder):
        return None
    path = pathlib.Path(folder) / _IN_CACHE
    if path not in _caches_read:
        _caches_read.add(path)
        with _going_on(ValueError), contextlib.suppress(OSError):
            _known.update({**_read(path), **_known})
    return path


def _read(path: pathlib.Path) -> dict[str, Fact]:
    """What is in a file: nothing, if it is of an earlier version or is not there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if 0 < (found := content["eqloop measurements"]) < _FILE_FORMAT:
            return {}
        if found == _FILE_FORMAT:
            number = lambda x: x if isinstance(x, str) else float(x)
            facts = content["facts"].items()
            return {k: {n: number(x) for n, x in of.items()} for k, of in facts}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ValueError(
        f"measurements: {str(path)!r} does not hold measurements of this version of "
        f"eqloop. Pass another path, or remove that file."
    )


def _write(path: pathlib.Path) -> None:
    for key, fact in _read(path).items():
        _known.setdefault(key, fact)
    content = {"eqloop measurements": _FILE_FORMAT, "facts": _known}
    # Written to a file of another name and then renamed: no other process finds half of
    # it.
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    text = json.dumps(content, indent=1, sort_keys=True)
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
