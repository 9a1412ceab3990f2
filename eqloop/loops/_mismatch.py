"""How two carries differ, in words: one line for each place.

Of the carry that came out of a step, only the types of the arrays are needed.
"""

from collections.abc import Sequence
from typing import Any

import jax.core
import jax.numpy as jnp

from .._differences import kind, structure_differences
from .._partition import is_dynamic, is_scalar, same_static

# The path of a leaf, what came in, and what came out.
Change = tuple[str, Any, Any]


def is_type(leaf: Any) -> bool:
    """Whether a leaf is the type of an array."""
    return isinstance(leaf, jax.core.ShapedArray)


def type_changes(leaves: Sequence[Change]) -> list[str]:
    """The leaves whose type changed, or that are arrays only before or only after."""
    return [line for leaf in leaves if (line := _type_change(*leaf))]


def static_changes(leaves: Sequence[Change]) -> list[str]:
    """The leaves that are no arrays, and are not the same after as they were before."""
    return [
        _line(name, before, after)
        for name, before, after in leaves
        if not is_dynamic(before) and not same_static(before, after)
    ]


def structure_changes(before: Any, after: Any, name: str) -> list[str]:
    """Where two trees of different structure part, from the top down."""
    differences = structure_differences(before, after, name)
    return [_structure_line(d.path, d.one, d.other) for d in differences]


def _structure_line(name: str, before: str | None, after: str | None) -> str:
    if after is None:
        return f"  {name} came in, but did not come out"
    if before is None:
        return f"  {name} came out, but had not come in"
    if before == after:
        return f"  {name}: the static fields of the {before} changed"
    return f"  {name}: {before} came in, {after} came out"


def _line(name: str, before: Any, after: Any) -> str:
    return f"  {name}: {kind(before)} came in, {kind(after)} came out"


def _type_change(name: str, before: Any, after: Any) -> str | None:
    if is_dynamic(before) and is_scalar(after):
        after = jax.typeof(jnp.asarray(after))
    if not is_dynamic(before) and not is_type(after):
        return None
    line = _line(name, before, after)
    if not (is_dynamic(before) and is_type(after)) or before.shape != after.shape:
        return line
    if before.dtype != after.dtype:
        return f"{line} (cast it with .astype, or start from {_article(after.dtype)})"
    return None


def _article(dtype: Any) -> str:
    return f"{'an' if str(dtype)[0] in 'aeiou' else 'a'} {dtype}"
