"""A loop by panels, and its way back.

The way there is one kernel. The way back has two for each segment, the last one first:
one runs its steps again and stores their carries, the other takes them back. It leaves
the factors of cotangents of matrices, of each step, and their products over the rows
and steps of a segment are made after it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, Flags, pick, split, sum_dtype
from ..._programs import registers_of, told_of
from ..._types import Value
from ..engine.orders._levels import Nest
from ..steps._loop import Loop
from ._classes import AxisProgram, Val
from ._mosaic import why_not, written
from ._pallas import NAME
from ._panel_kernels import PanelLoop, joined
from ._panel_rooms import ROWS
from ._panels import NotPanelsError, Outer, Panel, Panels, Wide
from ._row_programs import RowPrograms

# A matrix is one for tensor cores if it has so many rows and columns.
_LEAST = 16
_DTYPES = "float32", "bfloat16", "float16", "int32"


class PanelsForward:
    """A loop by panels."""

    def __init__(self, of: RowPrograms, program: AxisProgram, vals: Any, loop: Loop):
        consts, carry, x, _, y = vals
        if not any(op.name == "dot_general" for op in program.ops):
            raise NotPanelsError("")  # nobody would expect it
        _check(of, loop, [*carry, *x, *y])
        self._loop, self._carry, self._y = loop, carry, y
        axes = [None] * (len(consts) + len(carry)) + [(axis,) for axis in loop.x_axes]
        at = range(len(consts), len(consts) + len(carry))
        self._run, self._ys = _panel_loop(of, loop, program, at, axes)
        factors = [f for p in self._run.of_kind("product") for f in p.factors]
        if not any(min(f.sizes) >= _LEAST for f in factors):
            raise NotPanelsError(f"none has {_LEAST} rows and columns")
        _check_registers(self._run)

    def __call__(
        self,
        nests: Sequence[Nest],
        held: Flags,
        slots: int,
        consts: Arrays,
        init: Arrays,
        xs: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Runs the loop, see `Forward`."""
        stored = [(nest.levels[0], nest.stride) for nest in nests] if any(held) else []
        inputs, length = [*consts, *init, *xs], self._loop.length
        carry, outs, kept = self._run(inputs, 0, length, stored, held, slots)
        ys = [joined([outs[p] for p in wide]) for wide in self._ys]
        held_vals = pick(self._carry, held) if stored else []
        return (
            [x.reshape(v.shape) for x, v in zip(carry, self._carry, strict=True)],
            _stacked(ys, self._y),
            _stacked(kept, held_vals),
        )


