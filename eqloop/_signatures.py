"""Calls that do not fit: which argument is missing or too many, in plain words."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def check_fits(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    instead: str = "",
) -> dict[str, Any]:
    """Checks that a function has parameters for these arguments, and no others."""
    try:
        return inspect.signature(fn).bind(*args, **kwargs).arguments
    except TypeError as error:
        shown = _of_call(fn, args)
        raise TypeError(
            f"{called(fn, args)}{shown}: {error}.{instead and ' '}{instead}"
        ) from None


def check_made(cls: type, args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    """Checks that something can be made with these settings."""
    # What is called afterwards is easily made and called at once, as functions of JAX
    # are.
    if inspect.isabstract(cls):
        return
    signature = _of_making(cls)
    try:
        signature.bind(*args, **settings)
    except TypeError as error:
        made = _without_settings(signature)
        raise TypeError(f"{cls.__name__}{made}: {error}.{_how(cls, made)}") from None


# How arguments are written that are given by position.
_AS_WRITTEN = {
    inspect.Parameter.POSITIONAL_ONLY: inspect.Parameter.POSITIONAL_OR_KEYWORD
}


def _how(cls: Any, made: inspect.Signature) -> str:
    hint = cls._made_otherwise
    if not inspect.isfunction(cls.__call__):
        return hint
    _, *arguments = inspect.signature(cls.__call__).parameters.values()
    given = [p for p in arguments if p.kind != p.KEYWORD_ONLY]
    plain = [
        p.replace(kind=_AS_WRITTEN.get(p.kind, p.kind), default=p.empty) for p in given
    ]
    call = _without_settings(inspect.Signature(plain))
    return (
        f" Pass settings by keyword, and call the result: "
        f"`el.{cls.__name__}{made}{call}`.{hint}"
    )


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """A signature for error messages, in which only the names are of interest."""
    empty = inspect.Signature.empty
    parameters = [
        p.replace(annotation=empty, default=_shown(p.default))
        for p in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters, return_annotation=empty)


class _Dots:
    """A default that nobody wants to read."""

    def __repr__(self) -> str:
        return "..."


def _shown(default: object) -> object:
    return _Dots() if " at 0x" in repr(default) else default


def _owner(fn: Callable[..., Any], args: tuple[Any, ...]) -> type | None:
    """The class that a function is called on, or on an instance of it."""
    first = next(iter(inspect.signature(fn).parameters), None)
    if not args or first not in ("self", "cls"):
        return None
    return args[0] if first == "cls" else type(args[0])


def called(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """A function, as whoever calls it writes it."""
    if (owner := _owner(fn, args)) is None:
        return fn.__qualname__
    method = "" if fn.__name__ == "__call__" else f".{fn.__name__}"
    return f"{owner.__name__}{method}"


def _of_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> inspect.Signature:
    signature = without_annotations(inspect.signature(fn))
    own = 0 if _owner(fn, args) is None else 1
    parameters = list(signature.parameters.values())[own:]
    return signature.replace(parameters=parameters)


@functools.lru_cache(maxsize=256)
def _of_making(cls: type) -> inspect.Signature:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    return inspect.Signature(parameters)


def _without_settings(signature: inspect.Signature) -> inspect.Signature:
    """Without annotations, and without what may be left out or given by keyword."""
    parameters = signature.parameters.values()
    shown = [p for p in parameters if p.kind != p.KEYWORD_ONLY or p.default is p.empty]
    return inspect.Signature([p.replace(annotation=p.empty) for p in shown])
