"""Opens the call of a loop of known length: from the user's trees to arrays, and back.

`LoopOpener.open` finds out which axes are scanned and how long they are, splits the
keys, traces `f` into a step, and checks that the carry keeps its type. The result, an
`OpenedLoop`, has all arguments of `run_loop`, and turns the arrays that this returns
back into the user's trees.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import equinox as eqx
import jax

from .._arrays import (
    AlongAxes,
    as_arrays,
    as_length,
    axes_tree,
    axis_sizes,
    common_length,
    describe,
    flatten,
    is_dynamic,
    is_symbolic,
    paths,
    pick,
    refuse_foreign_arrays,
    refuse_python_values,
    refuse_split,
    refuse_symbolic,
    resolve_axes,
    split,
    zero_array,
)
from .._calls import KnownAs, Outputs, call_traced, check_takes, explained
from .._programs import refuse_refs
from .._types import PRNGKey, PyTree, Value
from ..checkpointing import Loop, Step, Undo, hoist, with_inverse
from ..progress import Label
from ._backward import (
    Backward,
    Truncate,
    check_taken,
    cut_before,
    cuts_of,
    empty_log,
    passed_back,
    refuse_cuts,
)
from ._carry import OF_A_SCAN, Carry, Names, Words, shown_call, step_names, trace_stable
from ._opened_loop import OpenedLoop
from ._step_checks import check_one_key, check_wants_key, pair_of, refuse_iterators

_VARYING = (
    "outputs that depend on the carry, on x or on the key, and so differ from step to "
    "step"
)


@dataclasses.dataclass(frozen=True)
class LoopOpener:
    """How a loop reads its call: the settings that all loops share.

    Attributes:
        name: The name of the transform, for error messages.
        in_axes: A prefix tree of axes for `xs`.
        out_axes: A prefix tree of axes for `ys`.
        f_axes: A prefix tree of axes for `f`.
        f_transform: Applied to `f` in the body, before `f` is called.
        split_keys: Whether each step gets a key of its own.
        reverse: Whether the last element of `xs` comes first.
        unroll: How many steps one iteration runs; `True` for all of them.
        kept: Which of the `ys` are kept; `None` for all of them.
        words: The words for the parts of the loop in error messages.
        backward: What happens to the cotangent of the carry before each step.
        undo: How a step is undone, if it is.
    """

    name: str
    in_axes: PyTree
    out_axes: PyTree
    f_axes: PyTree = None
    f_transform: Callable[[PyTree], PyTree] | None = None
    split_keys: bool = True
    reverse: bool = False
    unroll: int | bool = 1
    kept: slice | None = None
    words: Words = OF_A_SCAN
    backward: Backward | None = None
    undo: Undo | None = None

    def open(
        self,
        f: Callable[..., PyTree],
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
        log: PyTree = None,
    ) -> OpenedLoop:
        """Opens a call of the loop."""
        refuse_foreign_arrays(self.name, xs, "xs")
        refuse_foreign_arrays(self.name, init, self.words.path)
        length, log = as_length(self.name, length), as_arrays(log)
        inputs = self._inputs(f, as_arrays(xs), length, key, log)
        if self.unroll is True:
            self._refuse_symbolic(inputs, "`unroll=True`", "Give an int")
        if self.kept is not None:
            self._refuse_symbolic(inputs, "a slice of the outputs", "Keep all of them")
        unroll = max(inputs.length, 1) if self.unroll is True else int(self.unroll)
        refuse_refs(self.name, init, self.words.path)
        settled = trace_stable(
            lambda carry, x: self._call(carry, *inputs.rest.join(x)),
            self._take,
            Carry.of(self.name, init, self.words),
            inputs.element_types,
            lambda carry: self._known_as(self.words.names, f, carry, inputs),
        )
        carry, outputs, consts = settled.carry, settled.kept, settled.consts
        step, same = hoist(self.name, settled.step, consts, outputs, _VARYING)
        saved_paths = ()
        if self.undo is not None:
            refuse_cuts(self.name, self.backward)
            traced = step, consts
            (step, consts), saved_paths = self._undone(self.undo, traced, carry, inputs)
        own = len(carry.paths)
        # What is saved is in the carry, behind the leaves of the user.
        saved = list(map(zero_array, step.carry_types[own:]))
        loop = Loop(
            inputs.length,
            self.reverse,
            max(unroll, 1),
            inputs.axes,
            # A step without outputs has no rows to keep some of. With `kept`, the loop
            # would be cut up into segments for nothing.
            kept_indices(inputs.length, self.kept) if step.y_types else None,
            carry_paths=(*carry.paths, *saved_paths),
            starts=(*carry.starts(init), *[None] * len(saved)),
        )
        head = self._steps_before_reversal(loop, step)

        def close(carry: list[Value], ys: list[Value]) -> tuple[PyTree, PyTree]:
            return settled.final(carry[:own]), outputs.join_stacked(ys, same)

        def label(desc: Callable[[int, PyTree, PyTree], str]) -> Label:
            missing = [None] * len(same)
            join_y = lambda y: outputs.join(y, missing)
            join = lambda arrays: carry.join(arrays[:own])
            return Label.of(desc, step.carry_types, step.y_types, join, join_y)

        def zeros() -> PyTree:
            return empty_log(self.name, carry.tree, self.backward, inputs.length)

        arrays = [*carry.arrays, *saved], inputs.arrays
        return OpenedLoop(step, consts, *arrays, loop, close, carry, label, zeros, head)

    def _undone(
        self,
        undo: Undo,
        traced: tuple[Step, list[Value]],
        carry: Carry,
        inputs: AlongAxes,
    ) -> tuple[tuple[Step, list[Value]], tuple[str, ...]]:
        """The step with its inverse, its consts, and the paths of what is saved."""
        types, before = inputs.element_types, dataclasses.replace(carry, owner=_UNDONE)

        def call(
            name: str,
            f: Callable[..., PyTree],
            carry: PyTree,
            arrays: list[Value],
            *saved: PyTree,
        ) -> PyTree:
            _, x, key, _, _ = inputs.rest.join(arrays)
            names, keywords = ["carry", "x"], {} if key is None else {"key": key}
            names += ["saved"] * len(saved)
            shown = shown_call(name, {"carry": carry, "x": x}, keywords, names[2:])
            given = carry, x, *saved
            with explained(_UNDONE, *shown):
                return undoing_call(name, f, names, given, keywords)

        def save(carry: PyTree, arrays: list[Value]) -> tuple[PyTree, PyTree]:
            return carry, undo.save and call("save", undo.save, carry, arrays)

        def invert(carry: PyTree, arrays: list[Value]) -> PyTree:
            arrays, kept = split(arrays, len(types))
            saved = [] if undo.save is None else [saving.kept.join(kept, [])]
            return call("inverse", undo.inverse, carry, arrays, *saved)

        def known(f: Callable[..., PyTree], *more: str) -> Callable[[PyTree], KnownAs]:
            def of(carry: PyTree) -> KnownAs:
                one = self._known_as(step_names, f, carry, inputs)
                return dataclasses.replace(one, names=[*one.names, *more])

            return of

        take = lambda out: (out[0], *_saved(out[1]))
        saver = undo.inverse if undo.save is None else undo.save
        saving = trace_stable(save, take, before, types, known(saver))
        after = dataclasses.replace(before, words=_OF_AN_INVERSE)
        types_back = [*types, *saving.step.y_types]
        inverse = trace_stable(
            invert,
            lambda out: (out, [], None),
            after,
            types_back,
            known(undo.inverse, *saving.kept.names),
        )
        if inverse.carry is not after:
            raise TypeError(
                f"Reversible: `inverse` must return a carry of the types that it was "
                f"given, which is\n{eqx.tree_pformat(carry.tree)}\nand not "
                f"\n{eqx.tree_pformat(inverse.carry.tree)}"
            )
        pair = lambda settled: (settled.step, settled.consts)
        undone = with_inverse(traced, pair(saving), pair(inverse))
        return undone, saving.kept.names

    def _inputs(
        self,
        f: PyTree,
        xs: PyTree,
        length: int | None,
        key: PRNGKey | None,
        log: PyTree,
    ) -> AlongAxes:
        """Divides all that differs from step to step into arrays and all else."""
        # It is `(f, xs, key)`, the cuts, and what the log is the cotangent of.
        f_axes = resolve_axes(
            self.name, f, self.f_axes, tree_name="f", spec_name="f_axes"
        )
        refuse_refs(self.name, xs, "xs")
        refuse_iterators(self.name, xs)
        x_axes = resolve_axes(
            self.name, xs, self.in_axes, tree_name="xs", spec_name="in_axes"
        )
        check_taken(self.name, log, self.backward)
        log_axes = [None if x is None else 0 for x in flatten(log)[0]]
        sizes = axis_sizes(f, "f", f_axes) | axis_sizes(xs, "xs", x_axes)
        sizes |= axis_sizes(log, "log", log_axes)
        if not sizes and axes_tree(self.in_axes) == eqx.if_array(0):
            words = self.words
            asked = length, words.length, words.several
            refuse_python_values(self.name, xs, "xs", *asked)
        length = common_length(self.name, sizes, length, self.words.length)
        key_axis = None
        if key is not None:
            check_one_key(self.name, key)
            if self.split_keys:
                need = "a key for each step"
                instead = "Use `split_keys=False`, and fold something into the key"
                refuse_symbolic(self.name, length, need, instead)
                key, key_axis = jax.random.split(key, length), 0
        cuts, cut_axis = None, None
        if isinstance(self.backward, Truncate):
            every = self.backward.every
            if is_symbolic(length) or every < length:
                cuts, cut_axis = cuts_of(every, length, reverse=self.reverse), 0
        refuse_split(self.name, f, "f", f_axes)
        refuse_split(self.name, xs, "xs", x_axes)
        refuse_split(self.name, log, "log", log_axes)
        axes = [*f_axes, *x_axes, key_axis, cut_axis, *log_axes]
        return AlongAxes.of((f, xs, key, cuts, log), axes, length)

    def _steps_before_reversal(self, loop: Loop, step: Step) -> int:
        """How many steps come before the last cut that precedes all derivatives."""
        # Outputs are differentiated back to the cut before their step, and so is the
        # final carry.
        is_known = not is_symbolic(loop.length) and loop.length > 0
        if not (isinstance(self.backward, Truncate) and is_known):
            return 0
        before, _, _ = loop.gaps
        needed = before if step.y_types else loop.length - 1
        return min(needed, loop.length - 1) // self.backward.every * self.backward.every

    def _known_as(
        self, names: Names, f: Callable[..., PyTree], carry: PyTree, inputs: AlongAxes
    ) -> KnownAs:
        """What JAX is to call the step, and each of its arrays."""
        of_f, xs, *others = inputs.rest.join(inputs.arrays)
        function, of_carry, of_xs = names(f, carry, xs)
        of_x = [*paths(of_f, "f"), *of_xs]
        for name, tree in zip(("key", "cut", "log"), others, strict=True):
            of_x += paths(tree, name)
        known = pick(of_carry, list(map(is_dynamic, flatten(carry)[0])))
        return KnownAs("scan", function, [*known, *pick(of_x, inputs.rest.taken)])

    def _refuse_symbolic(self, inputs: AlongAxes, need: str, instead: str) -> None:
        refuse_symbolic(self.name, inputs.length, need, instead)

    def _call(
        self,
        carry: PyTree,
        f: Callable[..., PyTree],
        x: PyTree,
        key: PRNGKey | None,
        is_cut: PyTree,
        log: PyTree,
    ) -> PyTree:
        """Calls the user's `f` for one step."""
        if is_cut is not None:
            carry = cut_before(carry, is_cut)
        elif callable(self.backward):
            carry = passed_back(self.name, carry, self.backward, log)
        keywords = {} if key is None else {"key": key}
        with explained(self.name, *self.words.call(carry, x, keywords)):
            if self.f_transform is not None:
                f = self.f_transform(f)
            check_wants_key(self.name, f, (carry, x), keywords)
            how, given = self.words.how(carry), ["carry", "x"]
            return call_traced(self.name, f, (carry, x), keywords, given, **how)

    def _take(self, out: PyTree) -> tuple[PyTree, list[Value], Outputs]:
        """Takes the result of `f` apart: carry, arrays of `y`, and the rest of `y`."""
        carry, y = pair_of(self.name, out)
        arrays, outputs = Outputs.of(
            self.name, y, self.out_axes, name="ys", scalars=True
        )
        return carry, arrays, outputs


