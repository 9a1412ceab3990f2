"""`run.json`: what a directory holds the run of, and whether it is the one at hand."""

import dataclasses
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, get_origin

from .._compat import jax_version
from .._version import __version__
from ._disk import ASIDE, LOCK, explaining_errors, write_json

FORMAT, VERSION = "eqloop.Resumable", 3
RECORD = "run.json"


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"eqloop": __version__, "jax": jax_version(), "python": python}


# What is compared by names, and which versions have to be the same for that: another
# one traces other programs, and compiles the same code to something else.
_COMPARED = {
    "settings": (),
    "arguments": (),
    "constants": ("eqloop", "jax"),
    "functions": ("eqloop", "python"),
}


_CALL_ALIKE = "Call it as it was called, or give this run a directory of its own."


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run was called with, in words.

    Attributes:
        settings: Settings of the run, the scan and JAX.
        arguments: For each leaf what it is, and a digest of it.
        constants: The same of the arrays that functions close over.
        functions: Digests of the functions that are called from Python.
        program: The equations of a segment, with digests; see `program_in_words`.
        files: For each array in a file of its own, what it is and where it is stacked.
        written_by: By which versions it was written.
        loss: Of a gradient, a digest of the loss; empty if there is none.
    """

    length: int
    settings: Mapping[str, Any]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    functions: Mapping[str, Any]
    program: list[str]
    files: list[dict[str, Any]]
    written_by: Mapping[str, str] = dataclasses.field(default_factory=_versions)
    loss: str = ""

    def write(self, path: Path) -> None:
        """Writes it."""
        head = {"format": FORMAT, "version": VERSION}
        write_json(path, head | dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The one in a file; `None` if there is no file."""
        if not path.exists():
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
        of = lambda kind: get_origin(kind) or kind
        kinds = {field.name: of(field.type) for field in dataclasses.fields(cls)}
        lacks = [n for n, kind in kinds.items() if not isinstance(content.get(n), kind)]
        by = content.get("written_by") or {}
        lacks += [f"written_by.{name}" for name in _versions() if name not in by]
        is_line = lambda x: re.match(r"\d+ \w+ ", str(x))
        lacks += [] if all(map(is_line, content.get("program") or ())) else ["program"]
        if lacks:
            raise ValueError(
                f"Resumable: {path} is damaged: it has no {', '.join(lacks)}. "
                f"Restore it, or remove {path.parent} to start anew."
            )
        return cls(**{name: content[name] for name in kinds})

    @classmethod
    def of_directory(cls, directory: Path) -> Self | None:
        """The one of the run in a directory; `None` if there is nothing in it yet."""
        found = cls.read(directory / RECORD)
        if found is None:
            _refuse_foreign(directory)
        return found

    def check(
        self, now: Self, folder: Path, what: str = "run", advice: str = _CALL_ALIKE
    ) -> None:
        """Checks that it is of the run at hand, or of the gradient."""
        lines = list(_differences(self, now)) or list(_in_programs(self, now))
        if lines:
            listing = "\n".join(lines)
            raise ValueError(
                f"Resumable: {folder} holds another {what}, which differs in\n"
                f"{listing}\nNothing in it was changed. {advice}"
            )


def _differences(old: RunRecord, now: RunRecord) -> Iterator[str]:
    if old.length != now.length:
        yield f"  length: {old.length} there, {now.length} now"
    # Another process may have compiled the same loss to something else, by trials on a
    # GPU, so that the cotangents differ by rounding.
    is_same_loss = old.loss and old.loss == now.loss
    for part, versions in _COMPARED.items():
        if part == "arguments" and is_same_loss:
            continue
        one, other = getattr(old, part), getattr(now, part)
        for name in one | other if _same_versions(old, now, *versions) else ():
            there, here = one.get(name, "nothing"), other.get(name, "nothing")
            if there != here:
                yield f"  {name}: {_in_words(there, here)}"


def _same_versions(old: RunRecord, now: RunRecord, *of: str) -> bool:
    return all(old.written_by[name] == now.written_by[name] for name in of)


def _in_words(there: Any, here: Any) -> str:
    both = isinstance(there, list) and isinstance(here, list)
    if both and there[:1] == here[:1]:
        return f"{here[0]}, other values"
    first = lambda words: words[0] if words and isinstance(words, list) else words
    return f"{first(there)} there, {first(here)} now"


def _in_programs(old: RunRecord, now: RunRecord) -> Iterator[str]:
    """The innermost of the first equations that differ."""
    pairs, found = zip(old.program, now.program, strict=False), None
    for pair in pairs if _same_versions(old, now, "eqloop", "jax") else ():
        (depth, there, was), (other_depth, here, text) = (x.split(" ", 2) for x in pair)
        if found is not None and min(int(depth), int(other_depth)) <= found[0]:
            break
        if there != here:
            found = int(depth), was, text
    if found is not None:
        _, was, text = found
        is_like = was.partition(" at ")[0] == text.partition(" at ")[0]
        differs = f"{was} there, {text} now"
        yield f"  f: {f'{text}, other numbers or settings' if is_like else differs}"


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
            f"Resumable: {directory} holds something else: it has no {RECORD}, but "
            f"{others[0]!r}. Nothing in it was changed. Give this run a directory of "
            f"its own, which need not exist yet."
        )
