"""What things of the user are called: arguments, and functions in errors of JAX.

JAX is handed functions of arrays that are made here. If it cannot go on, it names the
function that it was tracing, the line where that begins, and those of its arguments
that a value depends on. These have to be the user's.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx

from .._arrays import flatten, is_dynamic, paths, pick
from .._compat import name_as, share_name
from .._types import PyTree, Value


@dataclasses.dataclass(frozen=True)
class KnownAs:
    """A function as JAX's errors are to call it.

    Attributes:
        kind: What it is traced for, in JAX's word: `"scan"`, say.
        names: What it calls each of the arrays.
    """

    kind: str
    f: Callable[..., Any]
    names: Sequence[str] = ()

    def name(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function of arrays that JAX calls so."""

        @functools.wraps(run)
        def known(*args: Any) -> Any:
            return run(*args)

        del known.__wrapped__
        name_as(known, self.kind, _written(self.f), self.names)
        return known


def named_as(run: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """A function that JAX calls as it calls another, if that has a name for it."""
    share_name(run, other)
    return run


def array_names(
    tree: PyTree, name: str, is_array: Callable[[Value], bool] = is_dynamic
) -> list[str]:
    """The paths of the arrays in a tree.

    >>> import jax
    >>> array_names({"a": jax.numpy.zeros(3), "b": None, "c": [1, 2.0]}, "h")
    ["h['a']"]
    """
    return pick(paths(tree, name), list(map(is_array, flatten(tree)[0])))


# What the arguments of a call are called.

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def parameters_of(f: Callable[..., PyTree]) -> Mapping[str, inspect.Parameter]:
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


def positional_names(f: Callable[..., PyTree]) -> list[str]:
    """The names of the parameters that may be given by position.

    >>> positional_names(lambda a, b=1, *rest, c: a)
    ['a', 'b']
    """
    return [p.name for p in parameters_of(f).values() if p.kind in _POSITIONAL]


def argument_names(f: Callable[..., PyTree], args: Sequence[PyTree]) -> list[str]:
    """What positional arguments are called, as far as they have names.

    >>> argument_names(lambda a, *rest: a, [1, 2])
    ['a', 'args[1]']
    """
    names = positional_names(f)
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]


def call_names(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, Any],
    taken: Sequence[bool],
) -> list[str]:
    """The paths of what was taken out of `(f, args, kwargs)`.

    >>> call_names(lambda a, b: a, [1, [2, 3]], {}, [False, True, False, True])
    ['a', 'b[1]']
    """
    names, given = paths(f, "f"), zip(argument_names(f, args), args, strict=True)
    for name, argument in [*given, *sorted(kwargs.items())]:
        names += paths(argument, name)
    return pick(names, taken)


def _written(f: Any) -> Any:
    """What the user has written as a function: a line that can be named."""
    while isinstance(f, functools.partial | eqx.Partial):
        f = f.func
    if isinstance(f, type) or hasattr(f, "__code__") or hasattr(f, "__wrapped__"):
        return f
    return types.MethodType(type(f).__call__, f)
