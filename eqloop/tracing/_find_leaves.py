"""`find_leaves`: the leaves of a tree that are of a kind, with their paths."""

import inspect
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._arrays import describe
from .._tracebacks import border
from .._types import PyTree, Value

Where = type | tuple[type, ...] | Callable[[Any], Any]


@border
def find_leaves(tree: PyTree, where: Where) -> list[tuple[str, Value]]:
    """Finds the leaves of one kind in a tree, with their paths.

    Args:
        tree: Any PyTree. `None` is a leaf of it.
        where: What to look for: a function that is called on each leaf, or a type or
            tuple of types. jaxtyping's types are allowed, and so are types of larger
            parts of the tree, such as layers.

    Returns:
        Pairs of a path, as you would write it in Python after the name of the tree, and
        what is there.

    Raises:
        TypeError: If `where` is none of these.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax
        >>> mlp = eqx.nn.MLP(2, 1, 8, depth=1, key=jax.random.key(0))
        >>> for path, leaf in el.find_leaves(mlp, eqx.is_array):
        ...     print(path, leaf.shape)
        .layers[0].weight (8, 2)
        .layers[0].bias (8,)
        .layers[1].weight (1, 8)
        .layers[1].bias (1,)
        >>> [path for path, _ in el.find_leaves(mlp, eqx.nn.Linear)]
        ['.layers[0]', '.layers[1]']
    """
    types: Any = where if isinstance(where, tuple) else (where,)
    if all(map(inspect.isclass, types)):
        is_wanted = is_node = lambda node: isinstance(node, types)
    elif callable(where):
        is_wanted: Callable[[object], bool] = where
        is_node = lambda node: False
    else:
        raise TypeError(
            f"find_leaves: `where` must be a type, a tuple of types, or a function of "
            f"a leaf, not {describe(where)}."
        )
    is_leaf = lambda node: node is None or is_node(node)
    nodes, _ = jtu.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jtu.keystr(path), node) for path, node in nodes if is_wanted(node)]
