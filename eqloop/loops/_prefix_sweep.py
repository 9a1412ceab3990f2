"""Prefixes under an associative function, with the memory of one chunk.

The prefix of an element is what the function makes of it and of all elements before it.
So the prefixes of a chunk are found from the prefix of the element before the chunk,
and these are all that one chunk needs of another. In reverse they are at hand, as they
are the results: nothing else is stored.

The first prefix is the first element. The others are cut into chunks of one size, the
last of which overlaps the one before it if it must: the prefixes there are found twice,
and the first ones are dropped.
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    Arrays,
    Flags,
    SumType,
    added,
    along,
    cast_like,
    closed_under,
    instantiated,
    is_inexact,
    pick,
    put,
    split,
    sum_type,
    tangent_types,
    with_batch_axis,
    zero_cotangent,
)
from .._programs import (
    Doubled,
    Formula,
    Static,
    batched,
    pruned,
    pulled,
    pushed,
    reached,
    run,
    settled,
)
from .._types import BatchAxis, Index, PyTree, Value
from ..checkpointing import Step

Arguments = tuple[Arrays, Arrays]


@dataclasses.dataclass(frozen=True)
class PrefixSweep:
    """Goes through the elements chunk by chunk.

    Attributes:
        step: The prefixes of a chunk: its `x` are the prefix before the chunk, of
            length one along each axis, and the chunk; it has no carry.
        axes: The axis of each array along which its elements are.
        size: How many of them are in a chunk.
        reverse: Whether to go from the last element to the first.
        sums: The type in which cotangents of narrower consts are added up.
    """

    step: Step
    axes: tuple[int, ...]
    length: int
    size: int
    reverse: bool
    sums: SumType

    @property
    def count(self) -> int:
        """How many chunks there are, after the first element."""
        return -(-(self.length - 1) // self.size)

    @property
    def overlaps(self) -> bool:
        """Whether the last chunk overlaps the one before it."""
        return self.count * self.size > self.length - 1

    def start(self, chunk: Index) -> Value:
        """The smallest index in a chunk."""
        start = jnp.minimum(1 + chunk * self.size, self.length - self.size)
        return self.length - self.size - start if self.reverse else start

    def before(self, chunk: Index) -> Index:
        """The index of the element that comes before a chunk."""
        start = self.start(chunk)
        return start + self.size if self.reverse else start - 1

    def end(self, chunk: Index) -> Index:
        """The index of the last element of a chunk that is not in the next one too."""
        # In range for the last chunk, too: XLA does not clamp the index where it merges
        # a slice with another slice.
        very_last = self.length - 1 - self.first
        return jnp.where(chunk == self.count - 1, very_last, self.before(chunk + 1))

    @property
    def first(self) -> int:
        """The index of the element that all others come after."""
        return self.length - 1 if self.reverse else 0

    def parts(self, arrays: Arrays, start: Index, size: int) -> list[Value]:
        """`arrays[start : start + size]`, along their axes."""
        return [
            lax.dynamic_slice_in_dim(x, start, size, axis)
            for x, axis in zip(arrays, self.axes, strict=True)
        ]

    def put(self, arrays: Arrays, parts: Arrays, start: Index) -> list[Value]:
        """The arrays with parts of them replaced; XLA does it in place."""
        return [
            lax.dynamic_update_slice_in_dim(x, part, start, axis)
            for x, part, axis in zip(arrays, parts, self.axes, strict=True)
        ]

    def add(
        self, arrays: Arrays, parts: Arrays, start: Index, size: int
    ) -> list[Value]:
        """The same with parts added to."""
        there = self.parts(arrays, start, size)
        return self.put(arrays, added(there, parts), start)

    def run(self, consts: Arrays, xs: Arrays) -> list[Value]:
        """The prefixes."""

        def body(chunk: Index, state: PyTree) -> PyTree:
            ys, before = state
            start, end = self.start(chunk), self.end(chunk)
            x = [*before, *self.parts(xs, start, self.size)]
            _, parts = self.step(consts, [], x)
            # Reading it from `ys`, which are written in place, would copy them.
            before = self.parts(parts, end - start, 1)
            return self.put(ys, parts, start), before

        # The first prefix is there already, and the others are written over.
        state = list(xs), self.parts(xs, self.first, 1)
        return lax.fori_loop(0, self.count, body, state)[0]

    def pull(
        self, inputs: Arguments, ys: Arrays, cts: Arrays, marks: tuple[Flags, Flags]
    ) -> tuple[list[Value], list[Value]]:
        """The cotangents of the marked inputs, from those of the inexact prefixes."""
        consts, xs = inputs
        moving = tuple(map(is_inexact, ys))
        inexact = dataclasses.replace(self, axes=tuple(pick(self.axes, moving)))
        marked = dataclasses.replace(self, axes=tuple(pick(self.axes, marks[1])))
        wanted = (*marks[0], *moving, *marks[1])
        counts = sum(marks[0]), sum(moving)
        back = pulled(self.step.jaxpr, (wanted,), (moving,), self.sums)

        def body(turn: Index, state: PyTree) -> PyTree:
            ct_consts, ct_end, ct_xs = state
            chunk = self.count - 1 - turn
            start, end = self.start(chunk), self.end(chunk)
            ct_parts = inexact.owned(inexact.parts(cts, start, self.size), chunk)
            ct_parts = inexact.add(ct_parts, ct_end, end - start, 1)
            before = self.parts(ys, self.before(chunk), 1)
            x = [*before, *self.parts(xs, start, self.size)]
            new = split(run(back, *consts, *x, *ct_parts), *counts)
            ct_xs = marked.add(ct_xs, new[2], start, self.size)
            return added(ct_consts, new[0]), new[1], ct_xs

        marked_consts = pick(consts, marks[0])
        start = (
            _zero_cts(marked_consts, self.sums),
            _zero_cts(inexact.parts(pick(ys, moving), 0, 1)),
            _zero_cts(pick(xs, marks[1])),
        )
        ct_consts, ct_end, ct_xs = lax.fori_loop(0, self.count, body, start)
        # The first prefix is the first element itself.
        ct_first = added(inexact.parts(cts, self.first, 1), ct_end)
        ct_first = pick(ct_first, pick(marks[1], moving))
        ct_consts = list(map(cast_like, ct_consts, marked_consts))
        return ct_consts, marked.add(ct_xs, ct_first, self.first, 1)

    def owned(self, cts: Arrays, chunk: Index) -> list[Value]:
        """Cotangents of the prefixes in a chunk, zero for those that are dropped."""
        if not self.overlaps:
            return list(cts)
        start, end = self.start(chunk), self.end(chunk)
        index = start + jnp.arange(self.size, dtype=start.dtype)
        own = index >= end if self.reverse else index <= end
        return [
            jnp.where(along(own, (axis,), ct), ct, 0)
            for ct, axis in zip(cts, self.axes, strict=True)
        ]

    def pushed(self, moves: Flags) -> "PrefixSweep":
        """The same with tangents, of marked consts and of all elements."""
        moving = tuple(map(is_inexact, self.step.y_types))
        jaxpr = pushed(self.step.jaxpr, (moves, moving, moving), (moving,))
        num_consts = self.step.num_consts + sum(moves)
        return dataclasses.replace(
            self,
            step=Step(pruned(jaxpr), num_consts, 0),
            axes=(*self.axes, *pick(self.axes, moving)),
        )

    def batched(self, axis_data: BatchAxis, const_dims: Sequence[int | None]) -> Self:
        """The sweep under `vmap`, whose arrays are batched along their first axis."""
        in_dims = (*const_dims, *[0] * len(self.step.x_types))
        out_dims = (0,) * len(self.step.y_types)
        jaxpr = batched(self.step.jaxpr, axis_data, in_dims, out_dims)
        return dataclasses.replace(
            self,
            step=dataclasses.replace(self.step, jaxpr=pruned(jaxpr)),
            axes=tuple(axis + 1 for axis in self.axes),
        )


class Prefixes(Formula):
    """`(consts, xs) -> ys`, by a sweep."""

    sweep: PrefixSweep

    def __init__(self, sweep: PrefixSweep, in_avals: Arguments):
        self.in_avals = in_avals
        self.out_aval = list(self.in_avals[1])
        self.params = {"sweep": sweep}
        self.effects = sweep.step.jaxpr.effects
        super().__init__()

    def expand(self, *inputs: PyTree) -> PyTree:
        return self.sweep.run(*inputs)

    def doubled(self, moves: Flags) -> Doubled:
        consts, xs = self.in_avals
        moving, inexact = moves[: len(consts)], tuple(map(is_inexact, xs))
        in_avals = (
            [*consts, *tangent_types(consts, moving)],
            [*xs, *tangent_types(xs, inexact)],
        )
        formula = Prefixes(self.sweep.pushed(moving), in_avals)
        return Doubled.of(formula, (moving, inexact), (inexact,))

    def sweep_forward(
        self, perturbed: PyTree, *inputs: PyTree
    ) -> tuple[PyTree, PyTree, PyTree]:
        marks = self._marks(perturbed)
        ys = self.settled(marks, reverse=True)(*inputs)
        return ys, (Static(marks), inputs, ys), self.moves_out(marks)

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> tuple[PyTree, PyTree]:
        perturbed, inputs, ys = residuals
        marks = self.in_tree.unflatten(perturbed.value)
        return self._pull(marks, inputs, ys, cts), None

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self._pull(perturbed, inputs, self(*inputs), cts)

    def settled(self, moves: Flags, reverse: bool) -> Self:
        step = self.sweep.step
        # Any prefix may move what comes after it.
        inexact = tuple(map(is_inexact, step.x_types))
        marks = (*moves[: step.num_consts], *inexact)
        step = step.rewritten(lambda jaxpr: settled(jaxpr, marks, reverse))
        same = step is self.sweep.step
        sweep = self.sweep if same else dataclasses.replace(self.sweep, step=step)
        return self.with_params(sweep=sweep)

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        if axis_name is not None:  # a batch has all outputs batched
            return super().reached_out(marks, axis_name)
        consts, xs = self.in_tree.unflatten(marks)
        program = self.sweep.step.jaxpr
        # A prefix depends on the one before it, and on an element, which stand for
        # each other: the first element is a prefix.
        outs = lambda xs: reached(program, (*consts, *xs, *xs))
        return list(closed_under(xs, outs))

    @property
    def jaxprs(self) -> list[jex.ClosedJaxpr]:
        return [self.sweep.step.jaxpr]

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        (consts, xs), (const_dims, x_dims) = args, dims
        pairs = zip(xs, x_dims, strict=True)
        xs = [with_batch_axis(x, dim, axis_data) for x, dim in pairs]
        sweep = self.sweep.batched(axis_data, const_dims)
        args = (list(consts), xs)
        formula = Prefixes(sweep, jax.tree.map(jax.typeof, args))
        return formula, args, [0] * len(xs)

    def _pull(
        self, perturbed: PyTree, inputs: PyTree, ys: PyTree, cts: PyTree
    ) -> PyTree:
        marks = jax.tree.map(
            lambda mark, aval: bool(mark) and is_inexact(aval), perturbed, self.in_avals
        )
        flags = tuple(marks[0]), tuple(marks[1])
        cts = instantiated(pick(cts, list(map(is_inexact, ys))))
        pulled = self.sweep.pull(inputs, ys, cts, flags)
        return tuple(map(put, self.zero_cts(), flags, pulled))


def _zero_cts(arrays: Arrays, sums: SumType = None) -> list[Value]:
    types = [sum_type(jax.typeof(x), sums) for x in arrays]
    return instantiated(list(map(zero_cotangent, types)))
