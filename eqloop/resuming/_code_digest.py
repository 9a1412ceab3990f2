"""Whether a function is still the same: a digest of what it was compiled to.

Comments and formatting are not in it, nor are lines and paths. It works for functions
that are in no file, as in a notebook. What a function closes over, its defaults, and
the functions and numbers of its module that it names, belong to it.
"""

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from .._arrays import is_dynamic, is_scalar, unmarked
from .._programs import code_parts, is_of_library, named_in
from .._types import PyTree, Value


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
        return [f for part in (wrapped, *_rules(value)) for f in functions_in(part)]
    if isinstance(value, type) or not callable(value):
        return []
    return _methods(type(value))


class TreePart(NamedTuple):
    """A part of a tree.

    Attributes:
        is_hidden: Whether JAX does not see it: if it is in a static field, or an
            argument of a `functools.partial`.
    """

    path: str
    value: Value
    is_hidden: bool


def nodes(
    tree: PyTree, path: str, is_hidden: bool = False, around: tuple[Value, ...] = ()
) -> Iterator[TreePart]:
    """All that is in a tree, which may be a part of itself, from the top down."""
    if any(tree is part for part in around):
        return
    yield TreePart(path, tree, is_hidden)
    children, _ = jtu.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    own = {path + jtu.keystr(key): x for key, x in children if x is not tree}
    others = dict[str, Any]()
    if isinstance(tree, functools.partial):
        others = {f"{path}.args": tree.args, f"{path}.keywords": tree.keywords}
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = (field.name for field in dataclasses.fields(tree))
        fields = {f"{path}.{name}": getattr(tree, name, None) for name in names}
        others = {below: x for below, x in fields.items() if below not in own}
    for below, child in (own | others).items():
        within = is_hidden or below in others
        yield from nodes(child, below, within, (*around, tree))


def code_digest(functions: list[types.FunctionType], is_deep: bool) -> str:
    """A digest of functions and of those that they call."""
    # If it is deep, values count also within what the functions read: in lists, say.
    digest = hashlib.blake2b(digest_size=16)
    for function in _reachable(functions, set()):
        for part in code_parts(function.__code__):
            digest.update(part.encode() + b"\0")
        for path, value in sorted(_read_by(function, is_deep).items()):
            if is_plain(value):
                digest.update(f"{path} = {unmarked(value)!r}".encode() + b"\0")
    return digest.hexdigest()


def captured(functions: list[types.FunctionType], is_deep: bool) -> dict[str, Any]:
    """What functions, and those that they call, close over: arrays by their names."""
    found: dict[str, Any] = {}
    for function in _reachable(functions, set()):
        for path, value in _read_by(function, is_deep).items():
            if is_dynamic(value):
                found.setdefault(path, value)
    return found


def is_plain(value: object) -> bool:
    """Whether what is printed of a value tells it from others."""
    is_named = isinstance(value, str | bytes | enum.Enum)
    return value is None or is_named or is_scalar(value)


def _read_by(function: types.FunctionType, is_deep: bool = True) -> dict[str, Any]:
    """What a function reads by name, and what is in that, by paths."""
    named = named_in(function)
    if not is_deep:
        return named
    return {n.path: n.value for name, x in named.items() for n in nodes(x, name)}


def _rules(value: object) -> list[Any]:
    """The derivative rules of a function."""
    if isinstance(value, jax.custom_jvp):
        return [value.jvp]
    return [value.fwd, value.bwd] if isinstance(value, jax.custom_vjp) else []


def _methods(cls: type) -> list[types.FunctionType]:
    """Those of a class that are the user's: its `__call__` may call any of them."""
    classes = [c for c in cls.__mro__ if c is not object and not is_of_library(c)]
    return [
        value
        for c in classes
        for value in vars(c).values()
        if isinstance(value, types.FunctionType)
    ]


def _reachable(
    functions: list[types.FunctionType], seen: set[int]
) -> Iterator[types.FunctionType]:
    for function in functions:
        if id(function) in seen or is_of_library(function):
            continue
        seen.add(id(function))
        yield function
        for value in _read_by(function).values():
            yield from _reachable(functions_in(value), seen)


def callable_name(value: Callable[..., PyTree]) -> str:
    """What a function is called; for an object, its class."""
    return getattr(value, "__qualname__", type(value).__qualname__)
