"""A loop by panels, and its way back: a kernel each.

The way back runs each segment again, leaves its carries in memory, and takes its steps
back. What a segment leaves there, the next one has the place of.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._arrays import Arrays, Flags, pick, split, sum_dtype
from ..._programs import registers_of, run, told_of
from ..._types import Value
from ..engine.orders._levels import Nest
from ..steps._loop import Loop
from ._classes import AxisProgram, Val
from ._mosaic import why_not, written
from ._nests import usual_nests
from ._pallas import NAME
from ._panel_kernels import PanelLoop, joined
from ._panel_rooms import ROWS, PanelStep, Total
from ._panels import NotPanelsError, Outer, Panel, Panels, Wide, ends, spread
from ._row_programs import RowPrograms

_FLOAT = np.dtype("float32")
# A step is one of panels if it carries a vector of so many units, or multiplies by a
# matrix of so many rows and columns. Of fewer numbers, each is written out.
_LEAST = 32
# So few bytes of a thread go to a cache and back (0.5 MB for a block, which is some
# 10 us) in less time than a loop of XLA takes to start the kernels of a step.
_MOST_SPILLED = 1024
_DTYPES = "float32", "bfloat16", "float16", "int32"


class PanelsForward:
    """A loop by panels."""

    def __init__(self, of: RowPrograms, program: AxisProgram, vals: Any, loop: Loop):
        consts, carry, x, _, y = vals
        _check(of, loop, [program], carry, consts, [*carry, *x, *y])
        self._loop, self._carry, self._y = loop, carry, y
        at = range(len(consts), len(consts) + len(carry))
        panels = _panels(of, of.program(program), program.ins, at)
        self._ys = list(map(panels.wide, panels.outs[len(carry) :]))
        outs = [p for wide in self._ys for p in wide]
        nexts = list(map(panels.one, range(len(carry))))
        step = PanelStep(at, nexts, list(dict.fromkeys(outs)))
        axes = [*[None] * at.stop, *loop.x_axes]
        times = _times(of, program.ins, axes, *at)
        self._run = PanelLoop(of, panels, program.ins, times, loop, step)
        _check_room(self._run)

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
        held = held or (False,) * len(init)
        nests = nests if any(held) else [Nest((1, self._loop.length))]
        inputs = [*consts, *init, *xs]
        carry, outs, kept, _ = self._run(inputs, nests, held, slots)
        ys = [joined([outs[p] for p in wide]) for wide in self._ys]
        return (
            [x.reshape(v.shape) for x, v in zip(carry, self._carry, strict=True)],
            _stacked(ys, self._y),
            _stacked(kept, pick(self._carry, held)),
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
        _check(of, loop, programs, g, c, [*h, *x, *z, *g, *before, *ct_x])
        if any(v.pending for v in (*before, *ct_x)):
            raise NotPanelsError("a sum over rows is carried, or is of a step")
        # What is added up is of all rows, or of one.
        own = [_has_rows(of, val) for val in sums]
        if any(has == bool(v.pending) for has, v in zip(own, sums, strict=True)):
            raise NotPanelsError("a cotangent is a sum over some of the rows")
        self._loop, self._vals, self._own = loop, vals, own
        self._ct_axes = [loop.x_axes[i] for i in x_of]
        there, back, n = of.program(again), of.program(pull), len(pull.ins)
        of_own = pick(back.out_avals[: len(sums)], own)

        def both(*flat: Value) -> list[Value]:
            ins, added, more = split(flat, n, len(of_own))
            made, cts = split(run(back, *ins, *more), len(sums) + len(g))
            mine = zip(pick(made[: len(sums)], own), added, strict=True)
            mine = [x.astype(y.dtype) + y for x, y in mine]
            return [*run(there, *ins[: len(again.ins)], *more), *made, *mine, *cts]

        ins = [*pull.ins, *pick(sums, own)]
        of_own = [v.update(dtype=_FLOAT) for v in of_own]
        made = jax.make_jaxpr(both)(*back.in_avals[:n], *of_own, *back.in_avals[n:])
        at, going = range(len(c), len(c) + len(h)), range(n - len(g), len(ins))
        panels = _panels(of, made, ins, at, going)
        first, *counts, _ = itertools.accumulate(map(len, (h, sums, going, ct_x)))
        outs = [x if isinstance(x, Outer) else panels.wide(x) for x in panels.outs]
        self._cts = list(map(panels.wide, outs[counts[1] :]))
        of_sums = zip(outs[first : counts[0]], own, strict=True)
        self._totals = {i: out for i, (out, has) in enumerate(of_sums) if not has}
        step = PanelStep(
            going,
            [panels.one(i) for i in range(*counts)],
            list(dict.fromkeys(p for wide in self._cts for p in wide)),
            _totals(self._totals),
        )
        axes = [*[None] * at.stop, *loop.x_axes, *[0] * len(z), *[None] * len(going)]
        times = _times(of, ins, axes, *at, *going)
        rerun = PanelStep(at, list(map(panels.one, range(first))))
        self._run = PanelLoop(of, panels, ins, times, loop, step, rerun)
        _check_room(self._run)

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
        *_, g, sums, _, ct_x = self._vals
        added = [jnp.zeros(v.shape, _FLOAT) for v in pick(sums, self._own)]
        inputs = [*consts, *stored, *xs, *zs, *carried, *added]
        made, outs, _, totals = self._run(inputs, nests, stored=stored)
        going, mine = split(made, len(g))
        going = [a.reshape(v.shape) for a, v in zip(going, g, strict=True)]
        rest, found = iter(mine), list[Value]()
        for i, val in enumerate(sums):
            is_own = i not in self._totals
            x = next(rest) if is_own else _assembled(i, self._totals[i], totals)
            dtype = sum_dtype(val.aval.dtype, self._loop.sums)
            found.append(x.astype(dtype).reshape(val.shape))
        cts = [joined([outs[p] for p in wide]) for wide in self._cts]
        pairs = zip(_stacked(cts, ct_x), self._ct_axes, strict=True)
        return found, going, [jnp.moveaxis(a, 0, axis) for a, axis in pairs]


def _assembled(i: int, out: Wide | Outer, totals: dict[Total, Value]) -> Value:
    """A matrix, or a vector, from what is added up of its parts."""
    left, right = _pairs_of(out)[0]
    rows, columns, terms = ends(left)[-1], ends(right)[-1] or 1, list[Value]()
    for total, x in totals.items():
        of, is_turned, (a, m), (b, n) = total.place
        if of == i:
            x, (a, b) = x.reshape(ROWS, -1)[:m, :n], (b, a) if is_turned else (a, b)
            x = x.T if is_turned else x
            around = (a, rows - a - x.shape[0]), (b, columns - b - x.shape[1])
            terms.append(jnp.pad(x, around))
    return sum(terms[1:], start=terms[0])


def _pairs_of(out: Wide | Outer) -> Any:
    return out.pairs if isinstance(out, Outer) else ((out, ()),)


def _totals(outs: dict[int, Wide | Outer]) -> list[Total]:
    """What is added up over rows and steps, part by part."""
    found = dict[Any, list[Any]]()
    for i, out in outs.items():
        for left, right in _pairs_of(out):
            # More rows are one product, and more columns are several.
            is_turned = ends(left)[-1] < ends(right)[-1]
            left, right = (right, left) if is_turned else (left, right)
            of_left, of_right = _placed(left), _placed(right) or [(0, 1, None)]
            for (a, m, p), (b, n, q) in itertools.product(of_left, of_right):
                for start in range(0, m, ROWS):
                    rows = a + start, min(m - start, ROWS)
                    place = i, is_turned, rows, (b, n)
                    found.setdefault(place, []).append((p, start, q))
    return [Total(*of) for of in found.items()]


def _placed(wide: Wide) -> list[tuple[int, int, Panel]]:
    """Its panels, each with its first unit and how many it has, to be multiplied."""
    # A number of each row is repeated.
    made = (spread((p.narrow,), _LEAST)[0] if p.width == 1 else p.narrow for p in wide)
    return [(a, p.width, q) for a, p, q in zip(ends(wide), wide, made, strict=False)]


def _panels(
    of: RowPrograms, program: Any, vals: Sequence[Val], *carried: range
) -> Panels:
    """A program by panels, if kernels may have it."""
    made = written(program)
    if (why := why_not([made])) is not None:
        raise NotPanelsError(why)
    numbers = made.jaxpr.invars[len(vals) :][: len(of.found.roots)]
    used = [v for eqn in made.jaxpr.eqns for v in eqn.invars]
    if any(leaf.rows for leaf in of.lifted) or any(
        v is number for v in used for number in numbers
    ):
        raise NotPanelsError("it has a table of the rows, or their numbers")
    own = [i for i, val in enumerate(vals) if _has_rows(of, val)]
    return Panels(made, own, [i for each in carried for i in each])


def _times(of: RowPrograms, vals: Sequence[Val], axes: Any, *carried: int) -> Any:
    """The axis of steps of each input of rows that is not carried."""
    own = (i for i, val in enumerate(vals) if _has_rows(of, val))
    return {i: axes[i] for i in own if i not in carried}


def _has_rows(of: RowPrograms, val: Val) -> bool:
    return any(row is not None for row in of.rows(val))


def _stacked(arrays: Sequence[Value], vals: Sequence[Val]) -> list[Value]:
    """Arrays of some steps in the shapes of the loop."""
    pairs = zip(arrays, vals, strict=True)
    return [x.reshape(x.shape[0], *val.shape) for x, val in pairs]


def _long_axes(of: RowPrograms, vals: Iterable[Val]) -> int:
    """How many axes of one of some arrays have so many entries, but those of rows."""
    pairs = (zip(val.shape, of.rows(val), strict=True) for val in vals)
    counts = (sum(n >= _LEAST and row is None for n, row in of) for of in pairs)
    return max(counts, default=0)


def _check(
    of: RowPrograms,
    loop: Loop,
    programs: Sequence[AxisProgram],
    carry: Sequence[Val],
    consts: Sequence[Val],
    vals: Sequence[Val],
) -> None:
    """Refuses small steps, and loops and arrays that these kernels do not know."""
    dots = (op for one in programs for op in one.ops if op.name == "dot_general")
    matrices = (val for op in dots for val in op.ins)
    if not _long_axes(of, carry) and _long_axes(of, matrices) < 2:
        raise NotPanelsError("")  # nobody would expect it
    if loop.stops or loop.meter.is_shown or loop.kept is not None or not loop.length:
        raise NotPanelsError("it stops early, has no steps, or leaves out outputs")
    if of.settings.block is not None or of.found.count < ROWS:
        raise NotPanelsError(f"it has fewer than {ROWS} rows, or a `block`")
    count = len(of.found.sizes)
    for val in (*vals, *(val for val in consts if _has_rows(of, val))):
        rows = of.rows(val)
        if rows[:count] != [*range(count)] or any(r is not None for r in rows[count:]):
            raise NotPanelsError("an array has not all rows as its first axes")
        if str(val.aval.dtype) not in _DTYPES:
            raise NotPanelsError(f"it has numbers of {val.aval.dtype}")


def _check_room(loop: PanelLoop) -> None:
    """Refuses a kernel without the shared memory, or the registers: it is compiled."""
    _ = loop.room
    if loop.of.settings.interpret:
        return
    nests, again = usual_nests(loop.loop.length), loop.again
    stored = again.carried if again else range(0)
    slots, types = sum(nest.levels[0] for nest in nests), []
    for i, val in enumerate(loop.vals):
        shape = [slots] * (i in stored) + list(val.shape)
        if (axis := loop.times.get(i)) is not None:
            shape.insert(axis, loop.loop.length)
        types.append(jax.ShapeDtypeStruct(shape, val.aval.dtype))

    def run(*inputs: Value) -> list[Value]:
        held = (False,) * len(loop.step.nexts)
        carries = [inputs[i] for i in stored]
        carry, outs, _, totals = loop(inputs, nests, held, 0, carries)
        return [*carry, *outs.values(), *totals.values()]

    found = told_of(lambda compiled: registers_of(compiled, NAME), run, *types)
    most = min(255, 2**16 // (128 * loop.groups))
    if found and found.stack > _MOST_SPILLED and found.number >= most - 7:
        raise NotPanelsError(
            f"{found.stack} B of a thread do not fit into registers, of which bfloat16 "
            f"and fewer units take fewer"
        )
