"""One segment of a scan as a compiled function of arrays, and its gradient."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    Arrays,
    Axis,
    added,
    as_array,
    axes_tree,
    flatten,
    is_dynamic,
    is_weak,
    pick,
    plain,
    put,
    split,
)
from .._calls import enforce_annotations
from .._programs import is_ref
from .._types import PyTree, Value
from ..checkpointing import AbstractSchedule, Layout, LoopSpec, Undo
from ..loops import AbstractScan, cut_before, refuse_cuts
from ._segments import Segments
from ._sources import AbstractSource, resized
from ._state_folder import sharding_of
from ._tree_form import TreeForm


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentCall:
    """A segment of a scan, as a function of plain arrays.

    Attributes:
        scan: The form of the scan, of which some arrays may be scanned.
        xs: The form of `xs`.
        start: The carry that the loop starts with.
        carry: The form of the carry where a segment starts.
        last_carry: The form of the carry that is returned.
        ys: The form of what the steps return; its types are those of the whole loop.
        y_axes: The axes along which they are stacked; `None` for what is the same for
            all steps, and is not.
        traced: The program of a segment, whose inputs are all arrays that it gets.
    """

    segments: Segments
    scan: TreeForm
    xs: TreeForm
    start: list[jax.Array]
    carry: TreeForm
    last_carry: TreeForm
    ys: TreeForm
    y_axes: tuple[Axis, ...]
    traced: jex.ClosedJaxpr

    @classmethod
    def open(
        cls,
        segments: Segments,
        scan: AbstractSource,
        init: PyTree,
        xs: AbstractSource,
        beside: Callable[[int], PyTree],
    ) -> Self:
        """Traces a segment, and finds out what it carries and returns."""

        first = TreeForm.of(init, "init")

        def forms(steps: int) -> tuple[TreeForm, TreeForm, jex.ClosedJaxpr]:
            found: list[Value] = []

            def run(
                scan_arrays: PyTree, carry: Arrays, x_arrays: PyTree, beside: PyTree
            ) -> PyTree:
                trees = scan.form.join(scan_arrays), first.join(carry)
                out = call_scan(*trees, xs.form.join(x_arrays), beside, steps)
                found.extend(map(TreeForm.of, out, ("carry", "ys")))
                return [form.take(x) for form, x in zip(found, out, strict=True)]

            given = scan.types(steps), first.take(init), xs.types(steps), beside(steps)
            traced = jax.make_jaxpr(run)(*given)
            _refuse_captured_refs(traced)
            return found[0], found[1], traced

        # What is stacked is as long as the loop; the axis is the one that grows.
        steps = max(1, min(segments.every, segments.length))
        (empty, none, _), (after, some, traced) = forms(0), forms(steps)
        carry = after if segments.length else empty
        pairs = zip(none.types, some.types, strict=True)
        axes = tuple(_stacked_axis(a.shape, b.shape) for a, b in pairs)
        whole = tuple(
            resized(aval, axis, segments.length)
            for aval, axis in zip(some.types, axes, strict=True)
        )
        start, weak = _starting(init, carry)
        return cls(
            segments,
            scan.form,
            xs.form,
            start,
            dataclasses.replace(carry, weak=weak),
            carry,
            dataclasses.replace(some, types=whole),
            axes,
            traced,
        )

    @property
    def shardings(self) -> list[Value]:
        """How each array of the carry is spread; `None` for one device."""
        return list(map(sharding_of, self.start))

    def run(
        self, steps: int, scan: Arrays, xs: Arrays, carry: Arrays, beside: PyTree
    ) -> tuple[list[Value], list[Value]]:
        """Runs a segment of so many steps."""
        trees = (self.scan.join(scan), self.carry.join(carry), self.xs.join(xs))
        new_carry, ys = call_scan(*trees, beside, steps)
        after = _kept_in_place(self.last_carry.take(new_carry), self.shardings)
        return after, self.ys.take(ys)

    @functools.cached_property
    def program(self) -> Callable[..., tuple[list[Value], list[Value]]]:
        """`run`, compiled for each number of steps."""
        return jax.jit(self.run, static_argnums=0)

    @functools.cached_property
    def reverse_program(self) -> Callable[..., PyTree]:
        """`reverse`, compiled for each number of steps."""
        return jax.jit(self.reverse, static_argnums=(0, 1))

    def reverse(
        self,
        steps: int,
        wanted: "Wanted",
        inputs: tuple[Arrays, Arrays, Arrays],
        beside: PyTree,
        cts: tuple[Arrays, Arrays],
        sums: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Takes cotangents back through a segment of so many steps."""
        # `cts` are those of the inexact arrays of the carry and of the outputs, with
        # `None` for zeros. Returned are those of the carry before, the sums with what
        # is added, and those of what only this segment gets.
        scan, xs, carry = inputs

        def run(carry_part: Arrays, parts: Arrays) -> tuple[Arrays, Arrays]:
            new_scan, new_xs = wanted.put(scan, xs, parts)
            new_carry = put(carry, self.carry.inexact, carry_part)
            carry_out, ys = self.run(steps, new_scan, new_xs, new_carry, beside)
            return pick(carry_out, self.carry.inexact), pick(ys, self.ys.inexact)

        parts = pick(carry, self.carry.inexact), wanted.pick(scan, xs)
        (_, ys), pull = jax.vjp(run, *parts)
        ct_carry, ct_ys = cts
        pairs = zip(ct_ys, ys, strict=True)
        full = [jnp.zeros_like(y) if ct is None else ct for ct, y in pairs]
        before, found = pull((list(ct_carry), full))
        own, shared = wanted.split(found)
        sums = added(sums, shared)
        places, shared_places = split(wanted.shardings, len(before))
        return _kept_in_place(before, places), _kept_in_place(sums, shared_places), own


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which arrays of a scan and of `xs` cotangents are wanted of.

    Attributes:
        scan: A mark for each array of the scan.
        xs: A mark for each array of `xs`.
        own: For each marked array, whether each segment gets a part of its own.
        shardings: How the cotangents of the carry are spread over devices, and the sums
            of what all segments share.
    """

    scan: tuple[bool, ...]
    xs: tuple[bool, ...]
    own: tuple[bool, ...]
    shardings: tuple[Any, ...] = ()

    def pick(self, scan: Arrays, xs: Arrays) -> list[Value]:
        """The arrays that are marked."""
        return [*pick(scan, self.scan), *pick(xs, self.xs)]

    def put(self, scan: Arrays, xs: Arrays, marked: Arrays) -> tuple[PyTree, PyTree]:
        """The arrays, with the marked ones replaced."""
        count = sum(self.scan)
        return put(scan, self.scan, marked[:count]), put(xs, self.xs, marked[count:])

    def split(self, marked: Sequence[Value]) -> tuple[list[Value], list[Value]]:
        """Of the marked arrays those of one segment, and those that all share."""
        return pick(marked, self.own), pick(marked, [not flag for flag in self.own])

    def join(self, own: Arrays, shared: Arrays) -> tuple[list[Value], list[Value]]:
        """From what `split` gives to lists for the scan and `xs`, `None` elsewhere."""
        blank = [None] * len(self.own)
        marked = put(blank, self.own, own)
        marked = put(marked, [not flag for flag in self.own], shared)
        nothing = [None] * len(self.scan), [None] * len(self.xs)
        return self.put(*nothing, marked)


def call_scan(
    scan: AbstractScan[Any, Any], carry: PyTree, xs: PyTree, beside: PyTree, steps: int
) -> tuple[PyTree, PyTree]:
    """Calls a scan for some steps of a longer loop."""
    # `beside` are the keys of the steps, or that of all; and before which of them the
    # carry is cut. Either may be `None`.
    keys, cuts = beside
    shared, own = (None, keys) if scan.split_keys else (keys, None)
    if own is None and cuts is None:
        return scan(carry, xs, length=steps, key=shared)
    schedule = scan.schedule
    if schedule is not None and schedule.undo is not None:
        refuse_cuts(type(scan).__name__, scan.backward)
        schedule = _OfPositioned(schedule)
    positioned = dataclasses.replace(
        scan,
        schedule=schedule,
        in_axes=(axes_tree(scan.in_axes), 0),
        f_transform=lambda f: _positioned(_transformed(scan, f)),
        # Which would take the first of these steps for that of the loop.
        backward=scan.backward if cuts is None else None,
    )
    return positioned(carry, (xs, (own, cuts)), length=steps, key=shared)


def _transformed(scan: AbstractScan[Any, Any], f: PyTree) -> Callable[..., PyTree]:
    return f if scan.f_transform is None else scan.f_transform(f)


def _positioned(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`f` as a step that is given its key, and whether it is cut, among the `xs`."""
    f = enforce_annotations(f)

    def step(carry: PyTree, x: PyTree, **keywords: PyTree) -> PyTree:
        x, (key, is_cut) = x
        if is_cut is not None:
            carry = cut_before(carry, is_cut)
        return f(carry, x, **keywords if key is None else {"key": key})

    return step


