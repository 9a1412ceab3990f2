"""What is scanned, read a segment at a time: arrays, files, or a function."""

import abc
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import Axis, axis_sizes, describe, flatten, plain, resolve_axes
from .._types import Aval, Index, PyTree, Value
from ._tree_form import TreeForm


class AbstractSource(abc.ABC):
    """Arrays, of which each segment gets its part.

    Attributes:
        form: The form of the tree that they are in. Its types are those of one segment.
        axes: For each array the axis that is scanned; `None` if it is given whole.
        made_by: The function that makes them, if there is one.
        tree: The tree; if a function makes it, what it has made for the first segment.
        tree_axes: For each leaf of the tree the axis that is scanned.
        whole: For each array the array, if it is given whole, and else `None`.
    """

    form: TreeForm
    axes: tuple[Axis, ...]
    made_by: Callable[[int, int], PyTree] | None
    tree: PyTree
    tree_axes: Sequence[Axis]
    whole: list[Value]

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> PyTree:
        """What the steps from `start` to `stop` get, as it was read."""
        # It is called on a thread of its own. JAX is left to the other one, as the
        # settings of JAX are those of a thread.

    @abc.abstractmethod
    def place(self, found: PyTree, start: int, stop: int) -> list[Value]:
        """The arrays for these steps, from what was read."""

    def types(self, steps: int) -> list[jax.ShapeDtypeStruct]:
        """The types of what so many steps get."""
        return [
            resized(aval, axis, steps)
            for aval, axis in zip(self.form.types, self.axes, strict=True)
        ]


@final
class StoredSource(AbstractSource):
    """Arrays that are there, in memory or on disk: whatever has a shape and slices."""

    def __init__(self, tree: PyTree, name: str, axes: Sequence[Axis]) -> None:
        """Takes a tree, and for each leaf the axis that is scanned."""
        self.made_by = None
        self.tree, self.tree_axes = tree, axes
        leaves, treedef = flatten(tree)
        whole = [x if a is not None else _as_array(x) for x, a in _zip(leaves, axes)]
        few = [x if a is None else _few(x, a) for x, a in _zip(whole, axes)]
        self.form = TreeForm.of(treedef.unflatten(few), name)
        taken = self.form.rest.taken
        self.axes = tuple(a for a, flag in _zip(axes, taken) if flag)
        self._leaves = [x for x, flag in _zip(whole, taken) if flag]
        self.whole = _unscanned(self._leaves, self.axes)

    def read(self, start: int, stop: int) -> list[Value]:
        """What is scanned and not in the memory of JAX."""
        return [
            _read_part(x, axis, start, stop) if _is_read(x, axis) else None
            for x, axis in _zip(self._leaves, self.axes)
        ]

    def place(self, found: list[Value], start: int, stop: int) -> list[Value]:
        """The part of each array."""

        def part(leaf: Value, axis: Axis, whole: PyTree, found: PyTree) -> Value:
            if axis is None:
                return whole
            if _is_read(leaf, axis):
                return jnp.asarray(found)
            return _slice_on_device(leaf, start, axis, stop - start)

        return list(map(part, self._leaves, self.axes, self.whole, found))


@final
class CalledSource(AbstractSource):
    """What a function `(start, stop) -> xs` makes."""

    def __init__(
        self,
        make: Callable[[int, int], PyTree],
        bounds: tuple[int, int],
        in_axes: PyTree,
    ) -> None:
        """Calls it once, for the steps between these bounds, to see what it makes."""
        self.made_by = self._make = make
        self._in_axes = in_axes
        self.tree = make(*bounds)
        self.tree_axes = scanned_axes(self.tree, in_axes)
        self.form, self.axes = self._open(self.tree, *bounds)
        self.whole = _unscanned(self.form.take(self.tree), self.axes)

    def read(self, start: int, stop: int) -> PyTree:
        """Calls the function."""
        return self._make(start, stop)

    def place(self, found: PyTree, start: int, stop: int) -> list[Value]:
        """The arrays that were made."""
        form, _ = self._open(found, start, stop)
        wanted = self.types(stop - start)
        of = lambda types: [(aval.shape, aval.dtype) for aval in types]
        is_same = form.rest.treedef == self.form.rest.treedef
        if not is_same or of(form.types) != of(wanted):
            made, expected = _arrays_listed(form), _arrays_listed(self.form, wanted)
            raise ValueError(
                f"Resumable: the function `xs` returned {made} for the steps "
                f"{start} to {stop}, but {expected} was expected after what it "
                f"returned at first. It must return the same types for all segments."
            )
        return self.form.take(found)

    def _open(
        self, xs: PyTree, start: int, stop: int
    ) -> tuple[TreeForm, tuple[Axis, ...]]:
        axes = scanned_axes(xs, self._in_axes)
        sizes = axis_sizes(stand_ins(xs), "xs", axes)
        wrong = {path: n for path, n in sizes.items() if n != stop - start}
        if wrong:
            listing = ", ".join(f"{path} has {n}" for path, n in wrong.items())
            raise ValueError(
                f"Resumable: the function `xs` was called for the steps {start} to "
                f"{stop}, which are {stop - start}, but {listing}. It must give an "
                f"element for each step from `start` on, and none for `stop`."
            )
        form = TreeForm.of(xs, "xs")
        return form, tuple(a for a, flag in _zip(axes, form.rest.taken) if flag)


