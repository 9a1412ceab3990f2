"""Tracebacks without the frames of this library, as JAX leaves out its own.

An error ends at the line of the user that it is about: where the user's function fails,
or else where the library was called. `jax.config.jax_traceback_filtering` says how much
is left out, of JAX and of this library alike; with `"off"` nothing is.
"""

import builtins
import functools
import itertools
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax
from jax.extend import source_info_util

from ._signatures import check_fits

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OWN = ("eqloop", "jaxtyping", "beartype")
# They are left out where this library calls them, and not where the user does.
_CALLED = ("jax", "equinox", "contextlib", "functools", "dataclasses")
# Unless a check says so, these are mistakes of ours, and are to be seen where.
_MISTAKES = (AssertionError, AttributeError, LookupError, NameError)
# What a check says begins with the name of what was called.
_TOLD = re.compile(r"[A-Z]\w+: ")


def border(f: _Function) -> _Function:
    """A function that users call: errors leave it without our frames."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return _called(f, args, kwargs)
        except Exception as error:
            _leave_out_frames(error)
            _leave_out_sources(error)
            raise

    return cast(_Function, call)


def _called(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    __tracebackhide__ = True
    try:
        return f(*args, **kwargs)
    except TypeError as error:
        was_entered = error.__traceback__ and error.__traceback__.tb_next
        if not was_entered:
            check_fits(f, args, kwargs)
        raise


def rule(f: _Function) -> _Function:
    """A `border` around what JAX calls when it transforms what users called."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return f(*args, **kwargs)
        except Exception as error:
            _add_source(error)
            _leave_out_frames(error)
            raise

    return cast(_Function, call)


def _leave_out_frames(error: Exception) -> None:
    mode = _mode()
    frames = list(traceback.walk_tb(error.__traceback__))
    if mode == "off" or not frames:
        return
    is_own = _package(frames[-1][0]) == "eqloop"
    if is_own and isinstance(error, _MISTAKES) and not _TOLD.match(str(error)):
        return
    chain = [error, *(source for _, source in _sources(error))]
    if mode == "tracebackhide":
        for frame in itertools.chain(*(_hidden(e.__traceback__) for e in chain)):
            frame.f_locals["__tracebackhide__"] = True
        return
    for e in chain:
        e.__traceback__ = _without_hidden(e.__traceback__)


def _without_hidden(tb: types.TracebackType | None) -> types.TracebackType | None:
    hidden = set(map(id, _hidden(tb)))
    left = None
    for frame, line in reversed(list(traceback.walk_tb(tb))):
        if id(frame) not in hidden:
            left = types.TracebackType(left, frame, frame.f_lasti, line)
    return left


# Where operations come from. JAX transforms a program long after it was written. If
# that fails, it shows the traceback of the operation, as the cause of the error: all
# frames but its own. What shows it already it leaves alone.


def _sources(
    error: BaseException,
) -> Iterator[tuple[BaseException, BaseException]]:
    """Those in a chain of errors, with what each is the cause of."""
    while (cause := error.__cause__) is not None:
        if type(cause).__name__ == "JaxStackTraceBeforeTransformation":
            yield error, cause
        error = cause


def _add_source(error: Exception) -> None:
    """Does what JAX is about to do, so that our frames can be left out."""
    known = source_info_util.current().traceback
    if known is not source_info_util.current().traceback:
        return  # made anew each time: nothing is transformed
    context = source_info_util.user_context(known)
    context.__enter__()
    context.__exit__(type(error), error, error.__traceback__)
    for _, source in _sources(error):
        if _without_hidden(source.__traceback__) is None:
            # No line is left. If it were not there, JAX would show all of ours.
            source.args = (
                "the operation is that of a call outside of `jit`, which was compiled "
                "as a whole.",
            )


def _leave_out_sources(error: Exception) -> None:
    """Leaves out those that tell nothing but lines from which we are called."""
    if _mode() == "off":
        return
    calls = {_line(*frame) for frame in traceback.walk_stack(None)}
    for above, source in list(_sources(error)):
        if calls.issuperset(_line(*f) for f in traceback.walk_tb(source.__traceback__)):
            _leave_out(above, source)


def _line(frame: types.FrameType, line: int) -> tuple[str, int]:
    return frame.f_code.co_filename, line


def _leave_out(above: BaseException, source: BaseException) -> None:
    above.__cause__, above.__context__ = source.__cause__, source.__context__
    above.__suppress_context__ = source.__suppress_context__


def _hidden(tb: types.TracebackType | None) -> Iterator[types.FrameType]:
    was_hidden = False
    for frame, _ in traceback.walk_tb(tb):
        package = _package(frame)
        was_hidden = package in _OWN or (was_hidden and package in _CALLED)
        if was_hidden:
            yield frame


def _package(frame: types.FrameType) -> str:
    name = frame.f_globals.get("__name__")
    if name is None:  # those of a source are made of files and lines alone
        return _package_at(frame.f_code.co_filename)
    return name.partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _package_at(file: str) -> str:
    for name in (*_OWN, *_CALLED):
        module = getattr(sys.modules.get(name), "__file__", None) or ""
        folder, base = os.path.split(module)
        if file == module or (
            base == "__init__.py" and file.startswith(folder + os.sep)
        ):
            return name
    return ""


def _mode() -> str:
    """How JAX leaves out its frames, as `jax.config` has it."""
    config: Any = jax.config
    mode = config.jax_traceback_filtering
    if mode not in (None, "auto"):
        return mode
    return "tracebackhide" if hasattr(builtins, "get_ipython") else "remove_frames"
