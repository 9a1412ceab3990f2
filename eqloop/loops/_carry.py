"""The carry: which of its leaves are dynamic, and whether its types stay the same.

The initial carry alone does not tell. A Python number in it is static if `f` returns
the very same number, and otherwise becomes an array. A weakly typed array may have to
be promoted. Both show only when `f` has been traced. So `f` is traced, `Carry.settle`
compares the carry that came out with the one that came in, and if need be, `f` is
traced again with another carry (`trace_stable`):

    init     f returns    next try
    0        0            static, done
    0        array        array(0)
    1.0w     f32          promoted to f32    (w: weakly typed)
    f32      i32          an error that names the leaf
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NoReturn, Self, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    as_array,
    as_arrays,
    axes_of,
    flatten,
    is_dynamic,
    is_scalar,
    is_type,
    is_weak,
    kind,
    partition,
    paths,
    pick,
    placed_as,
    same_static,
    structure_bits,
    structure_differences,
    types_of,
    unmarked,
    vary,
    with_weak_types,
)
from .._calls import IN_THE_CARRY, KnownAs, OpenedCall, argument_names
from .._types import Aval, PyTree, Value
from ..checkpointing import Step, trace_step

# What errors show of a call: the call itself, and its arguments.
Shown = tuple[str, Mapping[str, PyTree]]


def shown_call(
    f: str,
    given: Mapping[str, PyTree],
    keywords: Iterable[str] = (),
    others: Iterable[str] = (),
) -> Shown:
    """A call of a function as it is written, with the arguments that are shown."""
    named = (f"{name}={name}" for name in keywords)
    return f"`{f}({', '.join([*given, *others, *named])})`", given


def step_call(carry: PyTree, x: PyTree, keywords: dict[str, Any]) -> Shown:
    """The call of a step."""
    return shown_call("f", {"carry": carry, "x": x}, keywords)


Names = Callable[[Any, PyTree, PyTree], tuple[Any, list[str], list[str]]]


def step_names(
    f: Callable[..., PyTree], carry: PyTree, xs: PyTree
) -> tuple[Any, list[str], list[str]]:
    """A step, and what it calls each leaf of its arguments."""
    first, second = argument_names(f, (carry, xs))
    return f, paths(carry, first), paths(xs, second)


@dataclasses.dataclass(frozen=True)
class Words:
    """The words for the parts of a loop in error messages.

    Attributes:
        path: The beginning of the paths of its leaves.
        f: The word for the function that is called at each step.
        call: From the arguments of a call of `f`, `(carry, x, keywords)`, to what
            errors show of it.
        length: The word for the number of steps, in the user's call.
        several: Whether `xs` is a tuple of arguments.
        names: From `f`, the carry and `xs` to the function that the user wrote, and
            what it calls each leaf of the carry, and of `xs`.
    """

    carry: str = "the carry"
    path: str = "carry"
    f: str = "f"
    step: str = "step"
    call: Callable[[PyTree, PyTree, dict[str, Any]], Shown] = step_call
    length: str = "length"
    several: bool = False
    names: Names = step_names

    def how(self, carry: PyTree) -> dict[str, Any]:
        """What errors say of a call with a carry, for `call_traced`."""
        apart = lambda: (
            f"If it is {self.carry}, that is what the loop starts from, "
            f"{eqx.tree_pformat(carry)}: where {self.f} has `h, c = {self.path}`, it "
            f"must be a pair."
        )
        return dict(word=self.f, instead=IN_THE_CARRY, apart=apart)


OF_A_SCAN = Words()


@dataclasses.dataclass(frozen=True)
class Carry:
    """An initial carry, whose dynamic leaves are arrays.

    Attributes:
        owner: The name of the transform, for error messages.
        tree: The carry; its arrays are JAX arrays.
    """

    owner: str
    tree: PyTree
    words: Words = OF_A_SCAN

    @classmethod
    def of(cls, owner: str, init: PyTree, words: Words = OF_A_SCAN) -> Self:
        """The carry with Python numbers as static leaves."""
        return cls(owner, as_arrays(init), words)

    def varying(self) -> Self:
        """The carry with Python numbers as arrays."""
        return dataclasses.replace(self, tree=as_arrays(self.tree, scalars=True))

    @property
    def has_scalars(self) -> bool:
        """Whether there is a Python number among the static leaves."""
        return any(map(is_scalar, jax.tree.leaves(self.tree)))

    @property
    def arrays(self) -> list[jax.Array]:
        """The dynamic leaves."""
        return partition(self.tree)[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the dynamic leaves."""
        names = paths(self.tree, self.words.path)
        return tuple(pick(names, list(map(is_dynamic, flatten(self.tree)[0]))))

    def starts(self, init: PyTree) -> tuple[int | None, ...]:
        """The Python integers that dynamic leaves were in the user's call."""
        # Only such numbers are known while tracing. `Loop.starts` says what they are
        # for.
        leaves = zip(flatten(init)[0], flatten(self.tree)[0], strict=True)
        return tuple(
            number if type(number := unmarked(before)) is int else None
            for before, after in leaves
            if is_dynamic(after)
        )

    def join(self, arrays: list[Value]) -> PyTree:
        """A carry with the structure and the static leaves of this one."""
        return partition(self.tree)[1].join(arrays)

    def final(self, arrays: list[Value], out: PyTree) -> PyTree:
        """The carry after the last step, with weak types where a step returns them."""
        # The engine works with strong types (`rewrites/_normal_form.py`), and hands on
        # the initial carry as it is if there are no steps. The types are those of a
        # step for any length, as `lax.scan` has it.
        pairs = zip(flatten(self.tree)[0], flatten(out)[0], strict=True)
        weak = [is_weak(after) for before, after in pairs if is_dynamic(before)]
        return self.join(with_weak_types(arrays, weak))

    def take(self, out: PyTree) -> list[jax.Array]:
        """The dynamic leaves of the carry that `f` has made of this one."""
        # Leaves that do not fit are left out. Then the step that is traced is wrong,
        # but it is thrown away: `settle` raises an error, or has it traced again.
        before, treedef = flatten(self.tree)
        after, after_treedef = flatten(out)
        if treedef != after_treedef:
            return []
        # A leaf that differs between devices may come out as one that does not.
        return [
            vary(as_array(a), axes_of(b))
            for b, a in zip(before, after, strict=True)
            if is_dynamic(b) and (is_dynamic(a) or is_scalar(a))
        ]

    def settle(self, out: PyTree) -> Self:
        """Compares this carry with the one that `f` made of it."""
        before, treedef = flatten(self.tree)
        after, after_treedef = flatten(out)
        if structure_bits(treedef) != structure_bits(after_treedef):
            self._raise_changed(structure_changes(self.tree, out, self.words.path))
        promoted = [_promote(b, a) for b, a in zip(before, after, strict=True)]
        if any(p is not b for p, b in zip(promoted, before, strict=True)):
            return dataclasses.replace(self, tree=treedef.unflatten(promoted))
        names = paths(self.tree, self.words.path)
        leaves = list(zip(names, before, after, strict=True))
        if changes := type_changes(leaves):
            self._raise_changed(changes)
        if changes := static_changes(leaves):
            self._raise_static(changes)
        return self

    def _raise_changed(self, changes: list[str]) -> NoReturn:
        words = self.words
        raise TypeError(
            f"{self.owner}: {words.carry} must keep its shape, dtype and structure "
            f"from {words.step} to {words.step}, but {words.f} changed it:\n"
            + "\n".join(changes)
            + "\nReturn the same shapes, dtypes and structure, or start with those "
            "that came out."
        )

    def _raise_static(self, changes: list[str]) -> NoReturn:
        words = self.words
        raise ValueError(
            f"{self.owner}: only arrays and numbers can change from {words.step} to "
            f"{words.step}, but {words.f} changed these leaves of {words.carry}:\n"
            + "\n".join(changes)
            + "\nReturn them unchanged, or make them arrays."
        )


