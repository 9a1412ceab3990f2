"""Opens the call of a map: from the user's trees to a function of rows, and back."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import (
    AlongAxes,
    Axis,
    Rest,
    as_arrays,
    axes_of_keys,
    axes_tree,
    axis_sizes,
    broadcast_prefix,
    common_length,
    describe,
    flatten,
    is_dynamic,
    is_scalar,
    mesh_axis_of,
    numbers_with_axes,
    paths,
    pick,
    refuse_foreign_arrays,
    refuse_symbolic,
    resolve_axes,
    strongly_typed,
)
from .._calls import (
    KnownAs,
    OpenedCall,
    Outputs,
    argument_names,
    as_count,
    call_names,
    call_traced,
    explained,
    named_as,
)
from .._programs import is_ref, loop_scope, refuse_refs, sees_batch
from .._types import PyTree, Value
from ..checkpointing import (
    Budget,
    Saveable,
    Viewing,
    hoist,
    is_budget,
    policies,
    refuse_second_place,
    trace_step,
)
from ..progress import NO_BARS, Guarded, Meter, ProgressBar, make_meter
from ._chunk_function import Reduction, Vectorised, finish, number_of_parts
from ._chunk_loop import AtMost
from ._fitting import ChunkPlanner, Within
from ._planned_map import PlannedMap

_DEFAULT_AXES = eqx.if_array(0)
VARYING = (
    "results that depend on mapped arguments, and so are not the same for every row"
)


@dataclasses.dataclass(frozen=True)
class OpenedMap:
    """A call of a map as a function of rows on arrays.

    Attributes:
        consts: The arrays that are the same for every row.
        viewing: Which results are a part of a row, and so not computed by `f`.
        outputs: The user's result without its arrays.
        same: The arrays of the result that are the same for every row.
        name: The name of the transform, for error messages.
    """

    f: Vectorised
    consts: list[jax.Array]
    xs: list[jax.Array]
    size: int
    viewing: Viewing
    outputs: Outputs
    same: list[jax.Array]
    name: str

    def run(
        self,
        planner: ChunkPlanner,
        policy: Saveable = None,
        progress: ProgressBar | None = None,
    ) -> PyTree:
        """Runs the call in chunks. Returns the user's result."""
        meter = make_meter(self.name, progress, self.size)
        return self.outputs.join(self.results(planner, policy, meter), self.same)

    def results(
        self, planner: ChunkPlanner, policy: Saveable = None, meter: Meter = NO_BARS
    ) -> list[jax.Array]:
        """The results for all rows."""
        f, axes = self.f, self.outputs.stacked_axes
        is_empty = not (f.row.y_types or f.row.jaxpr.effects or meter.is_shown)
        computed = [] if is_empty else self._computed(planner, policy, meter)
        return self.viewing.join(computed, self.xs, f.x_axes, axes)

    def _computed(
        self, planner: ChunkPlanner, policy: Saveable, meter: Meter
    ) -> list[jax.Array]:
        """The results that `f` computes."""
        f, consts, xs = self.f, self.consts, self.xs
        if not planner.takes_any_length:
            need = "to cut rows into chunks"
            instead = "Map one row at a time (`el.Map`), or all at once (`el.Vmap`)"
            refuse_symbolic(self.name, self.size, need, instead)
        # All rows at once need no loop, and JAX differentiates that as a `vmap`. A bar
        # needs the loop, even if it has a single chunk.
        if planner.is_whole(self.size) and not meter.is_shown:
            sums, ys = f.on_rows(consts, xs)
        else:
            mesh_axis = mesh_axis_of(jax.typeof(xs[0]), f.x_axes[0])
            planner = planner.in_parts(number_of_parts(mesh_axis))
            probe = planner.chunks(self.size).size
            chunked = f.chunk_function(self.name, consts, xs, self.size, probe)
            # What is run again gives what ran before, see `origin` of `ChunkFunction`.
            if not planner.has_same_chunks and sees_batch(f.row.jaxpr):
                chunked = dataclasses.replace(chunked, origin=chunked)
            if meter.is_shown:
                chunked = dataclasses.replace(
                    chunked, meter=meter, changes=(Guarded(),)
                )
            with loop_scope(self.name):
                inputs = [list(map(strongly_typed, group)) for group in (consts, xs)]
                policy = None if policy == policies.save_nothing else policy
                types = tuple(list(map(jax.typeof, group)) for group in inputs)
                sums, ys = PlannedMap(chunked, planner, policy, types).apply(*inputs)
        sums, ys = iter(sums), iter(ys)
        return [
            next(ys) if how is None else finish(how, next(sums), self.size, y.dtype)
            for how, y in zip(f.reductions, f.row.y_types, strict=True)
        ]


def open_map(
    name: str,
    f: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: PyTree,
    out_axes: PyTree,
    reduce: PyTree = None,
) -> OpenedMap:
    """Opens the call `f(*args, **kwargs)` of a map."""
    arguments = open_arguments(name, f, args, kwargs, in_axes=in_axes)
    row = open_row(name, f, arguments.rest, out_axes, reduce)
    return trace_call(name, row, arguments)


