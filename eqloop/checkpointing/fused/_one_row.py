"""The program of one row, from a program of all rows.

Each operation is the same on arrays without the axes that are rows. So this undoes
`vmap`, and does as much for a step that a user has written for all rows at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from ..._arrays import zero_array
from ..._types import Aval, Value
from ._axis_rules import dot_axes
from ._classes import (
    CUMULATIVE,
    EMPTY,
    OF_KEYS,
    REDUCTIONS,
    SCATTERS,
    AxisProgram,
    Classes,
    FoundRows,
    Op,
    Rows,
    Val,
    refuse,
    scan_counts,
)
from ._pending import ADDITIVE
from ._windows import Windows


class OneRow:
    """Evaluates programs on the arrays of one row.

    Attributes:
        classes: The classes of axes.
        found: Which of them are rows.
        numbers: For each of these, the number of the row.
    """

    def __init__(self, classes: Classes, found: FoundRows, numbers: Sequence[Value]):
        self.classes, self.found, self.numbers = classes, found, numbers
        self._lifted = dict[int, Value]()

    def with_lifted(self, values: dict[int, Value]) -> None:
        """Sets the constant arrays of the programs, by their `id`."""
        self._lifted = values

    def is_row(self, val: Val) -> list[bool]:
        """For each axis of an array, whether it is gone."""
        return [root in self.found.roots for root in self.classes.of(val)]

    def kept(self, val: Val) -> list[int]:
        """The axes of an array that are no rows."""
        return [i for i, row in enumerate(self.is_row(val)) if not row]

    def type_of(self, val: Val) -> Aval:
        """The type of an array of one row."""
        shape = tuple(val.shape[i] for i in self.kept(val))
        return jax.core.ShapedArray(shape, val.aval.dtype)

    def pend(self, x: Value, have: Rows, want: Rows) -> Value:
        """A value that is the same in all rows, as a sum over rows."""
        for root in want - have:
            first = self.numbers[self.found.roots.index(root)] == 0
            x = jnp.where(first, x, jnp.zeros_like(x))
        return x

    def run(
        self,
        program: AxisProgram,
        ins: Sequence[Value],
        want: Sequence[Rows] | None = None,
    ) -> list[Value]:
        """The outputs of a program for one row.

        Args:
            program: The program.
            ins: Its inputs.
            want: Over which rows the outputs are to be pending.
        """
        env = dict(self._lifted)
        env.update((id(v), x) for v, x in zip(program.ins, ins, strict=True))
        self._env = env

        def read(val: Val) -> Value:
            return val.literal if val.literal is not None else env[id(val)]

        for op in program.ops:
            given = list(map(read, op.ins))
            if op.name in ADDITIVE or op.name in _ALSO_PENDED:
                every = op.outs[0].pending
                which = _ALSO_PENDED.get(op.name, slice(None))
                for i in range(len(given))[which]:
                    given[i] = self.pend(given[i], op.ins[i].pending, every)
            rule = _RULES.get(op.name)
            outs = (rule or _elementwise)(self, op, *given)
            if not isinstance(outs, list | tuple):
                outs = [outs]
            env.update((id(v), x) for v, x in zip(op.outs, outs, strict=True))
        outs = list(map(read, program.outs))
        if want is None:
            return outs
        pairs = zip(outs, program.outs, want, strict=True)
        return [self.pend(x, val.pending, to) for x, val, to in pairs]


# Operands that become sums over rows if the result is one.
_ALSO_PENDED = {
    "select_n": slice(1, None),
    "dynamic_update_slice": slice(2),
    "scatter-add": slice(0, 3, 2),
    "scatter_add": slice(0, 3, 2),
}


# Operations that do nothing to a number.
_NOTHING = (
    "optimization_barrier",
    "device_put",
    "nonbatchable",
    "sharding_constraint",
    "pvary",
    "pcast",
)


def _bind(op: Op, *args: Value, **changed: Any) -> Any:
    params = {**op.params, **changed}
    if "sharding" in params:
        params["sharding"] = None
    return op.eqn.primitive.bind(*args, **params)


def _renumbered(row: OneRow, val: Val, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes that are no rows, by their place among those."""
    kept = row.kept(val)
    return tuple(kept.index(i) for i in axes if i in kept)


