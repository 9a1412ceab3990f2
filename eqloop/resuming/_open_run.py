"""Opens a call of `Resumable`: what segments get, and what is written down of it."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np

from .._arrays import (
    as_arrays,
    as_length,
    axis_sizes,
    common_length,
    flatten,
    resolve_axes,
)
from .._programs import refuse_refs
from .._types import PRNGKey, PyTree, Value
from ..loops import AbstractScan, Truncate, check_one_key
from ..progress import ProgressBar, host_bar
from ._disk import locked, make_folder
from ._in_words import (
    callbacks_in_words,
    constants_in_words,
    function_in_words,
    leaves_in_words,
    program_in_words,
    text_of,
)
from ._processes import is_leader
from ._run_record import RECORD, RunRecord
from ._segment_call import SegmentCall
from ._segment_inputs import SegmentInputs, Segments, key_table
from ._sources import CalledSource, StoredSource, scanned_axes, stand_ins
from ._state_folder import StateFolder
from ._status import CARRIES, YS
from ._sweep import SegmentSweep, row_files

_NAME = "Resumable"
_logger = logging.getLogger("eqloop")


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRun:
    """A call, all of whose arguments are known to be right.

    Attributes:
        directory: Where everything is stored.
        record: What it is called with, in words.
        init: The carry that the user gave.
    """

    call: SegmentCall
    directory: Path
    record: RunRecord
    init: PyTree

    @functools.cached_property
    def forward(self) -> SegmentSweep:
        """The loop itself."""
        call, carry = self.call, self.call.carry
        size = call.inputs.segments.size
        run = lambda k, carry, xs, beside: call.program(size(k), xs, carry, beside)
        states = self.directory / CARRIES, carry.names, carry.types, call.shardings
        rows = row_files(self.directory / YS, call.ys.types)
        given = call.inputs, call.start, StateFolder(*states), rows, call.y_axes
        return SegmentSweep(run, *given)

    @property
    def segments(self) -> Segments:
        """How the loop is cut."""
        return self.call.inputs.segments

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Has the directory for this run alone."""
        # Before anything is made in somebody else's.
        RunRecord.of_directory(self.directory)
        if is_leader():
            make_folder(self.directory)
        with locked(self.directory) if is_leader() else contextlib.nullcontext():
            about = self.directory / RECORD, self.record, self.directory / YS
            self.forward.begin(*about)
            yield

    def run_forward(
        self, keep: int | None, progress: ProgressBar | None, *, in_memory: bool
    ) -> tuple[PyTree, PyTree]:
        """Runs what is left of the loop, and returns what it returns."""
        done, length = self.forward.done, self.segments.length
        self.says_what_is_there(done, "run")
        with host_bar(_NAME, progress, length, done) as move:
            moved = lambda done, *made: move(done, self._label(done, *made))
            self.forward.go_on(keep, moved)
        carry = self.call.last_carry.join(self.forward.result)
        return carry, self.call.ys.join(self._read_ys(in_memory=in_memory))

    def says_what_is_there(self, done: int, what: str) -> None:
        """Says in a line from where a run goes on that was begun before."""
        length = self.segments.length
        if done and is_leader():
            how = f"goes on after {done}" if done < length else "has all"
            where = f"{how} of {length} steps that were {what} before"
            _logger.warning(f"{_NAME} {where}, by what is in {self.directory}")

    def _read_ys(self, *, in_memory: bool) -> list[Value]:
        """What the steps returned: arrays of JAX, or memory maps."""
        arrays = [file.read() for file in self.forward.rows]
        return list(map(jnp.array, arrays)) if in_memory else arrays

    def _label(self, done: int, carry: PyTree, ys: PyTree) -> Callable[[PyTree], str]:
        """What makes the text before a bar from the user's function."""
        call = self.call
        last = 0 if self.segments.reverse else -1

        def label(desc: Callable[[int, PyTree, PyTree], str]) -> str:
            pairs = zip(map(np.asarray, ys), call.y_axes, strict=True)
            y = [x if axis is None else x.take(last, axis) for x, axis in pairs]
            tree = call.carry.rest.join(list(map(np.asarray, carry)))
            return desc(done - 1, tree, call.ys.rest.join(y))

        return label


def open_run(
    scan: AbstractScan[Any, Any],
    every: int,
    directory: Path,
    settings: Mapping[str, Any],
    init: PyTree,
    xs: PyTree,
    length: SupportsIndex | None,
    key: PRNGKey | None,
) -> OpenedRun:
    """Opens a call."""
    refuse_refs(_NAME, (init, xs), "(init, xs)")
    if key is not None:
        check_one_key(_NAME, key)
    scan, init = as_arrays(scan), as_arrays(init)
    f_axes = resolve_axes(_NAME, scan.f, scan.f_axes, tree_name="f", spec_name="f_axes")
    sizes = axis_sizes(scan.f, "f", f_axes)
    axes = None if callable(xs) else scanned_axes(xs, scan.in_axes)
    if axes is not None:
        sizes |= axis_sizes(stand_ins(xs), "xs", axes)
    length = common_length(_NAME, sizes, as_length(_NAME, length))
    segments = Segments(length, every, scan.reverse)
    if axes is None:
        x_source = CalledSource(xs, segments.bounds(0), scan.in_axes)
    else:
        x_source = StoredSource(xs, "xs", axes)
    leaves, _ = flatten(scan)
    others = [None] * (len(leaves) - len(f_axes))
    inputs = SegmentInputs(
        segments,
        StoredSource(scan, "scan", [*f_axes, *others]),
        x_source,
        key,
        key_table(key, length) if key is not None and scan.split_keys else None,
        scan.backward.every if isinstance(scan.backward, Truncate) else None,
    )
    call = SegmentCall.open(inputs, init)
    made_by = x_source.made_by
    own = {
        f"scan.{field.name}": text_of(getattr(scan, field.name))
        for field in dataclasses.fields(scan)
        if field.name not in ("f", "progress")
    }
    record = RunRecord(
        length=segments.length,
        settings={**settings, "scan": type(scan).__name__} | own,
        arguments=leaves_in_words(scan.f, "f", f_axes)
        | leaves_in_words(init, "init", [None] * len(flatten(init)[0]))
        | leaves_in_words(x_source.tree, "xs", x_source.tree_axes)
        | leaves_in_words(key, "key", [None]),
        constants=constants_in_words(call.segment_program, "f"),
        functions=callbacks_in_words(call.segment_program, "f", has_rules=False)
        | ({} if made_by is None else {"xs": function_in_words(made_by, False)}),
        program=program_in_words(call.segment_program, has_rules=False),
        files=_files_in_words(call),
    )
    return OpenedRun(call, directory, record, init)


def _files_in_words(call: SegmentCall) -> list[dict[str, Any]]:
    """The files of the `ys`, for whoever reads them without eqloop."""
    whole = zip(call.ys.names, call.ys.types, call.y_axes, strict=True)
    return [
        {"path": name, "file": f"{YS}/{i}.npy", "dtype": str(aval.dtype)}
        | {"shape": [*aval.shape], "axis": axis}
        for i, (name, aval, axis) in enumerate(whole)
    ]
