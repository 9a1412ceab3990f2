"""A loop by panels, and its way back.

The way there is one kernel. The way back has two for each segment, the last one first:
one runs its steps again and stores their carries, the other takes them back. It leaves
the factors of cotangents of matrices, of each step, and their products over the rows
and steps of a segment are made after it.
"""

from collections.abc import Iterable, Sequence
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
from ._panel_kernels import ROWS, PanelLoop, joined
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
        panels = _panels(of, program, carry)
        nexts = list(map(panels.one, range(len(carry))))
        self._ys = list(map(panels.wide, panels.outs[len(carry) :]))
        outs = dict.fromkeys(p for wide in self._ys for p in wide)
        self._run = PanelLoop(
            of,
            panels,
            program.ins,
            range(len(consts), len(consts) + len(carry)),
            _times(of, consts, carry, zip(x, loop.x_axes, strict=True)),
            nexts,
            list(outs),
            loop,
        )
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
        self._loop, self._vals = loop, vals
        self._ct_axes = [loop.x_axes[i] for i in x_of]
        n, of_x = len(c), list(zip(x, loop.x_axes, strict=True))
        panels = _panels(of, again, h)
        at = range(n, n + len(h))
        times = _times(of, c, h, of_x)
        nexts = list(map(panels.one, range(len(h))))
        self._again = PanelLoop(of, panels, again.ins, at, times, nexts, [], loop)
        panels = _panels(of, pull, g)
        self._sums, _, cts = split(panels.outs, len(sums), len(g))
        nexts = [panels.one(len(sums) + i) for i in range(len(g))]
        self._cts = list(map(panels.wide, cts))
        outs = [p for wide in self._cts for p in wide]
        for val, out in zip(sums, self._sums, strict=True):
            pairs = out.pairs if isinstance(out, Outer) else [(out, ())]
            outs += [p for pair in pairs for wide in pair[:2] for p in wide]
            if _has_rows(of, val) == bool(val.pending):
                raise NotPanelsError("a cotangent is a sum over some of the rows")
        start = n + len(h) + len(x) + len(z)
        self._pull = PanelLoop(
            of,
            panels,
            pull.ins,
            range(start, start + len(g)),
            _times(of, c, [], [*((v, 0) for v in h), *of_x, *((v, 0) for v in z)]),
            nexts,
            list(dict.fromkeys(outs)),
            loop,
            frozenset(at),
        )
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
                    every = [(steps, 1)], held, steps
                    _, _, carries = self._again(inputs, first, steps, *every)
                    carries = _stacked(carries, h)
                inputs = [*consts, *carries, *xs, *zs, *going]
                going, outs, _ = self._pull(inputs, first, steps)
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


def _panels(of: RowPrograms, program: AxisProgram, carried: Sequence[Val]) -> Panels:
    made = written(of.program(program))
    if (why := why_not([made])) is not None:
        raise NotPanelsError(why)
    n = len(program.ins)
    numbers = made.jaxpr.invars[n : n + len(of.found.roots)]
    used = [v for eqn in made.jaxpr.eqns for v in eqn.invars]
    if any(leaf.rows for leaf in of.lifted) or any(
        v is w for v in used for w in numbers
    ):
        raise NotPanelsError("it has a table of the rows, or their numbers")
    own = [i for i, val in enumerate(program.ins) if _has_rows(of, val)]
    at = next((i for i, val in enumerate(program.ins) if val is carried[0]), 0)
    return Panels(made, own, range(at, at + len(carried)))


def _times(
    of: RowPrograms,
    consts: Sequence[Val],
    carry: Sequence[Val],
    others: Iterable[tuple[Val, int]],
) -> dict[int, tuple[int] | None]:
    """The axis of the steps of each input that has rows and is not carried."""
    found = {i: None for i, val in enumerate(consts) if _has_rows(of, val)}
    first = len(consts) + len(carry)
    return {**found, **{first + i: (axis,) for i, (_, axis) in enumerate(others)}}


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
