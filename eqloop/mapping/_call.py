"""From the user's call of a map to a function of rows on arrays, and back."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp

from .._effects import is_ref
from .._lists import Arrays, pick
from .._outputs import Outputs
from .._partition import Rest
from .._positions import loop_scope
from .._programs import has_backward_rules
from .._symbolic import refuse_symbolic
from .._typecheck import enforce_annotations, explained
from .._weak_types import strongly_typed
from ..checkpointing.engine._forward import Saveable
from ..checkpointing.engine._invariant import hoist
from ..checkpointing.engine._step import Step, trace_step
from ..progress import Meter, ProgressBar, make_meter
from ._arguments import Arguments, open_arguments
from ._planner import Planner
from ._reduce import Reduction, finish, resolve_reductions, total
from ._row_map import map_rows
from ._rows import Rows, RowsFunction

VARYING = (
    "results that depend on mapped arguments, and so are not the same for every row"
)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A function of one row, on many.

    Attributes:
        row: `f`, traced on one row: a step that has no carry.
        x_axes: The axes along which rows lie in its arguments.
        y_axes: The axes along which they are to lie in its results.
        reductions: How each of its results is reduced.
    """

    row: Step
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    reductions: tuple[Reduction, ...]

    def vectorised(self, consts: Arrays, xs: Arrays) -> list[jax.Array]:
        """The results for some rows, all at once."""
        one = lambda *x: self.row(consts, [], x)[1]
        if xs[0].shape[self.x_axes[0]] == 1:
            # No `vmap`, under which a `cond` would run both of its branches.
            ys = one(*map(jnp.squeeze, xs, self.x_axes))
            return list(map(jnp.expand_dims, ys, self.y_axes))
        return jax.vmap(one, in_axes=self.x_axes, out_axes=list(self.y_axes))(*xs)

    def __call__(
        self, size: int, visits: Any, consts: Arrays, xs: Arrays
    ) -> tuple[list[Any], list[Any]]:
        """The results for the rows of a chunk, see `Rows`: sums, and the others."""
        results = zip(
            self.vectorised(consts, xs), self.y_axes, self.reductions, strict=True
        )
        sums, ys = [], []
        for y, axis, how in results:
            if how is None:
                ys.append(y)
            else:
                sums.append(total(y, visits, axis))
        return sums, ys

    def rows(self, consts: Arrays, xs: Arrays, size: int, planner: Planner) -> Rows:
        """The function as a map over rows takes it.

        Args:
            consts: What is the same for every row.
            xs: What has rows.
            size: How many rows there are.
            planner: How they are cut.
        """
        const_types, x_types = (
            [jax.typeof(strongly_typed(x)) for x in group] for group in (consts, xs)
        )
        y_axes = pick(self.y_axes, [how is None for how in self.reductions])
        return Rows(
            f=RowsFunction(self),
            length=size,
            const_types=tuple(const_types),
            x_types=tuple(
                jex.mapped_aval(size, axis, aval)
                for aval, axis in zip(x_types, self.x_axes, strict=True)
            ),
            x_axes=self.x_axes,
            y_axes=tuple(y_axes),
            shares=(False,) * len(y_axes),
            num_sums=len(self.y_axes) - len(y_axes),
            uses_visits=len(y_axes) < len(self.y_axes),
            probe=planner.probe(size),
        )