@dataclasses.dataclass(frozen=True)
class _OfPositioned(AbstractSchedule):
    """A schedule that undoes steps, for those that are given more among the `xs`."""

    schedule: AbstractSchedule

    @property
    def undo(self) -> Undo | None:
        undo = self.schedule.undo
        return undo and Undo(_undoing(undo.inverse), undo.save and _undoing(undo.save))

    def layout(self, loop: LoopSpec) -> Layout:
        return self.schedule.layout(loop)


def _undoing(f: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """What undoes a step, or saves for it, of a step that is given its key so."""

    def of_positioned(
        carry: PyTree, x: PyTree, *saved: PyTree, **keywords: PyTree
    ) -> PyTree:
        x, (key, _) = x
        return f(carry, x, *saved, **keywords if key is None else {"key": key})

    return of_positioned


def _refuse_captured_refs(program: jex.ClosedJaxpr) -> None:
    if any(map(is_ref, program.consts)):
        raise TypeError(
            "Resumable: f closes over a reference (`jax.new_ref`), of which nothing is "
            "stored: what it holds would be lost with the process. Have the carry hold "
            "it instead."
        )


def _kept_in_place(arrays: Arrays, shardings: Sequence[Value]) -> list[Value]:
    """Arrays that are where they were, or each segment might need another program."""
    return [
        x if sharding is None else lax.with_sharding_constraint(x, sharding)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]


def _starting(
    init: PyTree, carry: TreeForm
) -> tuple[list[jax.Array], tuple[bool, ...]]:
    """The arrays of the first carry, and which of them steps know as weakly typed."""
    # Of the leaves of `init` some are numbers that steps change, and so are arrays; and
    # weakly typed ones may have to be of a wider dtype.
    leaves = pick(flatten(init)[0], carry.rest.taken)
    arrays, weak = [], []
    for leaf, aval in zip(leaves, carry.types, strict=True):
        array = as_array(leaf) if is_dynamic(leaf) else jnp.asarray(leaf)
        first = plain(array)
        weak.append(is_weak(array) and first.dtype == aval.dtype)
        arrays.append(first if first.dtype == aval.dtype else first.astype(aval.dtype))
    return arrays, tuple(weak)


def _stacked_axis(none: tuple[int, ...], some: tuple[int, ...]) -> Axis:
    grown = [i for i, (a, b) in enumerate(zip(none, some, strict=True)) if a != b]
    return grown[0] if grown else None
