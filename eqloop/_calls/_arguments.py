"""The types of arguments: checked where users call, and told in plain words.

`typed` checks the arguments of a public call by their annotations. These are types of
Python that a person can name: a number, a key, a function. What is any PyTree is not
checked here.
"""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeVar

import jax
import jaxtyping
import numpy as np

from .._arrays import describe
from .._signatures import called, check_fits
from .._tracebacks import border
from ._transform import int_of

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Arguments that are given together are each any tree.
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@typing.overload
def typed(fn: _Function, /) -> _Function: ...
@typing.overload
def typed(*, instead: str) -> Callable[[_Function], _Function]: ...
def typed(fn: Any = None, /, *, instead: str = "") -> Any:
    """Checks the arguments of a public call: their number, and their types."""
    if fn is None:
        return functools.partial(typed, instead=instead)
    signature = inspect.signature(fn)

    @functools.cache
    def kinds() -> dict[str, tuple[Kind, ...]]:
        each = [p for p in signature.parameters.values() if p.kind not in _SEVERAL]
        annotations = {p.name: p.annotation for p in each}
        known = {name: kinds_of(hint) for name, hint in annotations.items()}
        return {name: found for name, found in known.items() if found}

    @border
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = check_fits(fn, args, kwargs, instead)
        for name, expected in kinds().items():
            if name in given and not any(k.has(given[name]) for k in expected):
                raise TypeError(
                    f"{called(fn, args)}: `{name}` must be {in_words(expected)}, not "
                    f"{value_in_words(given[name])}."
                )
        return fn(*args, **kwargs)

    return call


def check_takes(
    owner: str,
    name: str,
    f: Callable[..., Any],
    given: Sequence[str],
    *,
    keywords: Sequence[str] = (),
    why: str = "It is",
) -> None:
    """Checks that a function of a user takes what it will be called with."""
    try:
        inspect.signature(f).bind(*given, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*given, *(f"{name}={name}" for name in keywords)])
        raise TypeError(
            f"{owner}: `{name}` does not take what it is given: {error}. {why} called "
            f"as `{name}({call})`."
        ) from None
    except ValueError:
        pass  # it has no signature that Python knows


def value_in_words(value: object) -> str:
    """What was passed, for an error message.

    >>> value_in_words(3.0), value_in_words(jax.numpy.zeros(3)), value_in_words(None)
    ('3.0, of type float', 'float32[3]', 'None')
    """
    text, kind = describe(value), type(value).__name__
    is_plain = value is None or isinstance(value, bool | jax.Array | np.ndarray | type)
    return text if is_plain else f"{text}, of type {kind}"


# Annotations in words.


class Kind(NamedTuple):
    """Some of the values that an argument can be.

    Attributes:
        has: Whether a value is one of them.
    """

    words: str
    has: Callable[[Any], bool]


def kinds_of(hint: Any) -> tuple[Kind, ...]:
    """The values that an annotation allows; empty if it allows any.

    >>> in_words(kinds_of(SupportsIndex | None)), kinds_of(Any)
    ('an int or None', ())
    """
    kinds = [_kind_of(part) for part in _parts(hint)]
    known = tuple(kind for kind in kinds if kind is not None)
    return known if len(known) == len(kinds) else ()


def in_words(kinds: Sequence[Kind]) -> str:
    """All of them, as in "an int or None"."""
    *most, last = dict.fromkeys(kind.words for kind in kinds)
    return f"{', '.join(most)} or {last}" if most else last.removesuffix(",")


def _parts(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if not is_union:
        return [hint]
    parts = [part for each in typing.get_args(hint) for part in _parts(each)]
    # What is nothing comes last.
    return sorted(parts, key=lambda part: part is type(None))


# Types whose instances an argument may be. A size that `jax.export` does not know, or a
# tracer, has an error of its own.
_INSTANCES: dict[Any, str] = {
    type(None): "None",
    SupportsIndex: "an int",
    bool: "a bool",
    str: "a string",
    os.PathLike: "a path",
    jax.ShapeDtypeStruct: "a `jax.ShapeDtypeStruct`",
    jax.Device: "a `jax.Device`",
    jax.sharding.Mesh: "a mesh",
}
_A_SEQUENCE = Kind(
    "a tuple or a list",
    lambda x: isinstance(x, Sequence) and not isinstance(x, str | bytes),
)
_A_KEY = "a PRNG key, as `jax.random.key(0)` makes it,"


def _kind_of(hint: Any) -> Kind | None:
    origin = typing.get_origin(hint) or hint
    if origin is int:
        return Kind("an int", lambda x: int_of(x) is not None)
    if origin in _INSTANCES:
        kinds = (bool, np.bool_) if origin is bool else origin
        return Kind(_INSTANCES[origin], lambda x: isinstance(x, kinds))
    if origin is Callable:
        return Kind("a function", callable)
    if origin is Literal:
        values = typing.get_args(hint)
        return Kind(", ".join(map(repr, values)), lambda x: x in values)
    if origin is Sequence:
        return _A_SEQUENCE
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return Kind(_A_KEY, lambda x: isinstance(x, hint))
    return None
