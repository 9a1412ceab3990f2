"""The program of one row, from a program of all rows.

Each operation is the same on arrays that have one entry along the axes that are rows,
but for the sizes in its parameters. So this undoes `vmap`, and does as much for a step
that a user has written for all rows at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from ..._arrays import zero_array
from ..._compat import scan_counts
from ..._programs import NOTHING, resized
from ..._types import Aval, Value
from ._classes import EMPTY, AxisProgram, Classes, FoundRows, Op, Rows, Val
from ._pending import ADDITIVE


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

    def type_of(self, val: Val) -> Aval:
        """The type of an array of one row."""
        pairs = zip(val.shape, self.classes.of(val), strict=True)
        shape = tuple(1 if root in self.found.roots else n for n, root in pairs)
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

        `want` says over which rows each of the outputs is to be pending.
        """
        env = dict(self._lifted)
        env.update((id(v), x) for v, x in zip(program.ins, ins, strict=True))

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
            outs = (rule or _same)(self, op, *given)
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


def _same(row: OneRow, op: Op, *given: Value) -> Any:
    params = resized(op.eqn, given, row.type_of(op.outs[0]).shape).params
    if "sharding" in params:
        params = {**params, "sharding": None}
    return op.eqn.primitive.bind(*given, **params)


def _iota(row: OneRow, op: Op) -> Value:
    (out,), axis, dtype = op.outs, op.params["dimension"], op.params["dtype"]
    root, shape = row.classes.of(out)[axis], row.type_of(out).shape
    if root not in row.found.roots:
        return lax.broadcasted_iota(dtype, shape, axis)
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

    def going(carry: list[Value]) -> Value:
        return row.run(cond, [*of_cond, *carry])[0]

    def move(carry: list[Value]) -> list[Value]:
        new = row.run(body, [*of_body, *carry], want)
        if (flags := going(carry)).size == 1:
            return new
        # What is no axis of rows, such as a population, stops entry by entry.
        of = lambda x: flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim))
        return [jnp.where(of(a), a, b) for a, b in zip(new, carry, strict=True)]

    return lax.while_loop(lambda carry: jnp.any(going(carry)), move, carry)


def _cond(row: OneRow, op: Op, index: Value, *given: Value) -> list[Value]:
    want = [val.pending for val in op.outs]
    branches = [lambda *a, b=b: row.run(b, a, want) for b in op.inner]
    return lax.switch(index.astype(jnp.int32), branches, *given)


def _scan(row: OneRow, op: Op, *given: Value) -> list[Value]:
    n, m = scan_counts(op.params)
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
    **dict.fromkeys(NOTHING, lambda row, op, *given: list(given)),
    **dict.fromkeys(EMPTY, lambda row, op: zero_array(row.type_of(op.outs[0]))),
    "iota": _iota,
    "while": _while,
    "cond": _cond,
    "scan": _scan,
}
