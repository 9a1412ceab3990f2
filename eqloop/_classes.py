"""The classes that users make, and call: their errors end at the user's line."""

import abc
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import equinox as eqx

from ._signatures import check_made
from ._tracebacks import border

_CALLED = ("__call__", "__getitem__", "__hash__")


def _is_called(name: str, attribute: object) -> bool:
    """Whether an attribute of a class is a method that users call."""
    is_public = name in _CALLED or not name.startswith("_")
    return is_public and isinstance(attribute, types.FunctionType | classmethod)


def _bordered(method: Any) -> Any:
    if isinstance(method, classmethod):
        return classmethod(border(method.__func__))
    return border(method)


if TYPE_CHECKING:
    # What errors look like is nothing that type checkers know.
    from abc import ABCMeta as BorderMeta
    from abc import ABCMeta as SettingMeta

    from equinox import Module as AbstractBordered
else:

    class BorderMeta(type(eqx.Module)):
        """Puts a `border` around public methods of a class, and a call of it."""

        # What a class says besides if the call does not fit.
        _made_otherwise = ""

        def __new__(mcs, name, bases, namespace, **kwargs):
            called = {key: f for key, f in namespace.items() if _is_called(key, f)}
            bordered = {key: _bordered(f) for key, f in called.items()}
            return super().__new__(mcs, name, bases, namespace | bordered, **kwargs)

        @border
        def __call__(cls, *args, **kwargs):
            return _made(cls, super().__call__, args, kwargs)

    class SettingMeta(abc.ABCMeta):
        """Puts a `border` around a call of a class that is no module."""

        _made_otherwise = ""

        @property
        def __signature__(cls):
            # That of `__call__` below says nothing. Those of modules have it, too.
            made = inspect.signature(cls.__init__)
            return made.replace(parameters=list(made.parameters.values())[1:])

        @border
        def __call__(cls, *args, **kwargs):
            return _made(cls, super().__call__, args, kwargs)

    class AbstractBordered(eqx.Module, metaclass=BorderMeta):
        """A module that users make and call."""

        def __hash__(self):
            return hash_of(self, super().__hash__)


def _made(
    cls: type, make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    try:
        return make(*args, **kwargs)
    except TypeError:
        check_made(cls, args, kwargs)
        raise


def hash_of(module: object, of_leaves: Callable[[], int]) -> int:
    """The hash of a module, whose leaves have to be hashable."""
    try:
        return of_leaves()
    except TypeError:
        name = type(module).__name__
        raise TypeError(
            f"{name}: it holds arrays, and so has no hash, which `jax.jit` asks for. "
            f"Compile it by `el.Jit` or `equinox.filter_jit`, or have `jax.jit` "
            f"compile a function that it is an argument of."
        ) from None