def _elementwise(row: OneRow, op: Op, *given: Value) -> Any:
    if op.name in _NOTHING:
        return list(given)
    (out,) = op.outs
    rows, args = row.is_row(out), list(given)
    for n, (val, x) in enumerate(zip(op.ins, args, strict=True)):
        if len(val.shape) != len(rows):
            continue
        # Its only entry along an axis of rows is for all of them.
        own, kept = row.is_row(val), row.kept(val)
        gone = [kept.index(i) for i in kept if rows[i] and not own[i]]
        args[n] = lax.squeeze(x, gone) if gone else x
    return _bind(op, *args)


def _broadcast(row: OneRow, op: Op, x: Value, *_: Value) -> Value:
    a, out = op.ins[0], op.outs[0]
    to, own = op.params["broadcast_dimensions"], row.kept(a)
    rows, kept = row.is_row(out), row.kept(out)
    gone = [own.index(i) for i in own if rows[to[i]]]
    x = lax.squeeze(x, gone) if gone else x
    to = tuple(kept.index(to[i]) for i in own if not rows[to[i]])
    return lax.broadcast_in_dim(x, tuple(out.shape[i] for i in kept), to)


def _reshape(row: OneRow, op: Op, x: Value, *_: Value) -> Value:
    return lax.reshape(x, row.type_of(op.outs[0]).shape)


def _transpose(row: OneRow, op: Op, x: Value) -> Value:
    kept = row.kept(op.ins[0])
    order = [i for i in op.params["permutation"] if i in kept]
    return lax.transpose(x, [kept.index(i) for i in order])


def _axis(name: str) -> Callable[..., Any]:
    def rule(row: OneRow, op: Op, *given: Value) -> Any:
        (axis,) = _renumbered(row, op.ins[0], [op.params[name]])
        return _bind(op, *given, **{name: axis})

    return rule


def _axes(row: OneRow, op: Op, *given: Value) -> Any:
    axes = _renumbered(row, op.ins[0], op.params["axes"])
    return _bind(op, *given, axes=axes) if axes else list(given)


def _slice(row: OneRow, op: Op, x: Value) -> Value:
    kept, p = row.kept(op.ins[0]), op.params
    of = lambda values: values and tuple(values[i] for i in kept)
    return lax.slice(
        x, of(p["start_indices"]), of(p["limit_indices"]), of(p["strides"])
    )


def _rev(row: OneRow, op: Op, x: Value) -> Value:
    return lax.rev(x, _renumbered(row, op.ins[0], op.params["dimensions"]))


def _pad(row: OneRow, op: Op, x: Value, value: Value) -> Value:
    config = [op.params["padding_config"][i] for i in row.kept(op.ins[0])]
    return lax.pad(
        x, jnp.asarray(value, x.dtype), [(int(a), int(b), int(c)) for a, b, c in config]
    )


def _dynamic_slice(row: OneRow, op: Op, x: Value, *at: Value) -> Value:
    kept = row.kept(op.ins[0])
    sizes = tuple(op.params["slice_sizes"][i] for i in kept)
    return op.eqn.primitive.bind(x, *(at[i] for i in kept), slice_sizes=sizes)


def _update_slice(row: OneRow, op: Op, x: Value, update: Value, *at: Value) -> Value:
    return op.eqn.primitive.bind(x, update, *(at[i] for i in row.kept(op.ins[0])))


def _stack(row: OneRow, op: Op, *given: Value) -> Value:
    (axis,) = _renumbered(row, op.outs[0], [op.params["axis"]])
    return jnp.stack(given, axis)


def _unstack(row: OneRow, op: Op, x: Value) -> list[Value]:
    (axis,) = _renumbered(row, op.ins[0], [op.params["axis"]])
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(len(op.outs))]


def _dot(row: OneRow, op: Op, left: Value, right: Value) -> Value:
    (lb, _, lc), (rb, _, rc) = dot_axes(op)
    of_l, of_r = (lambda a, v=v: _renumbered(row, v, a) for v in op.ins)
    numbers = (of_l(lc), of_r(rc)), (of_l(lb), of_r(rb))
    how = {k: op.params[k] for k in ("precision", "preferred_element_type")}
    return lax.dot_general(left, right, numbers, **how)