_Extra = TypeVar("_Extra")


@dataclasses.dataclass(frozen=True)
class Settled(Generic[_Extra]):
    """A step whose carry keeps its type.

    Attributes:
        consts: The arrays that it closes over.
        carry: The carry that it was traced with.
        new_carry: The types of the carry that came out.
        kept: Everything else about the result of `f`, such as the structure of `y`.
    """

    step: Step
    consts: list[Value]
    carry: Carry
    new_carry: Any
    kept: _Extra

    def final(self, arrays: list[Value]) -> PyTree:
        """The carry after the last step, from its dynamic leaves."""
        return self.carry.final(arrays, self.new_carry)


def trace_stable(
    call: Callable[[PyTree, list[Value]], PyTree],
    take: Callable[[PyTree], tuple[PyTree, list[Value], _Extra]],
    carry: Carry,
    x_types: Sequence[Aval],
    known_as: Callable[[PyTree], KnownAs],
) -> Settled[_Extra]:
    """Traces a step with a carry whose types it does not change."""

    # `take` goes from what `call` returns to the new carry, the arrays of `y`, and
    # anything else to keep.
    def take_arrays(out: PyTree) -> PyTree:
        new_carry, y, kept = take(out)
        return (carry.take(new_carry), y), (types_of(new_carry), kept)

    join = lambda arrays, x: (carry.join(arrays), x)
    # This ends: each new try makes a number an array, promotes a leaf, or has it vary
    # along more axes, and none of these is ever undone.
    while True:
        body = OpenedCall(join, call, take_arrays, known_as(carry.tree))
        carry_types = [jax.typeof(x) for x in carry.arrays]
        try:
            step, consts = trace_step(body.on_arrays, carry_types, x_types)
        except Exception:
            # `f` may fail on a Python number, say by `.astype`, where it would accept
            # an array. So if there are any numbers, it is tried again with arrays.
            if body.has_returned or not carry.has_scalars:
                raise
            carry = carry.varying()
            continue
        new_carry, kept = body.kept
        settled = carry.settle(new_carry)
        if settled is carry:
            return Settled(step, consts, carry, new_carry, kept)
        carry = settled