# A call of `f` on one row. When it is traced, it keeps the result without its arrays,
# and the reduction of each array.
OpenedRow = OpenedCall[list[Any], tuple[Outputs, list[Reduction]]]


def open_row(
    name: str,
    f: Callable[..., PyTree],
    arguments: Rest,
    out_axes: PyTree,
    reduce: PyTree = None,
) -> OpenedRow:
    """`f` on one row; `arguments` are all arguments without the mapped arrays."""

    def call(args: tuple[PyTree, ...], kwargs: dict[str, Any]) -> PyTree:
        given = {**dict(zip(argument_names(f, args), args, strict=True)), **kwargs}
        with explained(name, "f on one row,", given):
            return call_traced(name, f, args, kwargs)

    def take(out: PyTree) -> tuple[list[Value], tuple[Outputs, list[Reduction]]]:
        out = numbers_with_axes(
            name, out, out_axes, tree_name="out", spec_name="out_axes"
        )
        out, reductions = resolve_reductions(name, out, reduce)
        arrays, outputs = Outputs.of(name, out, out_axes, name="out")
        return arrays, (outputs, reductions)

    args, kwargs = arguments.join([None] * sum(arguments.taken))
    taken = [*[False] * len(flatten(f)[0]), *arguments.taken]
    known_as = KnownAs("vmap", f, call_names(f, args, kwargs, taken))
    return OpenedCall(arguments.join, call, take, known_as)


def trace_call(name: str, row: OpenedRow, arguments: AlongAxes) -> OpenedMap:
    """Traces a function of one row for a call with these arguments."""
    x_types = arguments.element_types
    on_arrays = row.on_arrays
    on_row = named_as(lambda _, x: ([], on_arrays(x)), on_arrays)
    step, consts = trace_step(on_row, [], x_types)
    if any(map(is_ref, consts)):
        raise ValueError(
            f"{name}: f closes over a reference (`jax.new_ref`), but the rows of a "
            f"map have no order in which to read and write it. Use `el.Scan` or "
            f"`el.ForLoop`, or pass the value of the reference, `ref[...]`."
        )
    outputs, reductions = row.kept
    step, same = hoist(name, step, consts, outputs, VARYING)
    reductions = pick(reductions, [not is_same for is_same in outputs.same])
    viewing = Viewing.of(step, [how is None for how in reductions])
    computed = [view is None for view in viewing.views]
    mapped = Vectorised(
        viewing.step,
        arguments.axes,
        tuple(pick(outputs.stacked_axes, computed)),
        tuple(pick(reductions, computed)),
    )
    xs, length = arguments.arrays, arguments.length
    return OpenedMap(mapped, consts, xs, length, viewing, outputs, same, name)


# Which arrays of the arguments are mapped, and along which axes.


def open_arguments(
    name: str,
    f: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: PyTree,
    size: int | None = None,
) -> AlongAxes:
    """Divides the arguments of a map into mapped arrays and everything else."""
    names = argument_names(f, args)
    for argument, value in (*zip(names, args, strict=True), *kwargs.items()):
        refuse_refs(name, value, argument)
        refuse_foreign_arrays(name, value, argument)
    args, kwargs = as_arrays((args, kwargs))
    specs = _argument_axes(name, names, kwargs, axes_tree(in_axes))
    arguments = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    axes: dict[str, list[Axis]] = {}
    sizes, of_each = {} if size is None else {"axis_size": size}, dict[str, list[int]]()
    for argument, value in arguments:
        if _is_split(argument, value, kwargs, specs):
            continue
        spec, spec_name = specs[argument]
        found = resolve_axes(name, value, spec, tree_name=argument, spec_name=spec_name)
        axes[argument] = found
        of_argument = axis_sizes(value, argument, found)
        sizes |= of_argument
        of_each[argument] = list(of_argument.values())
    if not sizes:
        by_default = in_axes == _DEFAULT_AXES
        raise ValueError(_nothing_to_map(name, arguments, by_default))
    size = common_length(name, sizes, whole=_passed_whole(name, of_each))
    if "key" in kwargs and "key" not in axes:
        kwargs, axes["key"] = kwargs | {"key": _split(name, kwargs["key"], size)}, [0]
    all_axes = [axis for argument, _ in arguments for axis in axes[argument]]
    return AlongAxes.of((args, kwargs), all_axes, size)


def _passed_whole(name: str, sizes: dict[str, list[int]]) -> str:
    """How to pass an argument whole, such as the one whose lengths are others'."""
    count = Counter(size for of_one in sizes.values() for size in set(of_one))
    rarity = lambda argument: min(count[size] for size in sizes[argument])
    of_several = [argument for argument in sizes if len(set(sizes[argument])) > 1]
    mapped = filter(sizes.get, sizes)
    odd = of_several[0] if of_several else min(mapped, key=rarity, default="x")
    other = " of `el.Vmap` or `el.ChunkedVmap`" if name == "Map" else ""
    return f"To pass {odd} whole: `in_axes={{{odd!r}: None}}`{other}."


