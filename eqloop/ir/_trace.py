"""From a call with any leaves to a jaxpr of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

from .._partition import Rest, as_arrays, flatten, is_dynamic, split


def trace(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[jex.ClosedJaxpr, list[Any], Rest]:
    """The jaxpr of a call.

    Returns:
        The jaxpr, whose inputs are the arrays of `f` and of the arguments; these
        arrays; and the result without its arrays, which are the outputs.
    """
    leaves, call = _split_arrays((f, args, kwargs))
    returned: list[Rest] = []

    def on_arrays(*leaves: Any) -> list[Any]:
        f, args, kwargs = call.join(leaves)
        arrays, rest = _split_arrays(f(*args, **kwargs))
        returned.append(rest)
        return arrays

    jaxpr = jax.make_jaxpr(on_arrays)(*leaves)
    return jaxpr, leaves, returned[-1]


def function_name(f: Callable[..., Any]) -> str:
    """The name of a function, or of the class of a module; `f` for a lambda."""
    name = getattr(f, "__name__", type(f).__name__)
    return name if name.isidentifier() else "f"


def _split_arrays(tree: Any) -> tuple[list[Any], Rest]:
    tree = as_arrays(tree)
    return split(tree, [is_dynamic(leaf) for leaf in flatten(tree)[0]])
