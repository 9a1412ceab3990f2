"""What was measured: remembered in the process, and in a file if there is one."""

import hashlib
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterable, Mapping

from ..._compat import jax_version
from ..._device import planning_device

_FILE_FORMAT = 1
_guard = threading.Lock()
_times_known: dict[str, float] = {}
_file_in_use: list[pathlib.Path] = []


def measurements(path: str | os.PathLike[str] | None) -> None:
    """Keeps what is measured for plans in a file, for this process and later ones.

    A [`Budget`][eqloop.Budget] measures how long a step takes on this device, once in
    a process. With a file, it also writes the times there, and does not measure again
    what the file contains. So it makes the same plans each time, in every process that
    reads the file. When several processes run one program, they take times only from
    the file, and estimate the others; write the file with one process first.

    Args:
        path: The file. It is made if it does not exist. `None` goes back to
            remembering in the process alone.

    Raises:
        TypeError: If it is not a path.
        ValueError: If there is something else in the file.

    Examples:
        >>> import pathlib, tempfile
        >>> import eqloop as el
        >>> folder = tempfile.TemporaryDirectory()
        >>> el.measurements(pathlib.Path(folder.name) / "times.json")
        >>> el.measurements(None)
        >>> folder.cleanup()
    """
    if path is not None and not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"measurements: `path` must be a path or None, not {path!r} of type "
            f"{type(path).__name__}."
        )
    with _guard:
        found = {} if path is None else _read_times(pathlib.Path(path))
        _times_known.clear()
        _times_known.update(found)
        _file_in_use[:] = [] if path is None else [pathlib.Path(path)]


def lookup(key: str) -> float | None:
    """What was measured under a key, if anything was."""
    with _guard:
        return _times_known.get(key)


def remember(found: Mapping[str, float]) -> None:
    """Remembers what was measured."""
    with _guard:
        _times_known.update(found)
        if _file_in_use:
            _write_times(_file_in_use[0])


def key_of(parts: Iterable[object]) -> str:
    """A name for what is measured, the same in every process of this machine's kind."""
    about = [jax_version(), planning_device().key, *parts]
    # What a function is called stays the same; where it lies in memory does not.
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(map(str, about)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_times(path: pathlib.Path) -> dict[str, float]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["eqloop measurements"] == _FILE_FORMAT:
            return {str(k): float(v) for k, v in content["nanoseconds"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ValueError(
        f"measurements: {str(path)!r} does not hold measurements of this version of "
        f"eqloop. Pass another path, or remove that file."
    )


def _write_times(path: pathlib.Path) -> None:
    for key, value in _read_times(path).items():
        _times_known.setdefault(key, value)
    content = {
        "eqloop measurements": _FILE_FORMAT,
        "nanoseconds": dict(sorted(_times_known.items())),
    }
    # Written to a file of another name and then renamed: no other process finds half of
    # it.
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    aside.replace(path)
