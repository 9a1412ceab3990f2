"""Whether a function is still the same: a digest of what it was compiled to.

Comments and formatting are not in it, nor are lines and paths. It works for functions
that are in no file, as in a notebook. What a function closes over, and the functions
and numbers of its module that it names, belong to it.
"""

import functools
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx

from .._arrays import is_dynamic, is_scalar, unmarked
from .._types import PyTree


def functions_in(value: object) -> list[types.FunctionType]:
    """The functions that calling a value runs first, as far as it can be told."""
    if isinstance(value, types.FunctionType):
        return [value]
    if isinstance(value, types.MethodType):
        return functions_in(value.__func__)
    if isinstance(value, functools.partial | eqx.Partial):
        return functions_in(value.func)
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None:
        return functions_in(wrapped)
    if isinstance(value, type) or not callable(value):
        return []
    return _methods(type(value))


def code_digest(functions: list[types.FunctionType]) -> str:
    """A digest of functions and of those that they call."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _digested(functions, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def captured(functions: list[types.FunctionType]) -> dict[str, Any]:
    """What functions, and those that they call, close over: arrays by their names."""
    found: dict[str, Any] = {}
    for function in _reachable(functions, set()):
        for name, value in _named_in(function).items():
            if is_dynamic(value):
                found.setdefault(name, value)
    return found


def _methods(cls: type) -> list[types.FunctionType]:
    """Those of a class that are the user's: its `__call__` may call any of them."""
    classes = [c for c in cls.__mro__ if c is not object and not _is_library(c)]
    return [
        value
        for c in classes
        for value in vars(c).values()
        if isinstance(value, types.FunctionType)
    ]


def _is_library(value: object) -> bool:
    package = (getattr(value, "__module__", None) or "").partition(".")[0]
    return package in ("jax", "equinox", "eqloop", "builtins", "abc", "typing")


def _reachable(
    functions: list[types.FunctionType], seen: set[int]
) -> Iterator[types.FunctionType]:
    for function in functions:
        if id(function) in seen or _is_library(function):
            continue
        seen.add(id(function))
        yield function
        for value in _named_in(function).values():
            yield from _reachable(functions_in(value), seen)


def _digested(functions: list[types.FunctionType], seen: set[int]) -> Iterator[str]:
    for function in _reachable(functions, seen):
        yield from _code_parts(function.__code__)
        for name, value in sorted(_named_in(function).items()):
            if is_scalar(value) or isinstance(value, str):
                yield f"{name} = {unmarked(value)!r}"


def _code_parts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):  # in an order of its own in each process
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _named_in(function: types.FunctionType) -> dict[str, Any]:
    """What a function closes over, and what it names of its own module."""
    found: dict[str, Any] = {}
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    for name in _global_names(function.__code__):
        value = function.__globals__.get(name)
        is_own = getattr(value, "__module__", None) == function.__module__
        if is_dynamic(value) or is_scalar(value) or is_own:
            found.setdefault(name, value)
    return found


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def callable_name(value: Callable[..., PyTree]) -> str:
    """What a function is called; for an object, its class."""
    return getattr(value, "__qualname__", type(value).__qualname__)
