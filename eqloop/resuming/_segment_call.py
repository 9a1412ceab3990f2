"""One segment of a scan as a compiled function of arrays, and its gradient."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

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
from ._segment_inputs import SegmentInputs
from ._sources import resized
from ._state_folder import sharding_of
from ._tree_form import TreeForm


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentCall:
    """A segment of a scan, as a function of plain arrays.

    Attributes:
        start: The carry that the loop starts with.
        carry: The form of the carry where a segment starts.
        last_carry: The form of the carry that is returned.
        ys: The form of what the steps return; its types are those of the whole loop.
        y_axes: The axes along which they are stacked; `None` for what is the same for
            all steps, and is not.
        segment_program: The program of a segment, of all arrays that it gets.
    """

    inputs: SegmentInputs
    start: list[jax.Array]
    carry: TreeForm
    last_carry: TreeForm
    ys: TreeForm
    y_axes: tuple[Axis, ...]
    segment_program: jex.ClosedJaxpr

    @classmethod
    def open(cls, inputs: SegmentInputs, init: PyTree) -> Self:
        """Traces a segment, and finds out what it carries and returns."""
        first, segments = TreeForm.of(init, "init"), inputs.segments

        def forms(steps: int) -> tuple[TreeForm, TreeForm, jex.ClosedJaxpr]:
            found: list[Value] = []

            def run(arrays: Arrays, carry: Arrays, beside: PyTree) -> PyTree:
                out = _called(inputs, steps, arrays, first.join(carry), beside)
                found.extend(map(TreeForm.of, out, ("carry", "ys")))
                return [form.take(x) for form, x in zip(found, out, strict=True)]

            arrays, beside = inputs.types(steps)
            traced = jax.make_jaxpr(run)(arrays, first.take(init), beside)
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
        first = dataclasses.replace(carry, weak=weak)
        ys = dataclasses.replace(some, types=whole)
        return cls(inputs, start, first, carry, ys, axes, traced)

    @property
    def shardings(self) -> list[Value]:
        """How each array of the carry is spread; `None` for one device."""
        return list(map(sharding_of, self.start))

    def run(
        self, steps: int, arrays: Arrays, carry: Arrays, beside: PyTree
    ) -> tuple[list[Value], list[Value]]:
        """Runs a segment of so many steps."""
        tree = self.carry.join(carry)
        new_carry, ys = _called(self.inputs, steps, arrays, tree, beside)
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
        inputs: tuple[Arrays, Arrays, PyTree],
        cts: tuple[Arrays, Arrays],
        sums: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Takes cotangents back through a segment of so many steps."""
        # `cts` are those of the inexact arrays of the carry and of the outputs, with
        # `None` for zeros. Returned are those of the carry before, the sums with what
        # is added, and those of what only this segment gets.
        arrays, carry, beside = inputs

        def run(part: Arrays, own: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
            new = put(put(arrays, wanted.own, own), wanted.shared, shared)
            new_carry = put(carry, self.carry.inexact, part)
            carry_out, ys = self.run(steps, new, new_carry, beside)
            return pick(carry_out, self.carry.inexact), pick(ys, self.ys.inexact)

        parts = pick(arrays, wanted.own), pick(arrays, wanted.shared)
        (_, ys), pull = jax.vjp(run, pick(carry, self.carry.inexact), *parts)
        ct_carry, ct_ys = cts
        pairs = zip(ct_ys, ys, strict=True)
        full = [jnp.zeros_like(y) if ct is None else ct for ct, y in pairs]
        before, own, shared = pull((list(ct_carry), full))
        sums = added(sums, shared)
        places, shared_places = split(wanted.shardings, len(before))
        return _kept_in_place(before, places), _kept_in_place(sums, shared_places), own


class Wanted(NamedTuple):
    """Of which arrays that segments get cotangents are wanted.

    Attributes:
        own: A mark for each of those of which each segment gets a part of its own.
        shared: A mark for each of those that all segments share.
        shardings: How the cotangents of the carry are spread over devices, and the sums
            of what all segments share.
    """

    own: tuple[bool, ...]
    shared: tuple[bool, ...]
    shardings: tuple[Any, ...] = ()


def _called(
    inputs: SegmentInputs, steps: int, arrays: Arrays, carry: PyTree, beside: PyTree
) -> tuple[PyTree, PyTree]:
    """Calls the scan for some steps of the loop."""
    scan, xs = inputs.scan.form, inputs.xs.form
    of_scan, of_xs = split(arrays, len(scan.types))
    return _call_scan(scan.join(of_scan), carry, xs.join(of_xs), beside, steps)


def _call_scan(
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
    arrays = [as_array(x) if is_dynamic(x) else jnp.asarray(x) for x in leaves]
    pairs = list(zip(arrays, map(plain, arrays), carry.types, strict=True))
    weak = tuple(is_weak(x) and first.dtype == t.dtype for x, first, t in pairs)
    return [first.astype(t.dtype) for _, first, t in pairs], weak


def _stacked_axis(none: tuple[int, ...], some: tuple[int, ...]) -> Axis:
    grown = [i for i, (a, b) in enumerate(zip(none, some, strict=True)) if a != b]
    return grown[0] if grown else None
