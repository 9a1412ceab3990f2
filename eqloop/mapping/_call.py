"""From the user's call of a map to a function of one row on arrays, and back."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex

from .._axes import Axis, axes_tree, common_length, resolve_axes
from .._lists import Arrays, pick
from .._partition import Rest, as_arrays, flatten, is_dynamic, paths, split
from .._typecheck import enforce_annotations, explained
from ..checkpointing.engine._invariant import (
    drop_outputs,
    evaluate_outputs,
    varying_outputs,
)
from ..checkpointing.engine._step import Step, trace_step

_DEFAULT_AXES = eqx.if_array(0)


@dataclasses.dataclass(frozen=True)
class MappedCall:
    """A call of a map, taken apart.

    Attributes:
        row: `f`, traced on one row: a step that has no carry.
        consts: The arrays that are the same for every row.
        xs: The arrays that are mapped.
        x_axes: The axis of each of them that is.
        y_axes: The axis of each result along which its rows are to be.
        size: How many rows there are.
        close: Turns the results for all rows into what the user gets.
    """

    row: Step
    consts: list[jax.Array]
    xs: list[jax.Array]
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    size: int
    close: Callable[[list[jax.Array]], Any]

    def vectorised(self, consts: Arrays, xs: Arrays) -> list[jax.Array]:
        """The results for some of the rows, all at once."""
        row = lambda *x: self.row(consts, [], x)[1]
        return jax.vmap(row, in_axes=self.x_axes, out_axes=list(self.y_axes))(*xs)


def open_call(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
) -> MappedCall:
    """Takes the call `f(*args, **kwargs)` of a map apart.

    Args:
        name: The name of the transform, for error messages.
        f: The function that is mapped. Its own arrays are the same for every row.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_axes: As `eqx.filter_vmap` has it, see `_argument_axes`.
        out_axes: A prefix tree of axes for what `f` returns.
    """
    args, kwargs = as_arrays((args, kwargs))
    names = _argument_names(f, args)
    specs = _argument_axes(name, names, kwargs, axes_tree(in_axes))
    arguments = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    axes: list[Axis] = []
    sizes: dict[str, int] = {}
    for argument, value in arguments:
        spec, spec_name = specs[argument]
        found = resolve_axes(value, spec, tree_name=argument, spec_name=spec_name)
        axes += found
        for path, leaf, axis in zip(
            paths(value, argument), flatten(value)[0], found, strict=True
        ):
            if axis is not None:
                sizes[path] = leaf.shape[axis]
    if not sizes:
        raise ValueError(_nothing_to_map(name, arguments))
    size = common_length(name, sizes)
    xs, rest = split((args, kwargs), [axis is not None for axis in axes])
    x_axes = tuple(axis for axis in axes if axis is not None)
    return _traced(_Row(name, f, rest, out_axes), xs, x_axes, size)


def _traced(
    body: "_Row", xs: list[jax.Array], x_axes: tuple[int, ...], size: int
) -> MappedCall:
    x_types = [
        jex.mapped_aval(size, axis, jax.typeof(x))
        for x, axis in zip(xs, x_axes, strict=True)
    ]
    row, consts = trace_step(body, [], x_types)
    axes = body.axes
    shared = [axis is None for axis in axes]
    constant: list[jax.Array] = []
    if any(shared):
        body.check_shared(varying_outputs(row))
        constant = evaluate_outputs(row, consts, shared)
        row = drop_outputs(row, shared)

    def close(ys: list[jax.Array]) -> Any:
        mapped, same = iter(ys), iter(constant)
        return body.result.join([next(same if s else mapped) for s in shared])

    y_axes = tuple(axis for axis in axes if axis is not None)
    return MappedCall(row, consts, xs, x_axes, y_axes, size, close)


@dataclasses.dataclass
class _Row:
    """`f` on the arrays of one row; remembers what it returned besides arrays."""

    name: str
    f: Callable[..., Any]
    arguments: Rest
    out_axes: Any

    def __call__(self, carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        args, kwargs = self.arguments.join(x)
        note = (
            f"This was raised while {self.name} traced f on one row, with\n"
            f"  {eqx.tree_pformat((args, kwargs))}"
        )
        with explained(note):
            out = enforce_annotations(self.f)(*args, **kwargs)
        out = as_arrays(out)
        dynamic = [is_dynamic(leaf) for leaf in flatten(out)[0]]
        axes = resolve_axes(
            out, self.out_axes, tree_name="out", spec_name="out_axes", new=True
        )
        self.axes: list[Axis] = pick(axes, dynamic)
        self.paths = pick(paths(out, "out"), dynamic)
        y, self.result = split(out, dynamic)
        return carry, y

    def check_shared(self, varying: list[bool]) -> None:
        """Sees to it that what is to be the same for all rows is."""
        wrong = [
            path
            for path, axis, varies in zip(self.paths, self.axes, varying, strict=True)
            if axis is None and varies
        ]
        if wrong:
            listing = "\n".join(f"  {path}" for path in wrong)
            raise ValueError(
                f"{self.name}: out_axes gives None for results that depend on mapped "
                f"arguments, and so are not the same for every row:\n{listing}\nGive "
                f"them an int, the axis along which the rows are to be stacked."
            )


def _signature(f: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    if isinstance(f, eqx.Partial):
        f = functools.partial(f.func, *f.args, **f.keywords)
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):  # built-in functions need not have one
        return {}


def _argument_names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """What the positional arguments are called, as far as they have names."""
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in _signature(f).values() if p.kind in positional]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]


def _argument_axes(
    name: str, names: list[str], kwargs: dict[str, Any], in_axes: Any
) -> dict[str, tuple[Any, str]]:
    """For every argument the prefix tree of its axes, and what that is called.

    A dictionary has the axes of arguments by name, a tuple or list those of the
    positional arguments in turn; arguments that neither mentions have the default.
    Anything else holds for all arguments.
    """
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
                f"{name}: in_axes has {len(in_axes)} entries, but f was called with "
                f"{len(names)} positional arguments: {', '.join(names)}. Give one "
                f"entry for each, one axis for all, or a dictionary of axes by name."
            )
        given = {
            key: (spec, f"in_axes[{i}]")
            for i, (key, spec) in enumerate(zip(names, in_axes, strict=True))
        }
    else:
        return dict.fromkeys(known, (in_axes, "in_axes"))
    return dict.fromkeys(known, (_DEFAULT_AXES, "in_axes")) | given


def _nothing_to_map(name: str, arguments: list[tuple[str, Any]]) -> str:
    listing = "\n".join(
        f"  {argument}: {eqx.tree_pformat(value)}" for argument, value in arguments
    )
    return (
        f"{name}: there is nothing to map over, as in_axes gives no array of these "
        f"arguments an axis:\n{listing or '  (none)'}\nMap an array, or call f itself."
    )
