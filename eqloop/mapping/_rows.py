"""A function of rows, on lists of arrays: traced for chunks of any size."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval

from .._partition import Arrays, Flags, split
from ..checkpointing.engine._step import Step, make_step, reaching
from ..progress import Gauge, Meter


@dataclasses.dataclass(frozen=True)
class Rows:
    """`(size, visits, consts, xs) -> (sums, ys)`, for as many rows as `size` says.

    `visits` is a vector with an entry for each of them: 0 if only this chunk has the
    row, 1 if it is in the next chunk as well, and 2 if it has been in the last. It is
    `None` if no row is in two.

    Attributes:
        f: The function. It closes over no tracers.
        length: How many rows there are in all.
        const_types: The types of `consts`, which are the same for every row.
        x_types: The types of `xs`, of one row.
        x_axes: For each of the `xs`, the axis along which its rows lie.
        y_axes: The same for each of the `ys`.
        shares: For each of the `ys`, whether a row that is in two chunks gets a share
            of its value from both. Otherwise both give it the same value.
        uses_visits: Whether the function depends on `visits`.
        probe: The size of a chunk, and whether it has `visits`, for which to trace
            in order to find out what is returned.
        meter: The progress bars of the map, if it has any.
        is_again: Whether it is run again, so that loops in it show no bars.
        is_guarded: Whether its callbacks close all bars when they raise.
    """

    f: Callable[[int, Any, Arrays, Arrays], tuple[Arrays, Arrays]]
    length: int
    const_types: tuple[Any, ...]
    x_types: tuple[Any, ...]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    shares: Flags
    uses_visits: bool
    probe: tuple[int, bool]
    meter: Meter | None = None
    is_again: bool = False
    is_guarded: bool = False

    def again(self, backward: bool) -> "Rows":
        """The same to be run again: without its bars and those of loops in it.

        Args:
            backward: Whether the bar of its backward sweep is left out, too.
        """
        meter = self.meter
        if meter is not None:
            meter = None if backward else meter.again
        return dataclasses.replace(self, meter=meter, is_again=True)

    @property
    def gauge(self) -> Gauge | None:
        """The bar of this sweep, if it has one."""
        return None if self.meter is None else self.meter.here

    def chunk(self, size: int, has_visits: bool) -> "Chunk":
        """The function, traced on so many rows."""
        return _trace(self, size, has_visits and self.uses_visits)

    @property
    def in_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `consts`, and those of `xs` for all rows."""
        return list(self.const_types), stacked(self.x_types, self.length, self.x_axes)

    @property
    def y_types(self) -> tuple[Any, ...]:
        """The types of `ys`, of one row."""
        size, _ = self.probe
        _, of_chunk = self.chunk(*self.probe).out_types
        return tuple(
            jex.mapped_aval(size, axis, aval)
            for aval, axis in zip(of_chunk, self.y_axes, strict=True)
        )

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `sums`, and those of `ys` for all rows."""
        sums, _ = self.chunk(*self.probe).out_types
        return sums, stacked(self.y_types, self.length, self.y_axes)

    def reached(
        self, consts: Sequence[bool], xs: Sequence[bool], **settings: Any
    ) -> tuple[Flags, Flags]:
        """Which of the outputs depend on the marked inputs, see `reaching`."""
        chunk = self.chunk(*self.probe)
        visits = [False] * chunk.has_visits
        _, outs = reaching(chunk.step, [*visits, *consts], [], xs, **settings)
        return outs[: chunk.num_sums], outs[chunk.num_sums :]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """`(visits, consts, xs) -> (sums, ys)` on the rows of one chunk, traced.

    Attributes:
        step: The traced function. Its consts are `visits`, if any, and `consts`; its
            `y` are `sums` and `ys`.
        has_visits: Whether it has them; otherwise what it is called with is ignored.
        num_sums: How many of its outputs are to be added up over the chunks.
        whole: The program with what no output needs, and which is still traced.
    """

    step: Step
    has_visits: bool
    num_sums: int
    whole: Any

    @property
    def out_types(self) -> tuple[list[Any], list[Any]]:
        """The types of `sums`, and those of `ys`."""
        return split(self.step.y_types, self.num_sums)

    def __call__(self, visits: Any, consts: Arrays, xs: Arrays) -> tuple[list, list]:
        visits = [visits] if self.has_visits else []
        _, outs = self.step([*visits, *consts], [], xs)
        return split(outs, self.num_sums)


@functools.lru_cache(maxsize=256)
def _trace(rows: Rows, size: int, has_visits: bool) -> Chunk:
    visits = [jax.ShapeDtypeStruct((size,), jnp.int8)] if has_visits else []
    num_sums = 0

    def flat(consts: Arrays, _: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        nonlocal num_sums
        visits_, consts = split(consts, len(visits))
        sums, ys = rows.f(size, visits_[0] if visits else None, consts, xs)
        num_sums = len(sums)
        return [], [*sums, *ys]

    xs = stacked(rows.x_types, size, rows.x_axes)
    step = make_step(flat, [*visits, *rows.const_types], [], xs)
    if rows.is_guarded:
        step = step.guarded()
    if rows.is_again:
        step = step.muted(backward=False)
    return Chunk(_without_dead_code(step), has_visits, num_sums, step.jaxpr)


def _without_dead_code(step: Step) -> Step:
    """A derivative needs not all of its primal; XLA would find that out, but later."""
    jaxpr = step.jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), True)
    closed = jex.ClosedJaxpr(live, step.jaxpr.consts)
    return dataclasses.replace(step, jaxpr=closed)


def stacked(types: Sequence[Any], size: int, axes: Sequence[int]) -> list[Any]:
    """The types of so many rows, from those of one."""
    return [
        jex.unmapped_aval(size, axis, aval)
        for aval, axis in zip(types, axes, strict=True)
    ]


def along(rows: Any, axis: int, like: Any) -> Any:
    """A vector of one entry a row, to broadcast against arrays with rows at an axis."""
    return lax.broadcast_in_dim(rows, like.shape, (axis,))
