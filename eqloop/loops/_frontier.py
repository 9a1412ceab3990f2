"""`frontier`: what a scan could cost under other schedules."""

from typing import Any, SupportsIndex

from .._typecheck import typed
from ..checkpointing import Frontier
from ..checkpointing import frontier as frontier_of
from ._scan import AbstractScan


@typed
def frontier(
    scan: AbstractScan,
    init: Any,
    xs: Any = None,
    *,
    length: SupportsIndex | None = None,
    key: Any = None,
) -> Frontier:
    """The trade-off between memory and time for a gradient of a scan.

    Nothing is run; a few small loops of the step are compiled.

    Args:
        scan: The scan.
        init: The carry of the first step; `jax.ShapeDtypeStruct`s will do for arrays.
        xs: What is scanned.
        length: How many steps; needed only if there is nothing to scan.
        key: A PRNG key, if the scan is called with one.

    Returns:
        Plans from the least memory to the least time, none of which another one beats
        in both. `frontier(...).plot()` draws them, with that of the scan's own
        schedule marked.

    Raises:
        TypeError: As the call of the scan does.
        ValueError: As the call of the scan does, and if its schedule cannot be met.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None))
        >>> plans = el.frontier(scan, jnp.zeros(100), jnp.zeros((64, 100)))
        >>> plans[-1].relative_time <= plans[0].relative_time
        True
        >>> plans[0].peak_bytes < plans.chosen.peak_bytes
        True
    """
    return frontier_of(**scan._problem(init, xs, length, key))