class PanelsBackward:
    """The way back through a loop by panels."""

    def __init__(
        self,
        of: RowPrograms,
        programs: tuple[AxisProgram, AxisProgram],
        vals: Any,
        loop: Loop,
        x_of: Sequence[int],
    ):
        (again, pull), (c, h, x, z, g, sums, before, ct_x) = programs, vals
        _check(of, loop, [*h, *x, *z, *g, *before, *ct_x])
        if any(v.pending for v in (*before, *ct_x)):
            raise NotPanelsError("a sum over rows is carried, or is of a step")
        # What is added up is of all rows, or of one.
        if any(_has_rows(of, val) == bool(val.pending) for val in sums):
            raise NotPanelsError("a cotangent is a sum over some of the rows")
        self._loop, self._vals = loop, vals
        self._ct_axes = [loop.x_axes[i] for i in x_of]
        at = range(len(c), len(c) + len(h))
        none, of_x = [None] * len(c), [(axis,) for axis in loop.x_axes]
        axes = [*none, *[None] * len(h), *of_x]
        self._again, _ = _panel_loop(of, loop, again, at, axes)
        axes = [*none, *[(0,)] * len(h), *of_x, *[(0,)] * len(z), *[None] * len(g)]
        going = range(len(axes) - len(g), len(axes))
        self._pull, outs = _panel_loop(
            of, loop, pull, going, axes, len(sums), frozenset(at)
        )
        self._sums, self._cts = split(outs, len(sums))
        _check_registers(self._again, self._pull)

    def __call__(
        self,
        nests: Sequence[Nest],
        consts: Arrays,
        xs: Arrays,
        zs: Arrays,
        stored: Arrays,
        carried: Arrays,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Goes back, see `Backward`."""
        _, h, _, _, g, sums, _, ct_x = self._vals
        dtypes = [sum_dtype(v.aval.dtype, self._loop.sums) for v in sums]
        totals = [jnp.zeros(v.shape, d) for v, d in zip(sums, dtypes, strict=True)]
        state: Any = totals, list(carried)
        # These are the same for all segments.
        none = [[None] * len(vals) for vals in self._vals[1:5]]
        again = self._again.prepared([*consts, *none[0], *xs])
        pull = self._pull.prepared([*consts, *none[0], *xs, *zs, *none[3]])
        position, row, parts = self._loop.length, sum(n.levels[0] for n in nests), []
        for nest in reversed(nests):
            position, row = position - nest.length, row - nest.levels[0]

            def segment(
                state: Any, i: Value, nest: Nest = nest, start: Any = (position, row)
            ) -> tuple[Any, list[Value]]:
                totals, going = state
                first, steps = start[0] + i * nest.stride, nest.stride
                carry = [a[start[1] + i] for a in stored]
                carries = [a[None] for a in carry]
                if steps > 1:
                    inputs, held = [*consts, *carry, *xs], [True] * len(carry)
                    every = [(steps, 1)], held, steps, again
                    _, _, carries = self._again(inputs, first, steps, *every)
                    carries = _stacked(carries, h)
                inputs = [*consts, *carries, *xs, *zs, *going]
                going, outs, _ = self._pull(inputs, first, steps, prepared=pull)
                going = [a.reshape(v.shape) for a, v in zip(going, g, strict=True)]
                totals = [
                    total + _term(val, out, outs).astype(total.dtype)
                    for total, val, out in zip(totals, sums, self._sums, strict=True)
                ]
                cts = [joined([outs[p] for p in wide]) for wide in self._cts]
                return (totals, going), cts

            every = jnp.arange(nest.levels[0])
            state, made = lax.scan(segment, state, every, reverse=True)
            parts.insert(0, [a.reshape(-1, *a.shape[2:]) for a in made])
        cts = [jnp.concatenate(each) for each in zip(*parts, strict=True)]
        cts = [jnp.flip(a, 0) for a in cts] if self._loop.reverse else cts
        pairs = zip(_stacked(cts, ct_x), self._ct_axes, strict=True)
        return (*state, [jnp.moveaxis(a, 0, axis) for a, axis in pairs])


def _term(val: Val, out: Wide | Outer, outs: dict[Panel, Value]) -> Value:
    """The sum over a segment of the cotangent of a const."""

    def of(wide: Wide) -> Value:
        x = joined([outs[p] for p in wide])
        return x if x.ndim > 2 else x[..., None]

    if not isinstance(out, Outer):
        axes = (0, 1) if val.pending else (0,)
        return jnp.sum(of(out).astype(jnp.float32), axes).reshape(val.shape)
    terms = [
        jnp.einsum(
            "tra,trb->ab",
            of(left),
            of(right),
            precision=how,
            preferred_element_type=jnp.float32,
        )
        for left, right, how in out.pairs
    ]
    return sum(terms[1:], start=terms[0]).reshape(val.shape)


def _panel_loop(
    of: RowPrograms,
    loop: Loop,
    program: AxisProgram,
    carried: range,
    axes: Sequence[tuple[int] | None],
    first: int = 0,
    stored: frozenset[int] = frozenset(),
) -> tuple[PanelLoop, list[Any]]:
    """A loop of the steps of a program, and its outputs but what is carried.

    `axes` says where steps are in each input; the carry is from the `first` output on.
    """
    made = written(of.program(program))
    if (why := why_not([made])) is not None:
        raise NotPanelsError(why)
    n = len(program.ins)
    numbers = made.jaxpr.invars[n : n + len(of.found.roots)]
    used = [v for eqn in made.jaxpr.eqns for v in eqn.invars]
    if any(leaf.rows for leaf in of.lifted) or any(
        v is number for v in used for number in numbers
    ):
        raise NotPanelsError("it has a table of the rows, or their numbers")
    own = [i for i, val in enumerate(program.ins) if _has_rows(of, val)]
    panels = Panels(made, own, carried)
    last = first + len(carried)
    nexts = list(map(panels.one, range(first, last)))
    outs = [*panels.outs[:first], *panels.outs[last:]]
    parts = dict.fromkeys(p for out in outs for wide in _wides(out) for p in wide)
    times = {i: axes[i] for i in own if i not in carried}
    return PanelLoop(
        of, panels, program.ins, carried, times, nexts, list(parts), loop, stored
    ), outs


def _wides(out: Wide | Outer) -> list[Wide]:
    if isinstance(out, Outer):
        return [wide for left, right, _ in out.pairs for wide in (left, right)]
    return [out]


def _has_rows(of: RowPrograms, val: Val) -> bool:
    return any(row is not None for row in of.rows(val))


def _stacked(arrays: Sequence[Value], vals: Sequence[Val]) -> list[Value]:
    """Arrays of some steps in the shapes of the loop."""
    pairs = zip(arrays, vals, strict=True)
    return [x.reshape(x.shape[0], *val.shape) for x, val in pairs]


def _check(of: RowPrograms, loop: Loop, vals: Sequence[Val]) -> None:
    """Refuses loops, and arrays with rows, that these kernels do not know."""
    if loop.stops or loop.meter.is_shown or loop.kept is not None:
        raise NotPanelsError("it stops early, or leaves out some of its outputs")
    if of.settings.block is not None or of.found.count < ROWS:
        raise NotPanelsError(f"it has fewer than {ROWS} rows, or a `block`")
    count = len(of.found.sizes)
    for val in vals:
        rows = of.rows(val)
        if rows[:count] != [*range(count)] or any(r is not None for r in rows[count:]):
            raise NotPanelsError("an array has not all rows as its first axes")
        if str(val.aval.dtype) not in _DTYPES:
            raise NotPanelsError(f"it has numbers of {val.aval.dtype}")


def _check_registers(*loops: PanelLoop) -> None:
    """Refuses kernels whose numbers do not fit into registers: they are compiled."""
    for loop in loops:
        if loop.of.settings.interpret:
            return
        types = list[jax.ShapeDtypeStruct]()
        for i, val in enumerate(loop.vals):
            shape = list(val.shape)
            if (axis := loop.times.get(i)) is not None:
                shape.insert(axis[0], loop.loop.length)
            types.append(jax.ShapeDtypeStruct(shape, val.aval.dtype))

        def run(*inputs: Value, loop: PanelLoop = loop) -> list[Value]:
            carry, outs, _ = loop(inputs, 0, loop.loop.length)
            return [*carry, *outs.values()]

        found = told_of(lambda compiled: registers_of(compiled, NAME), run, *types)
        most = min(255, 2**16 // (128 * loop.groups))
        if found and found.stack and found.number >= most - 7:
            raise NotPanelsError(f"{found.stack} B of a thread are not in registers")
