"""Which axis of which leaf a loop or map runs over, and how long that axis is."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import export

from .._types import Aval, PyTree, Value
from ._array_types import has_dtype, mesh_axis_of
from ._partition import (
    Rest,
    as_array,
    describe,
    flatten,
    is_dynamic,
    is_scalar,
    is_typed,
    partition,
    paths,
)
from ._tree_differences import prefix_difference

Axis = int | None
# Trees of these are prefixes of the trees whose leaves they are about.
AxisSpec = int | Callable[[Any], Axis] | None


@dataclasses.dataclass(frozen=True)
class AlongAxes:
    """Trees, out of which the arrays were taken that a loop or map runs over.

    Attributes:
        axes: The axis of each of them.
        rest: All else, which is the same for every step or row.
        length: How many steps or rows there are.
    """

    arrays: list[jax.Array]
    axes: tuple[int, ...]
    rest: Rest
    length: int

    @classmethod
    def of(cls, tree: PyTree, axes: Sequence[Axis], length: int) -> Self:
        """The arrays along these axes; leaves for which that is `None` are left."""
        arrays, rest = partition(tree, [axis is not None for axis in axes])
        found = tuple(axis for axis in axes if axis is not None)
        return cls(list(map(as_array, arrays)), found, rest, length)

    @property
    def element_types(self) -> list[Aval]:
        """The types of what one step or row has of the arrays."""
        pairs = zip(self.axes, map(jax.typeof, self.arrays), strict=True)
        return [jex.mapped_aval(self.length, axis, aval) for axis, aval in pairs]


class _HashableTree:
    """A prefix tree whose containers (lists, dicts) are not hashable themselves."""

    # Not a dataclass, whose fields Equinox would print in place of the tree.
    def __init__(self, tree: PyTree) -> None:
        leaves, treedef = flatten(tree)
        self._identity = (tuple(leaves), treedef)

    @property
    def tree(self) -> PyTree:
        leaves, treedef = self._identity
        return treedef.unflatten(leaves)

    def __eq__(self, other: object) -> bool:
        is_one = isinstance(other, _HashableTree)
        return is_one and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return repr(self.tree)


def hashable_axes(spec: PyTree) -> Hashable:
    """Makes a prefix tree of axes fit to be a static field: its converter.

    >>> spec = {"a": 0, "b": [None, 1]}
    >>> hashable_axes(spec), hash(hashable_axes(spec)) == hash(hashable_axes(spec))
    ({'a': 0, 'b': [None, 1]}, True)
    """
    try:
        hash(spec)
    except TypeError:
        return _HashableTree(spec)
    return spec


def axes_tree(spec: PyTree) -> PyTree:
    """The prefix tree that was given to `hashable_axes`."""
    return spec.tree if isinstance(spec, _HashableTree) else spec


def resolve_axes(
    owner: str,
    tree: PyTree,
    spec: PyTree,
    *,
    tree_name: str,
    spec_name: str,
    new: bool = False,
) -> list[Axis]:
    """The axis of every leaf of a tree, counted from the front, or `None`.

    >>> import jax.numpy as jnp
    >>> tree = {"a": jnp.zeros((2, 3)), "b": "static"}
    >>> resolve_axes("Scan", tree, -1, tree_name="xs", spec_name="in_axes")
    [1, None]
    """
    # Leaves that are not arrays resolve to `None`, whatever the prefix tree says.
    # A `new` axis is still to be inserted, so there is one place more to choose from.
    leaves, _ = flatten(tree)
    names = paths(tree, tree_name)
    specs = broadcast_prefix(owner, axes_tree(spec), tree, tree_name, spec_name)
    return [
        _resolve(owner, leaf, name, *spec, extra=int(new))
        for leaf, name, spec in zip(leaves, names, specs, strict=True)
    ]


def numbers_with_axes(
    owner: str, tree: PyTree, spec: PyTree, *, tree_name: str, spec_name: str
) -> PyTree:
    """A tree whose Python numbers are arrays where the prefix tree gives them an axis.

    >>> numbers_with_axes("Vmap", (1.0, 2.0), (0, None), tree_name="a", spec_name="b")
    (Array(1., dtype=float32, weak_type=True), 2.0)
    """
    leaves, treedef = flatten(tree)
    specs = broadcast_prefix(owner, axes_tree(spec), tree, tree_name, spec_name)
    has_axis = [
        _axis_of(leaf, spec) is not None
        for leaf, (spec, _) in zip(leaves, specs, strict=True)
    ]
    return treedef.unflatten(
        jnp.asarray(leaf) if flag and is_scalar(leaf) else leaf
        for leaf, flag in zip(leaves, has_axis, strict=True)
    )


def axis_sizes(tree: PyTree, name: str, axes: Sequence[Axis]) -> dict[str, int]:
    """The path of every leaf that has an axis, and how long that axis is.

    >>> import jax.numpy as jnp
    >>> axis_sizes((jnp.zeros((2, 3)), "static"), "xs", [1, None])
    {'xs[0]': 3}
    """
    leaves = zip(paths(tree, name), flatten(tree)[0], axes, strict=True)
    return {path: leaf.shape[axis] for path, leaf, axis in leaves if axis is not None}


def common_length(
    name: str,
    sizes: Mapping[str, int],
    length: int | None = None,
    length_name: str = "length",
    whole: str = "A leaf whose axis is None is passed whole.",
) -> int:
    """The length that all the mapped axes have in common.

    >>> common_length("Scan", {"xs[0]": 3, "xs[1]": 3})
    3
    """
    if length is not None:
        sizes = {length_name: length, **sizes}
    if not sizes:
        raise ValueError(
            f"{name}: no leaf is scanned over, so the number of steps is unknown: pass "
            f"`length=`."
        )
    if len(set(sizes.values())) > 1:
        listing = "\n".join(f"  {path}: {size}" for path, size in sizes.items())
        raise ValueError(
            f"{name}: these lengths must all be the same:\n{listing}\n"
            f"{_instead(sizes, length, length_name)} {whole}"
        )
    return next(iter(sizes.values()))


def _instead(sizes: Mapping[str, int], length: int | None, length_name: str) -> str:
    """What to do about lengths that are not the same."""
    if length is None:
        return "Check the axes."
    if length_name == "length":
        return "Check the axes, or leave out `length`."
    # One that cannot be left out: each step that may be run has an element.
    given = {size for path, size in sizes.items() if path != length_name}
    if len(given) > 1:
        return "Check the axes."
    (size,) = given
    if size < length:
        return f"Pass `{length_name}={size}`, or longer arrays."
    one = set(sizes) == {length_name, "xs"}
    first = f"xs[:{length}]" if one else f"jax.tree.map(lambda x: x[:{length}], xs)"
    return f"Pass `{first}`, or `{length_name}={size}`."


def refuse_split(owner: str, tree: PyTree, name: str, axes: Sequence[Axis]) -> None:
    """Checks that nothing is split over an explicit mesh along the axis of a loop."""
    # `jax.lax.scan` refuses it as well: each step would be on another device.
    leaves = zip(paths(tree, name), flatten(tree)[0], axes, strict=True)
    found = [
        f"  {path}: {jax.typeof(leaf).str_short(True)} along axis {axis}"
        for path, leaf, axis in leaves
        if axis is not None and mesh_axis_of(leaf, axis) is not None
    ]
    if found:
        listing = "\n".join(found)
        raise ValueError(
            f"{owner}: an array cannot be split over the devices of an explicit mesh "
            f"along the axis that is looped over:\n{listing}\nSplit it along another "
            f"axis (`jax.sharding.reshard`), or map over the rows with "
            f"`el.ParallelMap`."
        )


def as_length(name: str, length: Value) -> int | None:
    """Checks a `length=` that a user passed."""
    if length is None:
        return None
    if is_symbolic(length):
        return length
    if isinstance(length, bool):
        raise TypeError(f"{name}: `length` must be an int, not the bool {length}.")
    try:
        length = operator.index(length)
    except TypeError:
        raise TypeError(
            f"{name}: `length` must be an int that is known when tracing, but it is "
            f"{describe(length)}, of type {type(length).__name__}."
        ) from None
    if length < 0:
        raise ValueError(f"{name}: `length` must be at least 0, but it is {length}.")
    return length


def is_symbolic(size: Value) -> bool:
    """Whether a size is not known while tracing: `jax.export` has symbolic ones."""
    return export.is_symbolic_dim(size)


def refuse_symbolic(owner: str, size: Value, need: str, instead: str) -> None:
    """Checks that a size is known."""
    if is_symbolic(size):
        raise ValueError(
            f"{owner}: {need} needs a number that is known when tracing, but here it "
            f"is symbolic, {size}. {instead}."
        )


def symbolic_sizes(types: Iterable[Any]) -> list[Value]:
    """The sizes of arrays of these types that are not known."""
    shapes = [aval.shape for aval in types if has_dtype(aval)]
    return list(filter(is_symbolic, itertools.chain(*shapes)))


def refuse_symbolic_sizes(
    owner: str, types: Iterable[object], need: str, instead: str
) -> None:
    """Checks that the sizes of arrays of these types are known."""
    for size in symbolic_sizes(types):
        refuse_symbolic(owner, size, need, instead)


def refuse_symbolic_plan(owner: str, tree: PyTree) -> None:
    """Checks that all sizes in the arguments of a plan are known."""
    instead = "Pass a `jax.ShapeDtypeStruct` with a size that the plan is for"
    refuse_symbolic_sizes(owner, filter(is_typed, flatten(tree)[0]), "a plan", instead)


def broadcast_prefix(
    owner: str,
    spec: PyTree,
    tree: PyTree,
    tree_name: str,
    spec_name: str,
    noun: str = "axis",
) -> list[tuple[Value, str]]:
    """For every leaf of a tree, the leaf of the prefix tree above it, and its path."""
    spec_leaves, spec_treedef = flatten(spec)
    try:
        subtrees = spec_treedef.flatten_up_to(tree)
    except ValueError:
        difference = prefix_difference(spec, tree, spec_name, tree_name)
        raise ValueError(
            f"{owner}: {spec_name}={describe(spec)} is not a prefix of {tree_name}: "
            f"{difference}. Give one {noun} for all leaves, or the same containers as "
            f"in {tree_name}, from the top down."
        ) from None
    broadcast: list[tuple[Value, str]] = []
    for leaf, path, subtree in zip(
        spec_leaves, paths(spec, spec_name), subtrees, strict=True
    ):
        broadcast += [(leaf, path)] * len(flatten(subtree)[0])
    return broadcast


def _resolve(
    owner: str, leaf: Value, name: str, spec: AxisSpec, spec_name: str, extra: int
) -> Axis:
    axis = _axis_of(leaf, spec)
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
        raise TypeError(
            f"{owner}: {spec_name} must be an int, None, or a callable from a leaf to "
            f"either, but for {name} it is {axis!r}, of type {type(axis).__name__}."
        )
    if axis is None or not is_dynamic(leaf):
        return None
    ndim = leaf.ndim + extra
    if not -ndim <= axis < ndim:
        allowed = f"the axes {-ndim} to {ndim - 1}" if ndim else "no axis"
        raise ValueError(
            f"{owner}: {spec_name} gives axis {axis} for {name}, which is "
            f"{describe(leaf)} and has {allowed}. Give it an axis that it has, or "
            f"None."
        )
    return axis % ndim


def _axis_of(leaf: Value, spec: AxisSpec) -> Any:
    return spec(leaf) if callable(spec) else spec
