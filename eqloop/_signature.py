"""What the arguments of a call are called."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def parameters_of(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none for a built-in function that hides them.

    >>> list(parameters_of(eqx.Partial(lambda a, b, *, c: a, 1)))
    ['b', 'c']
    """
    if isinstance(f, eqx.Partial):
        f = functools.partial(f.func, *f.args, **f.keywords)
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(f: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may be given by position.

    >>> positional_names(lambda a, b=1, *rest, c: a)
    ['a', 'b']
    """
    return [p.name for p in parameters_of(f).values() if p.kind in _POSITIONAL]


def argument_names(f: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """What positional arguments are called, as far as they have names.

    >>> argument_names(lambda a, *rest: a, [1, 2])
    ['a', 'args[1]']
    """
    names = positional_names(f)
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]
