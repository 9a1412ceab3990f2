"""Types inside `jax.shard_map`: along which axes of devices an array may differ.

What starts the same on all devices may come to differ. Where each device stops at its
own time, whatever the number of steps has a part in differs, even where nothing of it
is computed from what differs, as is true of the number itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
from jax import lax


def axes_of(x: Any) -> frozenset[str]:
    """The axes of devices that an array, or one of this type, differs along."""
    aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
    return aval.manual_axis_type.varying


def vary(x: Any, axes: frozenset[str]) -> Any:
    """An array as one that may differ along some axes."""
    missing = axes - axes_of(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def check_consts(axes: frozenset[str], consts: Sequence[Any]) -> None:
    """Checks the types of consts that have a cotangent.

    If such a const were the same on all devices, they would add up its cotangents, and
    so wait for each other, at every step.
    """
    if all(axes <= axes_of(const) for const in consts):
        return
    names = tuple(sorted(axes))
    raise ValueError(
        "A while loop that stops at its own time on each device cannot be "
        "differentiated in reverse mode with respect to arrays that are the same on "
        "all of them, if `body` closes over these. Make them leaves of `body`, as "
        f'those of a module are, or pass `jax.lax.pcast(x, {names}, to="varying")`.'
    )