_UNDONE = "Reversible"
_OF_AN_INVERSE = dataclasses.replace(OF_A_SCAN, f="`inverse`")


def undoing_call(
    name: str,
    f: Callable[..., PyTree],
    names: Sequence[str],
    given: Sequence[PyTree],
    keywords: dict[str, PyTree],
) -> PyTree:
    """Calls a function that a user has given to undo steps."""
    why = "With" if "saved" in names else "Without"
    why = f"{why} a `save`, it is" if name == "inverse" else "It is"
    check_takes(_UNDONE, name, f, names, keywords=list(keywords), why=why)
    return f(*given, **keywords)


def _saved(tree: PyTree) -> tuple[list[Value], Outputs]:
    """The arrays of what is saved, and the rest of it, in which there is nothing."""
    arrays, outputs = Outputs.of(
        _UNDONE, tree, eqx.if_array(0), name="saved", scalars=True
    )
    named = zip(paths(tree, "saved"), flatten(tree)[0], outputs.rest.taken, strict=True)
    others = [(path, leaf) for path, leaf, taken in named if not taken]
    found = [f"  {p}: {describe(x)}" for p, x in others if x is not None]
    if found:
        listing = "\n".join(found)
        raise TypeError(
            f"Reversible: `save` must return arrays, of which each step has a row, and "
            f"these are none:\n{listing}\nWhat is the same for all steps can be known "
            f"to `inverse` without being saved."
        )
    return arrays, outputs


def kept_indices(length: int, kept: slice | None) -> range | None:
    """The indices that a slice keeps, in a loop of so many steps.

    >>> kept_indices(10, slice(None, None, 4)), kept_indices(10, slice(-2, 99))
    (range(0, 10, 4), range(8, 10))
    >>> kept_indices(10, slice(-99, 99)) is None
    True
    """
    if kept is None:
        return None
    indices = range(length)[kept]
    return None if indices == range(length) else indices
