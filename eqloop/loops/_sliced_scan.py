"""`SlicedScan`: a scan that keeps a slice of its outputs."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, SupportsIndex, final

from .._calls import Carry, NewCarry, NewY, Y, int_of, setting
from ._scan import AbstractScan, Stepping


def as_index(owner: str, name: str, value: object) -> int | None:
    """One of the three numbers of a slice."""
    if value is None:
        return None
    if (index := int_of(value)) is None:
        raise TypeError(
            f"{owner}: `{name}` must be an int that is known when tracing, or None, "
            f"not {value!r} of type {type(value).__name__}."
        )
    return index


def _index(name: str) -> Callable[[SupportsIndex | None], int | None]:
    return functools.partial(as_index, "SlicedScan", name)


@final
class SlicedScan(AbstractScan[Carry, Y]):
    """Like [`Scan`][eqloop.Scan], but returns `ys[start:stop:step]` instead of `ys`.

    Every step is run, but only the outputs that the slice keeps are computed and
    stored; in reverse mode only these have cotangents. With a `schedule` that stores
    carries, the memory of a gradient does not depend on what is left out. The slice is
    of `ys` in the order of `xs`, even with `reverse=True`, and is taken along the axes
    that `out_axes` gives.

    Args:
        start: Where the slice starts: an int, which may be negative, or `None`.
        stop: Where it stops.
        step: The step of the slice. If it is negative, `ys` are in the opposite order.

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type.
        ValueError: If `step` is 0, `unroll` is less than 1, or `policy` is not the name
            of a policy. `__call__` lists what the call raises.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> def step(total, x):
        ...     return total + x, total
        >>> el.SlicedScan(step, step=3)(0, jnp.arange(10))
        (Array(45, dtype=int32...), Array([ 0,  3, 15, 36], dtype=int32...))

        The last two, the latest first:

        >>> el.SlicedScan(step, stop=-3, step=-1)(0, jnp.arange(10))[1]
        Array([36, 28], dtype=int32...)

    References:
        `powerpax.sliced_scan`, which has the same meaning.
    """

    start: int | None = setting(default=None, converter=_index("start"))
    stop: int | None = setting(default=None, converter=_index("stop"))
    step: int | None = setting(default=None, converter=_index("step"))

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Stepping[NewCarry, NewY], /) -> "SlicedScan[NewCarry, NewY]": ...

    def _kept(self) -> slice:
        return slice(self.start, self.stop, self.step)

    def __check_init__(self) -> None:
        if self.step == 0:
            raise ValueError(
                "SlicedScan: `step` must not be 0. To keep no outputs, return None for "
                "them."
            )
