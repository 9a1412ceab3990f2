"""What JAX calls a function that it traces: in its errors, by the user's own names.

JAX is handed functions of arrays that are made here. If it cannot go on, it names the
function that it was tracing, the line where that begins, and those of its arguments
that a value depends on. These have to be the user's.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax

from .._arrays import is_dynamic, paths
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

    >>> array_names({"a": jax.numpy.zeros(3), "b": None, "c": [1, 2.0]}, "h")
    ["h['a']"]
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    pairs = zip(paths(tree, name), leaves, strict=True)
    return [path for path, leaf in pairs if is_array(leaf)]


def _written(f: Any) -> Any:
    """What the user has written as a function: a line that can be named."""
    while isinstance(f, functools.partial | eqx.Partial):
        f = f.func
    if isinstance(f, type) or hasattr(f, "__code__") or hasattr(f, "__wrapped__"):
        return f
    return types.MethodType(type(f).__call__, f)
