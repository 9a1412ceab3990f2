"""`run.json`: what a directory holds the run of, and whether it is the one at hand."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from .._compat import jax_version
from .._version import __version__
from ._disk import ASIDE, explaining_errors, write_json
from ._in_words import python_version
from ._lock import LOCK

FORMAT, VERSION = "eqloop.Resumable", 2
_RECORD = "run.json"

# What is compared, and what an error says of it.
_COMPARED = ("settings", "arguments", "code")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run was called with, in words.

    Attributes:
        settings: Settings of the run, the scan and JAX.
        arguments: For each leaf what it is, and a digest of it.
        ys: For each array that the steps return, what it is and where it is stacked.
    """

    length: int
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    code: Mapping[str, Any]
    ys: list[dict[str, Any]]

    def write(self, directory: Path) -> None:
        """Writes it."""
        by = {"eqloop": __version__, "jax": jax_version(), "python": python_version()}
        head = {"format": FORMAT, "version": VERSION, "written_by": by}
        write_json(directory / _RECORD, head | dataclasses.asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """The one in a directory; `None` if there is nothing in it yet."""
        path = directory / _RECORD
        if not path.exists():
            _refuse_foreign(directory)
            return None
        content = read_json(path)
        found = content.get("format"), content.get("version")
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"Resumable: {path} is of format {found[0]!r}, version {found[1]!r}; "
                f"this eqloop {__version__} reads {FORMAT!r}, version {VERSION}. "
                f"Nothing in it was changed. Go on with the eqloop that wrote it, or "
                f"give this run a directory of its own."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in names if name not in content]:
            raise ValueError(
                f"Resumable: {path} is damaged: it has no {', '.join(missing)}. "
                f"Restore it, or remove the directory to start anew."
            )
        # Another Python compiles the same code to something else.
        if content["written_by"]["python"] != python_version():
            content["code"] = None
        return cls(**{name: content[name] for name in names})

    def check(self, now: Self, directory: Path) -> None:
        """Checks that it is of the run at hand."""
        lines = list(_differences(self, now))
        if lines:
            listing = "\n".join(lines)
            raise ValueError(
                f"Resumable: {directory} holds another run, which differs in\n"
                f"{listing}\nNothing in it was changed. Call it as it was called, or "
                f"give this run a directory of its own."
            )


def _differences(old: RunRecord, now: RunRecord) -> Iterator[str]:
    if old.length != now.length:
        yield f"  length: {old.length} there, {now.length} now"
    for part in _COMPARED:
        one, other = getattr(old, part), getattr(now, part)
        if one is None:
            continue
        for name in one | other:
            there, here = one.get(name, "nothing"), other.get(name, "nothing")
            if there != here:
                yield f"  {name}: {_in_words(there, here)}"


def _in_words(there: Any, here: Any) -> str:
    both = isinstance(there, list) and isinstance(here, list)
    if both and there[0] == here[0]:
        same = there[0]
        return f"{same}, {'changed' if same.startswith('code') else 'other values'}"
    first = lambda words: words[0] if isinstance(words, list) else words
    return f"{first(there)} there, {first(here)} now"


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file."""
    with explaining_errors("read", path):
        text = path.read_bytes()
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(
            f"Resumable: {path} is damaged: it is not a JSON object. Restore it, or "
            f"remove the directory to start anew."
        )
    return content


def _refuse_foreign(directory: Path) -> None:
    if not directory.exists():
        return
    with explaining_errors("read", directory):
        names = sorted(os.listdir(directory))
    others = [name for name in names if name != LOCK and not name.startswith(ASIDE)]
    if others:
        raise ValueError(
            f"Resumable: {directory} holds something else: it has no {_RECORD}, but "
            f"{others[0]!r}. Nothing in it was changed. Give this run a directory of "
            f"its own, which need not exist yet."
        )
