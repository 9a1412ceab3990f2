"""`AssociativeScan`: all prefixes at once, as `jax.lax.associative_scan` finds them."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, final

import jax
import jax.numpy as jnp
from jax import lax

from .._arrays import (
    AlongAxes,
    Arrays,
    as_arrays,
    axis_sizes,
    describe,
    flatten,
    is_key,
    paths,
    plain,
    refuse_symbolic,
    resolve_axes,
    split,
    structure_bits,
    types_of,
)
from .._calls import (
    AbstractTransform,
    KnownAs,
    NewX,
    X,
    array_names,
    as_int_if_index,
    call_traced,
    check_bool,
    compiled_once,
    explained,
    int_of,
    setting,
    typed,
)
from .._types import PyTree, Value
from ..checkpointing import Recursive, trace_step
from ._carry import static_changes, structure_changes, type_changes
from ._open_loop import LoopOpener

_NAME = "AssociativeScan"

# A function, or a method, which `self` is bound to later.
_Joining = Callable[[X, X], X] | Callable[[Any, X, X], X]


@final
class AssociativeScan(AbstractTransform, Generic[X]):
    """Like `jax.lax.associative_scan`: all prefixes under an associative function.

    Of elements `a`, `b`, `c`, ... the prefixes are `a`, `f(a, b)`, `f(f(a, b), c)`, and
    so on. Because `f` is associative, they can be computed in parallel: `f` is called
    with two arrays of many elements each, along the axis that is scanned, about
    `2 * log2(length)` times, on arrays that halve in size. It must treat each pair of
    elements by itself. If your function works on one pair, wrap it in `jax.vmap`.

    Elements may be any PyTrees. The leaves that are not arrays reach `f` unchanged, and
    it must return them unchanged. As in JAX, the leaves of what `f` returns count, in
    their order, and not the containers: a function of named tuples may return tuples.
    If `f` is a module, then its arrays are arrays of this module, and are
    differentiated.

    Args:
        f: An associative function of two such trees, which returns a third.
        axis: The axis of each array along which its elements lie.
        reverse: Whether to start from the last element.
        chunk_size: The greatest number of elements to scan in parallel. Chunks are
            scanned one after the other. Besides inputs and results, a call takes the
            memory of one chunk, and so does its derivative in either mode. A gradient
            also stores the last prefix of each chunk. By default all elements are
            scanned at once.

    Raises:
        TypeError: If `f` is not callable, or a setting is not of its type. When called,
            if `f` does not return leaves of the shapes and dtypes that it is given, or
            if a jaxtyping annotation of `f` is violated.
        ValueError: If `chunk_size` is less than 1. When called, if the arrays do not
            have the same number of elements, if an axis is out of range, if there is no
            array, or if `f` changes a leaf that is not an array. If a gradient is taken
            in chunks, and there is an `io_callback` in `f`: it would be called again.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> el.AssociativeScan(jnp.add)(jnp.arange(5))
        Array([ 0,  1,  3,  6, 10], dtype=int32)

        The linear recurrence `h = a * h + b`, 1000 steps at a time:

        >>> @el.AssociativeScan(chunk_size=1000)
        ... def recurrence(one, other):
        ...     (a, b), (c, d) = one, other
        ...     return a * c, c * b + d
        >>> _, h = recurrence((jnp.full(10_000, 0.5), jnp.ones(10_000)))
        >>> h[:3], h[-1]
        (Array([1.  , 1.5 , 1.75], dtype=float32), Array(2., dtype=float32))

    References:
        [`jax.lax.associative_scan`](https://docs.jax.dev/en/latest/_autosummary/jax.lax.associative_scan.html);
        Blelloch, *Prefix sums and their applications*, 1990.
    """

    f: _Joining[X]  # pyright: ignore[reportIncompatibleMethodOverride]
    axis: int = setting(default=0, converter=as_int_if_index)
    reverse: bool = setting(default=False)
    chunk_size: int | None = setting(default=None)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: _Joining[NewX], /) -> "AssociativeScan[NewX]": ...

    def __check_init__(self) -> None:
        check_bool(_NAME, "reverse", self.reverse)
        _check_int("axis", self.axis, "the axis along which the elements lie")
        if self.chunk_size is None:
            return
        _check_int("chunk_size", self.chunk_size, "how many elements to scan at once")
        if self.chunk_size < 1:
            raise ValueError(
                f"{_NAME}: `chunk_size` must be at least 1, but it is "
                f"{self.chunk_size}. To scan all elements at once, pass None."
            )

    @compiled_once
    @typed
    def __call__(self, xs: PyTree) -> X:
        """Finds the prefixes.

        Args:
            xs: The elements: any PyTree, whose arrays have them along `axis`.

        Returns:
            The prefixes: the same tree, with arrays of the same types.
        """
        elements = _Elements.of(self, as_arrays(xs))
        length = elements.xs.length
        instead = "Use `el.Scan`, one element after the other"
        refuse_symbolic("AssociativeScan", length, "a tree of elements", instead)
        return elements.join(elements.prefixes(*_divided(length, self.chunk_size)))


def _divided(length: int, most: int | None) -> tuple[int, int]:
    """How many chunks follow the first elements, and how many elements each has."""
    rest = length - 1
    if most is None or rest <= most:
        return 0, 0
    even = -(-rest // -(-rest // most))
    # If more than one element comes first, their prefixes are a program of their own.
    sizes = range(even, 3 * even // 4, -1)
    size = next((size for size in sizes if rest % size == 0), even)
    return rest // size, size


@dataclasses.dataclass(frozen=True)
class _Elements:
    """What is scanned, and how.

    Attributes:
        xs: Its arrays along their axes; of PRNG keys, the data.
        key_impls: For each array of keys, how they are implemented, else `None`.
    """

    scan: AssociativeScan[Any]
    xs: AlongAxes
    key_impls: tuple[Hashable, ...]

    @classmethod
    def of(cls, scan: AssociativeScan[Any], xs: PyTree) -> "_Elements":
        axes = resolve_axes(_NAME, xs, scan.axis, tree_name="xs", spec_name="axis")
        sizes = axis_sizes(xs, "xs", axes)
        if not sizes:
            raise ValueError(
                f"{_NAME}: xs holds no array, so there is nothing to scan: it is "
                f"{describe(xs)}."
            )
        length, *others = set(sizes.values())
        if others:
            listing = "\n".join(f"  {path}: {size}" for path, size in sizes.items())
            raise ValueError(
                f"{_NAME}: all arrays must have the same number of elements along axis "
                f"{scan.axis}, but they do not:\n{listing}"
            )
        along = AlongAxes.of(xs, axes, length)
        impls = [jax.random.key_impl(x) if is_key(x) else None for x in along.arrays]
        raw = dataclasses.replace(along, arrays=list(map(plain, along.arrays)))
        return cls(scan, raw, tuple(impls))

    def join(self, arrays: Arrays) -> PyTree:
        """The tree, with other arrays."""
        return self.xs.rest.join(
            [
                x if impl is None else jax.random.wrap_key_data(x, impl=impl)
                for x, impl in zip(arrays, self.key_impls, strict=True)
            ]
        )

    def __call__(self, one: Arrays, other: Arrays) -> list[jax.Array]:
        """`f` on lists of arrays, each with its elements along its own axis."""
        a, b = self.join(one), self.join(other)
        with explained(_NAME, "`f(a, b)`", {"a": a, "b": b}):
            out = call_traced(_NAME, self.scan.f, (a, b), {}, ["a", "b"])
            out = as_arrays(_labelled_as(a, out))
        _check_result(a, out)
        taken = zip(flatten(out)[0], self.xs.rest.taken, strict=True)
        return [plain(x) for x, is_taken in taken if is_taken]

    def prefixes(self, count: int, size: int) -> list[Value]:
        """The prefixes of all elements.

        `count` chunks of `size` elements follow the first ones, which may be fewer.
        """
        arrays, reverse = self.xs.arrays, self.scan.reverse
        if not count:
            return self._scan([], arrays)
        ahead = self.xs.length - count * size
        start, stride = ((count - 1) * size, -size) if reverse else (ahead, size)
        last = 0 if reverse else -1
        at = start - stride if reverse else 0
        # Without barriers, XLA would hold cotangents of all elements twice, to add up
        # those of the first ones together with these. An array that is the same for all
        # tangents has its own.
        first = list(map(lax.optimization_barrier, self._part(arrays, at, ahead)))
        ys, zeros = self._scan([], first), list(map(jnp.zeros_like, arrays))

        # The prefixes of a chunk are found from the last one before it, which is all
        # that one chunk needs of another. So a loop carries it along, and stores
        # nothing else.
        def step(carry: PyTree, _: None) -> tuple[PyTree, None]:
            at, before, ys = carry
            # Not of `ys`, which XLA would copy to write what is computed from them.
            part = self._scan(before, self._part(arrays, at, size))
            carry = at + stride, self._part(part, last, 1), self._put(ys, part, at)
            return carry, None

        init = start, self._part(ys, last, 1), self._put(zeros, ys, at)
        opened = LoopOpener(_NAME, None, None).open(step, init, length=count)
        # The prefix before each chunk is stored, and one chunk is run again at a time.
        schedule = Recursive(max(count, 2), batch=1)
        return opened.run(_NAME, schedule=schedule, policy=None)[0][2]

    def _part(self, arrays: Arrays, start: Value | int, size: int) -> list[Value]:
        return [
            lax.dynamic_slice_in_dim(x, start, size, axis)
            for x, axis in zip(arrays, self.xs.axes, strict=True)
        ]

    def _put(self, arrays: Arrays, part: Arrays, start: Value | int) -> list[Value]:
        return [
            lax.dynamic_update_slice_in_dim(x, new, start, axis)
            for x, new, axis in zip(arrays, part, self.xs.axes, strict=True)
        ]

    def _scan(self, before: Arrays, part: Arrays) -> list[Value]:
        """The prefixes of some elements, given that before them, if there is one."""
        axes, f, reverse = self.xs.axes, self.scan.f, self.scan.reverse

        def body(_: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            before, part = split(x, len(x) - len(axes))
            if before:
                first = -1 if reverse else 0
                combined = self(before, self._part(part, first, 1))
                part = self._put(part, combined, first)
            if len(set(axes)) == 1:
                return [], lax.associative_scan(self, part, reverse, axes[0])
            back = lambda arrays: _moved(arrays, [0] * len(axes), axes)
            combine = lambda one, other: _moved(self(back(one), back(other)), axes)
            moved = lax.associative_scan(combine, _moved(part, axes), reverse)
            return [], back(moved)

        inputs = [*before, *part]
        names = array_names(self.join(part), "xs")
        known_as = KnownAs("associative_scan", f, (names * 2)[: len(inputs)])
        types = list(map(jax.typeof, inputs))
        step, consts = trace_step(known_as.name(body), [], types)
        return step(consts, [], inputs)[1]


def _moved(
    arrays: Arrays, axes: Sequence[int], to: Sequence[int] | None = None
) -> list[jax.Array]:
    """Arrays with their axes moved, to the front if nothing else is said."""
    to = [0] * len(axes) if to is None else to
    return [jnp.moveaxis(*args) for args in zip(arrays, axes, to, strict=True)]


def _labelled_as(a: PyTree, out: PyTree) -> PyTree:
    """What `f` returned, as a tree like `a` if it has as many leaves."""
    # As `jax.lax.associative_scan` has it: a function of named tuples may return
    # tuples.
    leaves, treedef = jax.tree.leaves(out), jax.tree.structure(a)
    is_alike = flatten(out)[1] == flatten(a)[1]
    return (
        out
        if is_alike or len(leaves) != treedef.num_leaves
        else treedef.unflatten(leaves)
    )


def _check_result(a: PyTree, out: PyTree) -> None:
    """Checks that `f` returned what it was given."""
    new = types_of(out)
    (before, treedef), (after, after_treedef) = flatten(a), flatten(new)
    is_same = structure_bits(treedef) == structure_bits(after_treedef)
    leaves = [*zip(paths(a, "a"), before, after, strict=is_same)]
    changes = type_changes(leaves) if is_same else structure_changes(a, new, "a")
    if changes:
        raise TypeError(
            f"{_NAME}: f(a, b) must return the structure, shapes and dtypes that a and "
            f"b have, but it changed them:\n" + "\n".join(changes)
        )
    if changes := static_changes(leaves):
        raise ValueError(
            f"{_NAME}: f must return the leaves that are not arrays unchanged, but it "
            f"changed them:\n" + "\n".join(changes)
        )


def _check_int(setting: str, value: object, what: str) -> None:
    if int_of(value) is None:
        raise TypeError(
            f"{_NAME}: `{setting}` must be an int, {what}, but it is {value!r}, of "
            f"type {type(value).__name__}."
        )