def scanned_axes(xs: PyTree, in_axes: PyTree) -> list[Axis]:
    """The axis of each leaf of `xs` that is scanned."""
    standing = stand_ins(xs)
    return resolve_axes(
        "Resumable", standing, in_axes, tree_name="xs", spec_name="in_axes"
    )


def stand_ins(tree: PyTree) -> PyTree:
    """The tree with arrays in place of what is no array, and only slices like one."""
    leaves, treedef = flatten(tree)
    return treedef.unflatten(map(_stand_in, leaves))


def is_sliceable(leaf: object) -> bool:
    """Whether a leaf is no array of NumPy or JAX, but has a shape and slices."""
    return not isinstance(leaf, jax.Array | np.ndarray | np.generic) and all(
        hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__")
    )


def read_ahead(
    sources: Sequence[AbstractSource], bounds: Sequence[tuple[int, int]]
) -> Iterator[list[list[Value]]]:
    """The arrays of each source between these bounds."""
    # They are read while those before them are used.

    def read(start: int, stop: int) -> list[Value]:
        return [source.read(start, stop) for source in sources]

    with ThreadPoolExecutor(1, "eqloop-read-ahead") as pool:
        coming = [pool.submit(read, *at) for at in bounds[:1]]
        for i, at in enumerate(bounds):
            found = coming.pop().result()
            coming = [pool.submit(read, *after) for after in bounds[i + 1 : i + 2]]
            yield [s.place(x, *at) for s, x in _zip(sources, found)]


def resized(aval: Aval, axis: Axis, steps: int) -> jax.ShapeDtypeStruct:
    """The type of an array with so many steps along an axis, if it has one for them."""
    if axis is None:
        return aval
    shape = (*aval.shape[:axis], steps, *aval.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def _zip(*lists: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
    return zip(*lists, strict=True)


def _unscanned(arrays: Sequence[Value], axes: Sequence[Axis]) -> list[Value]:
    return [plain(x) if axis is None else None for x, axis in _zip(arrays, axes)]


def _stand_in(leaf: Value) -> Value:
    if not is_sliceable(leaf):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)  # it takes no memory


def _as_array(leaf: Value) -> Value:
    return np.asarray(leaf[...]) if is_sliceable(leaf) else leaf


def _few(leaf: Value, axis: int) -> Value:
    """An array like a leaf, with no step in it."""
    if isinstance(leaf, jax.Array):
        return lax.slice_in_dim(leaf, 0, 0, axis=axis)
    shape = [n for i, n in enumerate(leaf.shape) if i != axis]
    return np.zeros((*shape[:axis], 0, *shape[axis:]), leaf.dtype)


def _is_read(leaf: object, axis: Axis) -> bool:
    return axis is not None and not isinstance(leaf, jax.Array)


def _read_part(leaf: Value, axis: int, start: int, stop: int) -> Value:
    # A copy, as what a mapping reads is to be forgotten.
    part = np.array(leaf[(slice(None),) * axis + (slice(start, stop),)])
    forget_pages(leaf)
    return part


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice_on_device(array: jax.Array, start: Index, axis: int, size: int) -> Value:
    # Compiled once for all segments; `array[start:stop]` would be for each of them.
    return plain(lax.dynamic_slice_in_dim(array, start, size, axis))


def mapping_of(array: Value) -> mmap.mmap | None:
    """The memory map that an array is in, if a file has all that is written to it."""
    # Of another one nothing tells whether it is private, so that what was written to it
    # is nowhere else.
    modes = set[str | None]()
    while isinstance(array, np.ndarray):
        modes |= {array.mode} if isinstance(array, np.memmap) else set()
        array = array.base
    is_in_file = modes and modes <= {"r", "r+", "w+"}
    return array if is_in_file and isinstance(array, mmap.mmap) else None


def forget_pages(leaf: Value) -> None:
    """Has the pages of a memory map that were read count as memory no longer."""
    # The system would drop them if it needed room. Until then the process would seem to
    # grow to the size of the file.
    mapping = mapping_of(leaf)
    if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def _arrays_listed(form: TreeForm, types: Sequence[Value] | None = None) -> str:
    pairs = zip(form.names, form.types if types is None else types, strict=True)
    return ", ".join(f"{name}: {describe(aval)}" for name, aval in pairs) or "nothing"