@dataclasses.dataclass(frozen=True)
class MappedCall:
    """A call of a map, taken apart.

    Attributes:
        f: The function, on some rows.
        consts: The arrays that are the same for every row.
        xs: The arrays that are mapped.
        size: How many rows there are.
        outputs: What the user gets, without its arrays.
        same: Those of them that are the same for every row.
        name: The name of the transform, for error messages.
    """

    f: Mapped
    consts: list[jax.Array]
    xs: list[jax.Array]
    size: int
    outputs: Outputs
    same: list[jax.Array]
    name: str

    def run(
        self,
        planner: Planner,
        policy: Saveable = None,
        progress: ProgressBar | None = None,
    ) -> Any:
        """Runs the call in chunks, and gives what the user gets.

        Args:
            planner: How the rows are cut.
            policy: What is stored of all rows for the backward pass.
            progress: The progress bar, if there is to be one.
        """
        meter = make_meter(self.name, progress, self.size)
        return self.outputs.join(self.results(planner, policy, meter), self.same)

    def results(
        self, planner: Planner, policy: Saveable = None, meter: Meter | None = None
    ) -> list[jax.Array]:
        """The results for all rows."""
        f, consts, xs = self.f, self.consts, self.xs
        if not planner.takes_any_length:
            need = "to cut rows into chunks"
            instead = "Map one row at a time (`el.Map`), or all at once (`el.Vmap`)"
            refuse_symbolic(self.name, self.size, need, instead)
        if has_backward_rules(f.row.jaxpr):
            planner = planner.in_exact_chunks()
        if planner.is_whole(self.size) and meter is None:
            sums, ys = f(self.size, None, consts, xs)
        else:
            rows = f.rows(consts, xs, self.size, planner)
            rows = dataclasses.replace(rows, meter=meter, is_guarded=meter is not None)
            with loop_scope(self.name):
                sums, ys = map_rows(rows, consts, xs, planner=planner, policy=policy)
        sums, ys = iter(sums), iter(ys)
        return [
            next(ys) if how is None else finish(how, next(sums), self.size, y.dtype)
            for how, y in zip(f.reductions, f.row.y_types, strict=True)
        ]


def open_call(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    out_axes: Any,
    reduce: Any = None,
) -> MappedCall:
    """Takes the call `f(*args, **kwargs)` of a map apart.

    Args:
        name: The name of the transform, for error messages.
        f: The function that is mapped. Its own arrays are the same for every row.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_axes: As `eqx.filter_vmap` has it, see `open_arguments`.
        out_axes: A prefix tree of axes for what `f` returns.
        reduce: A prefix tree of reductions for it.
    """
    arguments = open_arguments(name, f, args, kwargs, in_axes=in_axes)
    return trace_call(Row(name, f, arguments.rest, out_axes, reduce), arguments)


def trace_call(row: "Row", arguments: Arguments) -> MappedCall:
    """Traces a function of one row for a call with these arguments."""
    x_types = [
        jex.mapped_aval(arguments.size, axis, jax.typeof(x))
        for x, axis in zip(arguments.xs, arguments.axes, strict=True)
    ]
    step, consts = trace_step(lambda carry, x: (carry, row(x)), [], x_types)
    if any(map(is_ref, consts)):
        raise ValueError(
            f"{row.name}: f closes over a reference (`jax.new_ref`), but the rows of a "
            f"map have no order in which to read and write it. Use `el.Scan` or "
            f"`el.ForLoop`, or pass the value of the reference, `ref[...]`."
        )
    outputs = row.outputs
    step, same = hoist(row.name, step, consts, outputs, VARYING)
    reductions = pick(row.reductions, [not is_same for is_same in outputs.same])
    mapped = Mapped(step, arguments.axes, outputs.stacked_axes, tuple(reductions))
    xs, size = arguments.xs, arguments.size
    return MappedCall(mapped, consts, xs, size, outputs, same, row.name)


class Row:
    """`f` on the arrays of one row; remembers what it returned besides arrays.

    Attributes:
        outputs: What it returned.
        reductions: How each of its arrays is reduced.
    """

    outputs: Outputs
    reductions: list[Reduction]

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        arguments: Rest,
        out_axes: Any,
        reduce: Any = None,
    ) -> None:
        self.name = name
        self.f = f
        self.arguments = arguments
        self.out_axes = out_axes
        self.reduce = reduce

    def __call__(self, x: Arrays) -> list[Any]:
        args, kwargs = self.arguments.join(x)
        note = (
            f"This was raised while {self.name} traced f on one row, with\n"
            f"  {eqx.tree_pformat((args, kwargs))}"
        )
        with explained(note):
            out = enforce_annotations(self.f)(*args, **kwargs)
        out, self.reductions = resolve_reductions(self.name, out, self.reduce)
        arrays, self.outputs = Outputs.of(self.name, out, self.out_axes, name="out")
        return arrays