def _promote(before: PyTree, after: PyTree) -> PyTree:
    """The leaf to start from instead, or `before` itself if it fits."""
    if not (is_type(after) or is_scalar(after)):
        return before
    if is_scalar(before):
        return before if same_static(before, after) else jnp.asarray(before)
    if not is_dynamic(before):
        return before
    # Only weakly typed arrays are promoted, and only in their dtype.
    if jax.typeof(before).weak_type and jnp.shape(after) == before.shape:
        try:
            dtype = jnp.result_type(before, after)
        except jax.dtypes.TypePromotionError:
            return before  # strict promotion: `settle` reports that the types differ
        if dtype != before.dtype:
            return lax.convert_element_type(before, dtype)
    # A leaf that starts the same on all devices may be split over them after a step, or
    # differ between them inside `jax.shard_map`.
    if is_type(after) and jnp.shape(after) == before.shape:
        before = placed_as(before, after)
    return vary(before, axes_of(after))


# How the carry that came out differs from the one that came in, in a line per leaf.

# The path of a leaf, what came in, and what came out.
Change = tuple[str, Any, Any]


def type_changes(leaves: Sequence[Change]) -> list[str]:
    """A line for each leaf whose type changed, or that is not an array both times."""
    return [line for leaf in leaves if (line := _type_change(*leaf))]


def static_changes(leaves: Sequence[Change]) -> list[str]:
    """A line for each static leaf that has changed."""
    return [
        _line(name, before, after)
        for name, before, after in leaves
        if not is_dynamic(before) and not same_static(before, after)
    ]


def structure_changes(before: PyTree, after: PyTree, name: str) -> list[str]:
    """A line for each place where the structures of two trees differ."""
    differences = structure_differences(before, after, name)
    return [_structure_change(d.path, d.one, d.other) for d in differences]


def _structure_change(name: str, before: str | None, after: str | None) -> str:
    if after is None:
        return f"  {name} came in, but did not come out"
    if before is None:
        return f"  {name} came out, but had not come in"
    if before == after:
        return f"  {name}: the static fields of the {before} changed"
    return f"  {name}: {before} came in, {after} came out"


def _line(name: str, before: PyTree, after: PyTree) -> str:
    return f"  {name}: {kind(before)} came in, {kind(after)} came out"


def _type_change(name: str, before: PyTree, after: PyTree) -> str | None:
    if is_dynamic(before) and is_scalar(after):
        after = jax.typeof(jnp.asarray(after))
    if not is_dynamic(before) and not is_type(after):
        return None
    fits = is_dynamic(before) and is_type(after) and before.shape == after.shape
    if fits and before.dtype == after.dtype:
        return _sharding_change(name, jax.typeof(before), after)
    line = _line(name, before, after)
    if fits:
        article = "an" if str(after.dtype)[0] in "aeiou" else "a"
        return f"{line} (cast it with .astype, or start from {article} {after.dtype})"
    return line


def _sharding_change(name: str, before: Aval, after: Aval) -> str | None:
    """How differently an array of one shape and dtype is split over devices."""
    if before.sharding.spec == after.sharding.spec:
        return None
    types = [aval.str_short(short_dtypes=True) for aval in (before, after)]
    return f"  {name}: {types[0]} came in, {types[1]} came out (`jax.sharding.reshard`)"
