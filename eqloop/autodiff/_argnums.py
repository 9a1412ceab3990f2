"""`argnums`: which arguments of a call are differentiated."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

from .._calls import argument_names, positional_names
from .._types import PyTree, Value

Argnum = int | str
Argnums = Argnum | Sequence[Argnum]


def as_argnums(argnums: Value) -> Any:
    """Makes `argnums` fit to be a static field: its converter.

    >>> as_argnums([0, "x"])
    (0, 'x')
    """
    if isinstance(argnums, list | tuple):
        return tuple(map(as_argnums, argnums))
    if isinstance(argnums, bool | str) or not isinstance(argnums, SupportsIndex):
        return argnums
    return operator.index(argnums)


def check_argnums(owner: str, argnums: object) -> None:
    """Raises unless `argnums` are an int, a name, or a tuple of at least one."""
    several = argnums if isinstance(argnums, tuple) else (argnums,)
    for argnum in several:
        if isinstance(argnum, bool) or not isinstance(argnum, int | str):
            raise TypeError(
                f"{owner}: `argnums` must be an int, the name of an argument, or a "
                f"tuple of these, not {argnums!r}."
            )
    if not several:
        raise ValueError(
            f"{owner}: `argnums` is empty, so there is nothing to differentiate. Give "
            f"the position or the name of at least one argument."
        )


def find_arguments(
    owner: str,
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: dict[str, Any],
    argnums: Argnum | tuple[Argnum, ...],
) -> dict[str, Argnum]:
    """The arguments that `argnums` mean, in order: by name, where each was given."""
    # That is a position in `args`, or a key of `kwargs`.
    names = argument_names(f, args)
    found: dict[str, Argnum] = {}
    for argnum in argnums if isinstance(argnums, tuple) else (argnums,):
        place = _place(f, names, kwargs, argnum)
        if place is None:
            raise ValueError(_not_there(owner, argnum, [*names, *kwargs]))
        name = place if isinstance(place, str) else names[place]
        if name in found:
            raise ValueError(
                f"{owner}: `argnums` is {argnums!r}, which names the argument {name} "
                f"twice."
            )
        found[name] = place
    return found


def _place(
    f: Callable[..., PyTree], names: list[str], kwargs: dict[str, Any], argnum: Argnum
) -> Argnum | None:
    if isinstance(argnum, str):
        if argnum in kwargs:
            return argnum
        return names.index(argnum) if argnum in names else None
    if -len(names) <= argnum < len(names):
        return argnum % len(names)
    # An argument that has a position may have been given by its name.
    all_names = positional_names(f)
    if 0 <= argnum < len(all_names) and all_names[argnum] in kwargs:
        return all_names[argnum]
    return None


def _not_there(owner: str, argnum: Argnum, known: list[str]) -> str:
    listing = ", ".join(known) or "(none)"
    return (
        f"{owner}: `argnums` has {argnum!r}, but f was called with these arguments: "
        f"{listing}. Only an argument that is passed can be differentiated."
    )