def _windows(row: OneRow, op: Op, parts: Val) -> Windows:
    """The axes of a gather or scatter that are left in one row."""
    windows, (a, at) = Windows.of(op.params), op.ins[:2]
    kept = row.kept(a)
    return Windows(
        dropped=_renumbered(row, a, windows.dropped),
        operand_batch=_renumbered(row, a, windows.operand_batch),
        index_batch=_renumbered(row, at, [k for i, k in windows.batch if i in kept]),
        own=_renumbered(row, parts, windows.own),
        starts=_renumbered(row, a, windows.starts),
    )


def _gather(row: OneRow, op: Op, x: Value, at: Value) -> Value:
    numbers = _windows(row, op, op.outs[0]).numbers
    sizes = tuple(op.params["slice_sizes"][i] for i in row.kept(op.ins[0]))
    return _bind(op, x, at, dimension_numbers=numbers, slice_sizes=sizes)


def _scatter(row: OneRow, op: Op, x: Value, at: Value, update: Value) -> Value:
    numbers = _windows(row, op, op.ins[2]).scatter_numbers
    return _bind(op, x, at, update, dimension_numbers=numbers)


def _iota(row: OneRow, op: Op) -> Value:
    (out,), axis, dtype = op.outs, op.params["dimension"], op.params["dtype"]
    kept, shape = row.kept(out), row.type_of(out).shape
    if axis in kept:
        return lax.broadcasted_iota(dtype, shape, kept.index(axis))
    root = row.classes.of(out)[axis]
    number = row.numbers[row.found.roots.index(root)]
    return lax.broadcast(number.astype(dtype), shape)


def _pended(
    row: OneRow, op: Op, carry: Sequence[Value], vals: Sequence[Val]
) -> tuple[list[Value], list[Rows]]:
    """The carry of a loop as sums over rows, and over which its results are such."""
    want = [val.pending for val in op.outs]
    triples = zip(carry, vals, want, strict=False)
    return [row.pend(x, val.pending, to) for x, val, to in triples], want


def _while(row: OneRow, op: Op, *given: Value) -> list[Value]:
    n, m = op.params["cond_nconsts"], op.params["body_nconsts"]
    cond, body = op.inner
    of_cond, of_body, carry = given[:n], given[n : n + m], given[n + m :]
    carry, want = _pended(row, op, carry, op.ins[n + m :])
    if row.type_of(cond.outs[0]).shape:
        refuse(op.eqn, "Write it for one row.", "goes on for several rows at once")

    def going(carry: list[Value]) -> Value:
        return row.run(cond, [*of_cond, *carry])[0]

    return lax.while_loop(
        going, lambda carry: row.run(body, [*of_body, *carry], want), carry
    )


def _cond(row: OneRow, op: Op, index: Value, *given: Value) -> list[Value]:
    want = [val.pending for val in op.outs]
    branches = [lambda *a, b=b: row.run(b, a, want) for b in op.inner]
    return lax.switch(index.astype(jnp.int32), branches, *given)


def _scan(row: OneRow, op: Op, *given: Value) -> list[Value]:
    n, m = scan_counts(op)
    (body,), consts, xs = op.inner, given[:n], list(given[n + m :])
    carry, want = _pended(row, op, given[n : n + m], op.ins[n : n + m])

    def move(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        outs = row.run(body, [*consts, *carry, *x], want)
        return outs[:m], outs[m:]

    p = op.params
    carry, ys = lax.scan(
        move, carry, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
    )
    return [*carry, *ys]


_RULES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    **dict.fromkeys(("concatenate", "sort"), _axis("dimension")),
    **dict.fromkeys(("split", *CUMULATIVE), _axis("axis")),
    "slice": _slice,
    "rev": _rev,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _update_slice,
    "stack": _stack,
    "unstack": _unstack,
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), _axes),
    "dot_general": _dot,
    "gather": _gather,
    **dict.fromkeys(SCATTERS, _scatter),
    **dict.fromkeys(("top_k", *OF_KEYS), lambda row, op, *given: _bind(op, *given)),
    "iota": _iota,
    **dict.fromkeys(EMPTY, lambda row, op: zero_array(row.type_of(op.outs[0]))),
    "while": _while,
    "cond": _cond,
    "scan": _scan,
}
