"""Tracebacks without the frames of this library, as JAX leaves out its own.

An error ends at the line of the user that it is about: where the user's function fails,
or else where the library was called. `jax.config.jax_traceback_filtering` says how much
is left out, of JAX and of this library alike; with `"off"` nothing is.
"""

import builtins
import functools
import traceback
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import equinox as eqx
import jax

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OWN = ("eqloop", "jaxtyping", "beartype")
# They are left out where this library calls them, and not where the user does.
_CALLED = ("jax", "equinox", "contextlib", "functools", "dataclasses")
# No check of this library raises these. If one comes out of it, it is to be seen where.
_MISTAKES = (AssertionError, AttributeError, LookupError, NameError)


def border(f: _Function) -> _Function:
    """A function that users call: errors leave it without our frames."""

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return f(*args, **kwargs)
        except Exception as error:
            _leave_out_frames(error)
            raise

    return cast(_Function, call)


def _is_called(name: str, attribute: object) -> bool:
    """Whether an attribute of a class is a method that users call."""
    is_public = name == "__call__" or not name.startswith("_")
    return is_public and isinstance(attribute, types.FunctionType)


if TYPE_CHECKING:
    # What errors look like is nothing that type checkers know.
    from abc import ABCMeta as BorderMeta

    from equinox import Module as AbstractBordered
else:

    class BorderMeta(type(eqx.Module)):
        """The same of the public methods of a class, and of a call of the class."""

        def __new__(mcs, name, bases, namespace, **kwargs):
            called = {key: f for key, f in namespace.items() if _is_called(key, f)}
            bordered = {key: border(f) for key, f in called.items()}
            return super().__new__(mcs, name, bases, namespace | bordered, **kwargs)

        @border
        def __call__(cls, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class AbstractBordered(eqx.Module, metaclass=BorderMeta):
        """A module that users make and call."""

        def __hash__(self):
            return hash_of(self, super().__hash__)


def hash_of(module: object, of_leaves: Callable[[], int]) -> int:
    """The hash of a module, whose leaves have to be hashable.

    Raises:
        TypeError: If they are not, as if the module is given to `jax.jit`.
    """
    try:
        return of_leaves()
    except TypeError:
        name = type(module).__name__
        raise TypeError(
            f"{name}: it holds arrays, and so has no hash, which `jax.jit` asks for. "
            f"Compile it by `el.Jit` or `equinox.filter_jit`, or have `jax.jit` "
            f"compile a function that it is an argument of."
        ) from None


def _leave_out_frames(error: Exception) -> None:
    mode = _mode()
    frames = list(traceback.walk_tb(error.__traceback__))
    if mode == "off" or not frames:
        return
    is_own = _package(frames[-1][0]) == "eqloop"
    if is_own and isinstance(error, _MISTAKES):
        return
    if mode == "tracebackhide":
        for frame in _hidden(error.__traceback__):
            frame.f_locals["__tracebackhide__"] = True
        return
    hidden = set(map(id, _hidden(error.__traceback__)))
    left = None
    for frame, line in reversed(frames):
        if id(frame) not in hidden:
            left = types.TracebackType(left, frame, frame.f_lasti, line)
    error.__traceback__ = left


def _hidden(tb: types.TracebackType | None) -> Iterator[types.FrameType]:
    was_hidden = False
    for frame, _ in traceback.walk_tb(tb):
        package = _package(frame)
        was_hidden = package in _OWN or (was_hidden and package in _CALLED)
        if was_hidden:
            yield frame


def _package(frame: types.FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def _mode() -> str:
    """How JAX leaves out its frames, as `jax.config` has it."""
    config: Any = jax.config
    mode = config.jax_traceback_filtering
    if mode not in (None, "auto"):
        return mode
    return "tracebackhide" if hasattr(builtins, "get_ipython") else "remove_frames"
