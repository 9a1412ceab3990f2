"""`frontier`: what a loop could cost under other schedules."""

import inspect
from typing import Any

from .._typecheck import typed, without_annotations
from ..checkpointing import Frontier
from ..checkpointing import frontier as frontier_of
from ._loop import AbstractLoop


@typed
def frontier(loop: AbstractLoop, *args: Any, **kwargs: Any) -> Frontier:
    """The trade-off between memory and time for a gradient of a loop.

    Nothing is run; the programs of a few plans are compiled. Time is estimated.

    Args:
        loop: A scan, or any other loop that has a `plan`.
        *args: What the loop is called with, such as `init` and `xs`;
            `jax.ShapeDtypeStruct`s will do for arrays.
        **kwargs: What it is called with by keyword, such as `length` and `key`.

    Returns:
        Plans from the least memory to the least time: of those that a
        [`Budget`][eqloop.Budget] searches, the ones that no other one beats in both.
        `frontier(...).plot()` draws them, with that of the loop's own schedule marked.

    Raises:
        TypeError: As the call of the loop does.
        ValueError: As the call of the loop does, and if its schedule cannot be met.

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
    signature = inspect.signature(loop.plan)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"frontier: {error}. Pass what the {type(loop).__name__} is called with: "
            f"{without_annotations(signature)}."
        ) from None
    return frontier_of(**loop._problem(*args, **kwargs))
