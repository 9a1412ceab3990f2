"""Finds the line of the user's program, and the loop, that an operation comes from."""

import dataclasses
import functools
import importlib.util
import itertools
import linecache
import os
import re
import traceback
import warnings
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex

from .._compat import scan_counts

OUR_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep
JAX_FILES = os.path.dirname(jax.__file__) + os.sep


@functools.cache
def folders_of(*packages: str) -> tuple[str, ...]:
    """The folders of packages, or their files; without those that are not installed."""
    specs = [importlib.util.find_spec(name) for name in packages]
    origins = [spec.origin for spec in specs if spec is not None and spec.origin]
    is_package = lambda path: os.path.basename(path) == "__init__.py"
    return tuple(
        os.path.dirname(path) + os.sep if is_package(path) else path for path in origins
    )


# Frames of the stack between the user's line and the operation.
_OTHERS = folders_of("equinox", "jaxtyping", "beartype", "functools", "contextlib")
_BETWEEN = (OUR_FILES, JAX_FILES, *_OTHERS, "<frozen ", "<@beartype")


# The functions of JAX that make scans of others, by their names in a stack.
_MAKERS = ("fori_loop", "map")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def text(self) -> str:
        """The text of the line, empty if it cannot be read."""
        return linecache.getline(self.file, self.line).strip()


def place_of(source_info: Any, through: tuple[str, ...] = ()) -> Place | None:
    """The innermost line of the user's program that led to an equation, if known.

    `through` are more folders whose frames are not the user's.
    """
    return _place_in(frames_of(source_info), through)


def said(eqn: jex.JaxprEqn, around: jex.JaxprEqn | None = None) -> str:
    """An operation and where it is, in words."""
    place = place_of(eqn.source_info)
    if place is None and around is not None:
        place = place_of(around.source_info)
    return f"`{eqn.primitive.name}`{f' at {place}' if place else ''}"


# The layers of Equinox compute what users ask for; the rest of it is around functions.
_LAYERS = tuple(os.path.join(path, "nn", "") for path in folders_of("equinox"))


def is_between(file: str) -> bool:
    """Whether a file is around functions, and computes nothing itself."""
    return file.startswith(_BETWEEN) and not file.startswith(_LAYERS)


def _place_in(frames: Any, through: tuple[str, ...] = ()) -> Place | None:
    for frame in frames:
        if not frame.file_name.startswith(_BETWEEN + through):
            name = frame.function_name.rsplit(".", 1)[-1]
            return Place(frame.file_name, frame.line_num, name)
    return None


def owner_of(source_info: Any) -> str | None:
    """The layer that computes something, or else the function of the user, if known."""
    found = None
    for frame in frames_of(source_info):
        if frame.file_name.startswith(_LAYERS):
            found = frame  # a layer may have others in it
        elif not frame.file_name.startswith(_BETWEEN):
            found = found or frame
            break
    names = found.function_name.split(".") if found else []
    words = [name for name in names if name.isidentifier() and name != "__call__"]
    return words[-1] if words else None


class RuleAround(NamedTuple):
    """Whose rule an operation is in: of a `"custom_vjp"`, and where that is called."""

    kind: str
    place: Place | None


# Of the frame that JAX has between its functions and whoever calls them.
_BOUNDARY = "traceback_util.py"


def rule_around(source_info: Any) -> RuleAround | None:
    """The outermost function whose derivative rule does an operation, if any does."""
    frames, found = list(frames_of(source_info)), None
    for i, frame in enumerate(frames):
        kind, _, method = frame.function_name.partition(".")
        # Whatever a rule does is traced in this call of JAX's, there and back.
        if kind not in ("custom_vjp", "custom_jvp") or method != "__call__":
            continue
        files = (frame.file_name for frame in frames[i + 1 :])
        caller = next((x for x in files if not x.endswith(_BOUNDARY)), "")
        if not caller.startswith(OUR_FILES):
            found = RuleAround(kind, _place_in(frames[i:]))
    return found


_WHEN = r"rematted_computation|jvp\(|transpose\("


def is_later(scope: str, other: str) -> bool:
    """Whether what has one scope is on the way back of what has another one.

    A scope has the name stacks of an equation, and of those that it is in.

    >>> is_later("transpose(jvp())/f", "jvp(transpose(jvp()))/f")
    True
    """
    # The outermost derivative says most. What a `jax.checkpoint` runs again on the way
    # back is before the rest of that.
    when = {"rematted_computation": 0, "jvp(": 1, "transpose(": 2}
    orders = (map(when.__getitem__, re.findall(_WHEN, x)) for x in (scope, other))
    pairs = itertools.zip_longest(*orders, fillvalue=1)
    return next((a > b for a, b in pairs if a != b), False)


def place_now() -> Place | None:
    """The innermost line of the user's program that is being run, if known."""
    # JAX keeps a few frames for an equation, and there may be more of its own.
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if not code.co_filename.startswith(_BETWEEN):
            return Place(code.co_filename, line, code.co_name)
    return None


# What Python notes down of warnings, for each thing that is told of.
_told_of: dict[object, dict[Any, Any]] = {}


def warn_once(text: str, about: object = ()) -> None:
    """Warns of something at the user's line: once, or once for each line."""
    # How many frames of JAX are between the user's call and this one, who knows?
    here = place_now() or Place("<unknown>", 0, "")
    registry = _told_of.setdefault((text, about or here), {})
    # Python tells each line once.
    if any(isinstance(key, tuple) for key in registry):
        registry[text, UserWarning, here.line] = 1
    warnings.warn_explicit(text, UserWarning, here.file, here.line, registry=registry)


def frames_of(source_info: Any) -> Any:
    """The frames of the stack that led to an equation, the innermost first."""
    traceback = source_info.traceback
    return () if traceback is None else traceback.frames


def loop_of_jax(eqn: jex.JaxprEqn) -> str:
    """What has made a loop: `scan`, `map`, `fori_loop` or `while_loop`."""
    if eqn.primitive.name == "while":
        return "while_loop"
    for frame in frames_of(eqn.source_info):
        if not frame.file_name.startswith(JAX_FILES):
            break
        name = frame.function_name.rsplit(".", 1)[-1]
        if name in _MAKERS:
            return name
    _, carry = scan_counts(eqn.params)
    return "scan" if carry else "map"


# The scope of what a `Fit` runs in a gradient; it is no loop.
FITTED = "eqloop_Fit"


def loop_scope(name: str) -> Any:
    """The scope for the loop of a transform; it also shows in profiles."""
    return jax.named_scope(f"eqloop.{name}")


def loop_name(name_stack: Any) -> str | None:
    """The transform whose loop an equation is, from its scope; `None` if it is none.

    >>> loop_name("train/transpose(jvp(eqloop.Scan))/jvp()")
    'Scan'
    """
    scopes = re.findall(r"[^()/]+(?=[)/]|$)", str(name_stack))
    is_loop = scopes and scopes[-1].startswith("eqloop.")
    return scopes[-1].removeprefix("eqloop.") if is_loop else None