def _is_split(
    argument: str, value: Value, kwargs: dict[str, Any], specs: dict[str, Any]
) -> bool:
    """Whether an argument is one key, which is split to give each row its own."""
    if argument != "key" or "key" not in kwargs or not is_dynamic(value):
        return False
    return axes_of_keys(value) == 0 and specs["key"][0] is not None


def _split(name: str, key: jax.Array, size: int) -> jax.Array:
    try:
        return jax.random.split(key, size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: `key` must be a PRNG key, as `jax.random.key(0)` makes it, or an "
            f"array of one key for each row, not {describe(key)}."
        ) from error


def _argument_axes(
    name: str, names: list[str], kwargs: dict[str, Any], in_axes: PyTree
) -> dict[str, tuple[Any, str]]:
    """The prefix tree of axes for each argument, and its name for error messages."""
    # A dictionary has the axes of arguments by name, and a tuple or list has those of
    # the positional arguments in order. Arguments that it does not mention have the
    # default. Anything else holds for all arguments.
    known = [*names, *kwargs]
    if isinstance(in_axes, dict):
        if unknown := [repr(key) for key in in_axes if key not in known]:
            raise ValueError(
                f"{name}: in_axes names {', '.join(unknown)}, but f was called with "
                f"these arguments: {', '.join(known)}."
            )
        given = {key: (spec, f"in_axes[{key!r}]") for key, spec in in_axes.items()}
    elif isinstance(in_axes, tuple | list):
        if len(in_axes) != len(names):
            raise ValueError(
                f"{name}: in_axes must have one entry for each positional argument, "
                f"{', '.join(names) or 'of which there is none'}, but it has "
                f"{len(in_axes)}. Or give one axis for all, or a dictionary of axes by "
                f"name."
            )
        given = {
            key: (spec, f"in_axes[{i}]")
            for i, (key, spec) in enumerate(zip(names, in_axes, strict=True))
        }
    else:
        return dict.fromkeys(known, (in_axes, "in_axes"))
    return dict.fromkeys(known, (_DEFAULT_AXES, "in_axes")) | given


def _nothing_to_map(
    name: str, arguments: list[tuple[str, PyTree]], by_default: bool
) -> str:
    listing = "\n".join(
        f"  {argument}: {eqx.tree_pformat(value)}" for argument, value in arguments
    )
    of_axes = "in_axes gives no array of these arguments an axis"
    why = "there is no array among these arguments" if by_default else of_axes
    return (
        f"{name}: there is nothing to map over, as {why}:\n{listing or '  (none)'}\n"
        f"Map an array, as `jnp.asarray` makes one of numbers, or call f itself."
    )


# What `chunk_size` and `reduce` mean.


def as_chunk_size(owner: str, what: str, size: object) -> int | Budget:
    """Makes an `int` of a number of rows, and takes a `Budget` as it is."""
    if not is_budget(size):
        return as_count(owner, "chunk_size", what, size)
    refuse_second_place(owner, size)
    return size


def planner_for(size: int | Budget) -> ChunkPlanner:
    """The planner for a `chunk_size` as the user gives it."""
    return AtMost(size) if isinstance(size, int) else Within(size.nbytes)


def check_reduce(name: str, spec: object) -> None:
    """Checks a `reduce=` that a user passed."""
    for leaf, path in zip(flatten(spec)[0], paths(spec, "reduce"), strict=True):
        if not (leaf is None or (isinstance(leaf, str) and leaf in ("sum", "mean"))):
            raise ValueError(
                f"{name}: `{path}` must be 'sum', 'mean', or None to stack the rows, "
                f"not {leaf!r}."
            )


def resolve_reductions(
    name: str, out: PyTree, spec: PyTree
) -> tuple[PyTree, list[Reduction]]:
    """Finds the reduction of each array that `f` returned."""
    leaves, treedef = flatten(out)
    specs = broadcast_prefix(name, spec, out, "out", "reduce", noun="reduction")
    reductions: list[Reduction] = []
    for index, (path, (how, _)) in enumerate(
        zip(paths(out, "out"), specs, strict=True)
    ):
        if how is not None and is_scalar(leaves[index]):
            leaves[index] = jnp.asarray(leaves[index])
        if is_dynamic(leaf := leaves[index]):
            _check_adds_up(name, path, leaf, how)
            reductions.append(how)
    return treedef.unflatten(leaves), reductions


def _check_adds_up(name: str, path: str, leaf: Value, how: Reduction) -> None:
    if how is not None and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(
            f"{name}: reduce={how!r} adds up what f returns, which cannot be done with "
            f"{path}, which is {describe(leaf)}. Give it None in a tree of reductions, "
            f"to stack it."
        )
