"""What tells functions of Python apart: their code, and what they read by name.

Comments and formatting make no difference, nor do lines and paths. It works for
functions that are in no file, as in a notebook.
"""

import types
from collections.abc import Iterator
from typing import Any

from .._arrays import is_dynamic, is_scalar

_OF_JAX = "jax", "jaxlib"


def code_parts(code: types.CodeType) -> Iterator[str]:
    """What a function was compiled to, without where it stands."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_parts(constant)
        else:
            yield _constant(constant)


def named_in(function: types.FunctionType) -> dict[str, Any]:
    """What a function reads by name: defaults, what it closes over, and globals.

    Of the globals those that are numbers, arrays, lists and the like of these, or are
    of the same module. Those of a library are its own affair.
    """
    found: dict[str, Any] = dict(function.__kwdefaults__ or {})
    defaults, code = function.__defaults__ or (), function.__code__
    arguments = code.co_varnames[: code.co_argcount]
    found |= zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in () if is_of_library(function) else _global_names(code):
        value = function.__globals__.get(name)
        is_own = getattr(value, "__module__", None) == function.__module__
        is_list = type(value) in (tuple, list, dict)
        if is_dynamic(value) or is_scalar(value) or is_list or is_own:
            found.setdefault(name, value)
    return found


def name_of(x: Any) -> str:
    """What a function, a class, a module or a member of an enumeration is called."""
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None) or str(x)
    return f"{getattr(x, '__module__', None)}.{name}"


def is_of_library(value: object) -> bool:
    """Whether something is JAX's, Equinox's, Python's or this library's own."""
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return package in (*_OF_JAX, "equinox", "eqloop", "builtins", "abc", "typing")


def _constant(value: object) -> str:
    """A constant of a function; a set has an order of its own in each process."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
