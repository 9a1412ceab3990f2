"""The gradient of a run: by what, from which cotangents, and back through segments."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    Arrays,
    Axis,
    as_arrays,
    cast_like,
    chosen_sum_type,
    describe,
    flatten,
    is_inexact,
    is_inexact_scalar,
    is_narrow,
    is_scalar,
    partition,
    pick,
    put,
    split,
    structure_differences,
    sum_dtype,
)
from .._programs import inputs_read
from .._types import PyTree, Value
from ..progress import ProgressBar, host_bar
from ._in_words import array_in_words, callbacks_in_words, program_in_words
from ._open_run import OpenedRun
from ._run_record import RunRecord
from ._segment_call import Wanted
from ._sources import StoredSource
from ._state_folder import StateFolder, placed, sharding_of
from ._status import COTANGENTS, GRADIENT, OF_SCANNED
from ._sweep import SegmentSweep, row_files
from ._tree_form import TreeForm


class EndCotangents(NamedTuple):
    """What a gradient starts from.

    Attributes:
        last: Those of the inexact arrays of the last carry.
        ys: Those of the inexact arrays that the steps returned; `None` for zeros.
        loss: A digest of the loss that they are of; empty if they were given.
    """

    last: list[Value]
    ys: list[Value]
    loss: str = ""


_NAME = "Resumable"
_REMOVE = (
    "Remove that folder to take this one: the loop itself is not run again for it."
)
_ARGUMENTS = {"f": "f", "init": "init", "xs": "xs", 0: "init", 1: "xs"}


def as_wrt(argnums: PyTree) -> str | tuple[str, ...]:
    """The names of what is differentiated, from what a user gave as `argnums`.

    >>> as_wrt("f"), as_wrt(("f", 0))
    ('f', ('f', 'init'))
    """
    several = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for argnum in several:
        if isinstance(argnum, bool) or argnum not in _ARGUMENTS:
            raise ValueError(
                f'Resumable: `argnums` must be "f" for the parameters of the scan, '
                f'"init" or 0, "xs" or 1, or a tuple of these, not {argnums!r}.'
            )
    names = tuple(_ARGUMENTS[argnum] for argnum in several)
    if len(set(names)) < max(len(names), 1):
        raise ValueError(
            f"Resumable: `argnums` is {argnums!r}: each argument can be given once, "
            f"and at least one must be."
        )
    return names if isinstance(argnums, tuple | list) else names[0]


@dataclasses.dataclass(frozen=True, eq=False)
class GradientCall:
    """The gradient of a run whose loop has come to its end.

    Attributes:
        wrt: By what it is differentiated: one of `"f"`, `"init"`, `"xs"`, or several.
    """

    run: OpenedRun
    wrt: str | tuple[str, ...]

    def differentiate(
        self, loss: Callable[..., PyTree], has_aux: bool
    ) -> tuple[PyTree, EndCotangents]:
        """What a loss returns, and its cotangents of what the loop returns."""
        of_carry, of_ys = self.run.call.last_carry, self.run.call.ys
        kept: list[Value] = []

        def call(carry: Arrays, ys: Arrays) -> tuple[PyTree, list[Value]]:
            out = loss(of_carry.join(carry), of_ys.join(ys))
            value, aux = _pair(out) if has_aux else (out, None)
            arrays, rest = partition(as_arrays(aux))
            kept.append(rest)
            return _loss_value(value), arrays

        program = jax.make_jaxpr(call)(list(of_carry.types), list(of_ys.types))
        # Those of the `ys` that the function does not use are not asked for.
        every = [True] * len(program.out_avals)
        used = inputs_read(program, every)[len(of_carry.types) :]
        files = pick(self.run.forward.rows, used)
        nonzeros = [a and b for a, b in zip(used, of_ys.inexact, strict=True)]

        @jax.jit
        def gradient(carry: Arrays, given: Arrays) -> PyTree:
            # What is not used is not computed either.
            blanks = [jnp.zeros(aval.shape, aval.dtype) for aval in of_ys.types]
            whole = put(blanks, used, given)
            parts = pick(carry, of_carry.inexact), pick(whole, nonzeros)

            def run(parts: PyTree) -> PyTree:
                full = put(carry, of_carry.inexact, parts[0])
                return call(full, put(whole, nonzeros, parts[1]))

            value, pull, aux = jax.vjp(run, parts, has_aux=True)
            return value, aux, pull(jnp.ones_like(value))[0]

        given = [jnp.array(file.read()) for file in files]
        value, arrays, (last, moved) = gradient(self.run.forward.result, given)
        ys = pick(put([None] * len(nonzeros), nonzeros, moved), of_ys.inexact)
        out = (value, kept[-1].join(arrays)) if has_aux else value
        # The program, and what it calls back.
        words = program_in_words(program, has_rules=True)[-1]
        words = f"{words} {callbacks_in_words(program, 'loss', True) or ''}"
        return out, EndCotangents(last, ys, words)

    def take(self, cotangents: PyTree) -> EndCotangents:
        """The cotangents of the inexact arrays of the carry and the `ys`."""
        if not isinstance(cotangents, tuple | list) or len(cotangents) != 2:
            raise ValueError(
                f"Resumable: `pull` takes a pair `(ct_carry, ct_ys)`, not "
                f"{describe(cotangents)}. Give None for what has no cotangent."
            )
        call = self.run.call
        carry = _taken(cotangents[0], call.last_carry, "ct_carry")
        ys = _taken(cotangents[1], call.ys, "ct_ys")
        types = pick(call.last_carry.types, call.last_carry.inexact)
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in types]
        pairs = zip(carry, zeros, strict=True)
        return EndCotangents(
            [z if ct is None else jnp.asarray(ct) for ct, z in pairs], ys
        )

    def back(self, cotangents: EndCotangents, progress: ProgressBar | None) -> PyTree:
        """Takes cotangents back through the loop, and returns what was asked for."""
        back = Reversal(self.run, self._wanted, cotangents.last, cotangents.ys)
        path = self.run.directory / GRADIENT / "gradient.json"
        now, rows = self._record(back, cotangents.loss), self.run.directory / OF_SCANNED
        back.sweep.begin(path, now, rows, "gradient", _REMOVE)
        length, done = self.run.segments.length, back.sweep.done
        self.run.says_what_is_there(done, "reversed")
        with host_bar(_NAME, progress, length, done, "backward") as move:
            back.sweep.go_on(2, lambda done, *_: move(done))
        return self._close(*back.result)

    @property
    def _wanted(self) -> Wanted:
        names = self.wrt if isinstance(self.wrt, tuple) else (self.wrt,)
        inputs = self.run.call.inputs
        asked = {inputs.scan: "f" in names, inputs.xs: "xs" in names}
        of = lambda source: [asked[source] and flag for flag in source.form.inexact]
        marks, axes = inputs.of_arrays(of), inputs.of_arrays(lambda source: source.axes)
        pairs = list(zip(marks, axes, strict=True))
        own = tuple(flag and axis is not None for flag, axis in pairs)
        return Wanted(own, tuple(flag and axis is None for flag, axis in pairs))

    def _record(self, back: "Reversal", loss: str) -> RunRecord:
        call = self.run.call
        forms = (call.last_carry, back.last), (call.ys, back.ys)
        cts = {
            f"cotangent of {name}": "None" if ct is None else array_in_words(ct)
            for form, cts in forms
            for name, ct in zip(pick(form.names, form.inexact), cts, strict=True)
        }
        names = [self.wrt] if isinstance(self.wrt, str) else sorted(self.wrt)
        return RunRecord(
            length=self.run.segments.length,
            settings={"argnums": ", ".join(names)} | back.sums_in_words,
            arguments=cts,
            constants={},
            functions=callbacks_in_words(call.segment_program, "f", has_rules=True),
            program=program_in_words(call.segment_program, has_rules=True),
            files=[],
            loss=loss,
        )

    def _close(self, init: list[Value], scan: list[Value], xs: list[Value]) -> PyTree:
        inputs, of_init = self.run.call.inputs, self._init_gradient(init)
        made = {"f": inputs.scan.form.like(scan), "xs": inputs.xs.form.like(xs)}
        made["init"] = of_init
        if isinstance(self.wrt, str):
            return made[self.wrt]
        return tuple(made[name] for name in self.wrt)

    def _init_gradient(self, found: list[Value]) -> PyTree:
        carry = self.run.call.carry
        leaves = pick(flatten(self.run.init)[0], carry.rest.taken)
        full = put([None] * len(leaves), carry.inexact, found)
        pairs = zip(leaves, full, strict=True)
        return carry.like([_as_gradient(leaf, ct) for leaf, ct in pairs])


def _pair(out: PyTree) -> tuple[PyTree, PyTree]:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(
            f"Resumable: with `has_aux=True` the loss must return a pair "
            f"`(value, aux)`, but it returned {jax.tree.map(describe, out)}."
        )
    return out[0], out[1]


def _loss_value(value: PyTree) -> PyTree:
    value = as_arrays(value, scalars=True)
    is_real = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    if not is_real or value.shape != ():
        raise TypeError(
            f"Resumable: the loss must return a real floating-point scalar, but it "
            f"returned {jax.tree.map(describe, value)}. With `has_aux=True` it may "
            f"return a pair of a scalar and anything else."
        )
    return value


def _as_gradient(leaf: Value, ct: Value) -> Value:
    """The cotangent of a leaf of `init`, from that of the array made of it."""
    if ct is None or is_scalar(leaf):
        return ct if is_inexact_scalar(leaf) else None
    return ct.astype(leaf.dtype) if is_inexact(leaf) else None


def _taken(tree: PyTree, form: TreeForm, name: str) -> list[Value]:
    """The cotangents in a tree, for the inexact arrays of one of this form."""
    if tree is None:
        return [None] * sum(form.inexact)
    leaves, treedef = flatten(tree)
    if treedef != form.rest.treedef:
        differences = structure_differences(form.like(form.types), tree, name)
        listing = "\n".join(
            f"  at {d.path}: {d.one or 'nothing'} was returned, the cotangent is "
            f"{d.other or 'nothing'}"
            for d in differences
        )
        raise ValueError(
            f"Resumable: cotangents must be trees like what the loop returned:\n"
            f"{listing}\nGive None for a leaf that has none."
        )
    found = pick(pick(leaves, form.rest.taken), form.inexact)
    names = pick(form.names, form.inexact)
    types = pick(form.types, form.inexact)
    for ct, path, aval in zip(found, names, types, strict=True):
        if ct is None:
            continue
        if (np.shape(ct), jnp.result_type(ct)) != (aval.shape, aval.dtype):
            raise TypeError(
                f"Resumable: the cotangent of {path}, which is {describe(aval)}, "
                f"cannot be {describe(ct)}. A cotangent has the shape and dtype of its "
                f"array; for what has none it is None."
            )
    return found


# The way back.


@dataclasses.dataclass(frozen=True, eq=False)
class Reversal:
    """The way back through a loop, all of whose carries are stored.

    Attributes:
        last: The cotangents of the inexact arrays of the last carry.
        ys: Those of the inexact arrays that the steps returned; `None` for zeros.
    """

    run: OpenedRun
    wanted: Wanted
    last: list[Value]
    ys: list[Value]

    @functools.cached_property
    def sweep(self) -> SegmentSweep:
        """Its states are the cotangents of the carry, and sums of what all share."""
        carry, inputs = self.run.call.carry, self.run.call.inputs
        names = inputs.of_arrays(lambda source: source.form.names)
        start = [*self.last, *self._zeros()]
        states = StateFolder(
            self.run.directory / COTANGENTS,
            [*pick(carry.names, carry.inexact), *pick(names, self.wanted.shared)],
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in start],
            list(map(sharding_of, start)),
        )
        types, _ = inputs.types(inputs.segments.length)
        rows = row_files(self.run.directory / OF_SCANNED, pick(types, self.wanted.own))
        axes = pick(inputs.of_arrays(lambda source: source.axes), self.wanted.own)
        given = (
            inputs,
            start,
            states,
            rows,
            axes,
            (StoredSource(self.ys, "ys", self._y_axes),),
        )
        return SegmentSweep(self._reversed, *given, is_back=True)

    @property
    def result(self) -> tuple[list[Value], list[Value], list[Value]]:
        """The cotangents of the first carry, of the scan and of `xs`."""
        before, sums = split(self.sweep.result, len(self.last))
        none = [None] * len(self.wanted.own)
        own = [file.read() for file in self.sweep.rows]
        shared = list(map(cast_like, sums, self._shared))
        found = put(none, self.wanted.own, own)
        found = put(found, self.wanted.shared, shared)
        return before, *split(found, len(self.run.call.inputs.scan.form.types))

    @property
    def sums_in_words(self) -> dict[str, str]:
        """In which type sums are kept, if that is not the type of each array."""
        sums = chosen_sum_type()
        is_wide = any(is_narrow(x, sums) for x in self._shared)
        return {"sums": str(sums)} if is_wide else {}

    def _reversed(
        self, k: int, state: list[Value], arrays: Value, beside: Value, ys: Value
    ) -> tuple[list[Value], list[Value]]:
        """Reverses a segment."""
        call, forward = self.run.call, self.run.forward
        wanted = self.wanted._replace(shardings=tuple(self.sweep.states.shardings))
        given = [ct is not None for ct in self.ys]
        ct_ys = put([None] * len(given), given, self._of_segment(k, ys))
        ct_carry, sums = split(state, len(self.last))
        inputs = arrays, forward.state_at(forward.before(k)), beside
        about = self.run.segments.size(k), wanted, inputs, (ct_carry, ct_ys), sums
        ct_carry, sums, rows = call.reverse_program(*about)
        return [*ct_carry, *sums], rows

    @property
    def _y_axes(self) -> list[Axis]:
        """For each of the cotangents of `ys` the axis that is cut into segments."""
        axes = pick(self.run.call.y_axes, self.run.call.ys.inexact)
        pairs = zip(self.ys, axes, strict=True)
        return [None if ct is None else axis for ct, axis in pairs]

    def _of_segment(self, k: int, ys: Sequence[Value]) -> list[Value]:
        """The cotangents that segment `k` gets, of those that are not zero."""
        # What is the same for all steps was returned once: it is the last segment's.
        axes = pick(self._y_axes, [ct is not None for ct in self.ys])
        is_last = k == len(self.run.segments) - 1
        return [
            ct if is_last or axis is not None else jnp.zeros_like(ct)
            for ct, axis in zip(ys, axes, strict=True)
        ]

    @functools.cached_property
    def _shared(self) -> list[Value]:
        """What all segments share, of what cotangents are wanted of."""
        arrays = self.run.call.inputs.of_arrays(lambda source: source.whole)
        return pick(arrays, self.wanted.shared)

    def _zeros(self) -> list[Value]:
        """The sums before anything was added."""
        sums, shared = chosen_sum_type(), self._shared
        zeros = [np.zeros(x.shape, sum_dtype(x.dtype, sums)) for x in shared]
        return [placed(z, sharding_of(x)) for z, x in zip(zeros, shared, strict=True)]
