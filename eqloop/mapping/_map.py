"""`Map`: a function over rows, one after the other."""

from collections.abc import Callable
from typing import TYPE_CHECKING, SupportsIndex, final

import equinox as eqx

from .._calls import (
    AbstractSameCall,
    NewP,
    NewR,
    P,
    R,
    as_count,
    compiled_once,
    setting,
)
from ..progress import ProgressBar, as_progress, check_progress
from ._chunk_loop import AtMost
from ._map_plan import MapPlan, plan_of_map
from ._open_map import open_map


def _as_batch_size(size: SupportsIndex | None) -> int | None:
    if size is None:
        return None
    return as_count("Map", "batch_size", "the number of rows to map at once", size)


def _as_unroll(unroll: SupportsIndex) -> int:
    return as_count("Map", "unroll", "the number of rows in an iteration", unroll)


@final
class Map(AbstractSameCall[P, R]):
    """Runs a function on one row after the other.

    Like `jax.lax.map`, with leaves of any kind. Its derivatives also take the memory of
    one row, because they compute each row again. A `jax.lax.cond` inside `f` runs only
    one of its branches, unlike under `vmap`. With a `batch_size`, that many rows are
    mapped at once, as by a [`ChunkedVmap`][eqloop.ChunkedVmap] over the leading axes.
    Each row is evaluated exactly once.

    Call it like `f`. The leading axes of all arrays are mapped, also those of keyword
    arguments. A single PRNG key that is passed as `key=` is split, one for each row.
    Numbers that `f` returns are stacked as well; other results that are not arrays come
    back unchanged.

    Args:
        f: The function. Its own arrays are the same for every row.
        batch_size: How many rows are mapped at once; by default one.
        unroll: How many of these one iteration of the compiled loop has.
        progress: Shows a progress bar: `True`, an int (after how many rows it moves) or
            a [`ProgressBar`][eqloop.ProgressBar].

    Raises:
        TypeError: `batch_size` or `unroll` is not an int, or `progress` is not a
            progress bar.
        ValueError: One of them is less than 1; when called, the lengths of the arrays
            disagree, or there are none.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> el.Map(lambda x, y: x * y)(jnp.arange(3.0), jnp.ones((3, 2)))
        Array([[0., 0.],
               [1., 1.],
               [2., 2.]], dtype=float32)

    References:
        [`jax.lax.map`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.map.html).
    """

    f: Callable[P, R]
    batch_size: int | None = setting(default=None, converter=_as_batch_size)
    unroll: int = setting(default=1, converter=_as_unroll)
    progress: ProgressBar | None = setting(default=None, converter=as_progress)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Map[NewP, NewR]": ...

    def __check_init__(self) -> None:
        check_progress("Map", self.progress)

    @compiled_once
    def __call__(self, *xs: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f` for every row of its arguments, one after the other.

        Args:
            *xs: The arguments of `f`, with their rows along axis 0.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            What `f` returns, with its arrays and numbers stacked along axis 0.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
            ValueError: If there is no array, or if arrays have no axis or differ in
                length.
        """
        axes = eqx.if_array(0)
        call = open_map("Map", self.f, xs, kwargs, in_axes=axes, out_axes=0)
        planner = AtMost(self.batch_size or 1, self.unroll)
        return call.run(planner, progress=self.progress)

    def plan(self, *xs: P.args, **kwargs: P.kwargs) -> MapPlan:
        """What a call and its gradient take. They are compiled, and not run.

        Args:
            *xs: The arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for an
                array.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            What was found: a table, if it is printed.
        """
        return plan_of_map(self, xs, kwargs)
