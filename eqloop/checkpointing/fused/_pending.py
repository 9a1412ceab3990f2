"""Finds the rows of a program, and which of its values are sums over them.

See `_axes.py`. Which axes are of one class does not depend on which classes are rows;
which sums are pending does, so the two are found one after the other.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..._arrays import is_inexact, split
from ..._compat import scan_counts
from ._axis_rules import dot_axes
from ._classes import NO_ROWS, AxisProgram, Classes, FoundRows, Op, Rows, Val

# Operations that are linear in all operands together.
ADDITIVE = frozenset(
    """add sub add_any neg concatenate broadcast_in_dim reshape transpose squeeze slice
    rev copy real imag complex conj cumsum""".split()  # noqa: SIM905
)
# Operations that are linear in these of their operands, if the others are no sums.
_LINEAR_IN: dict[str, tuple[int, ...]] = {
    "mul": (0, 1),
    "div": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "gather": (0,),
    "scatter-add": (0, 2),
    "scatter_add": (0, 2),
    "pad": (0,),
}


class _Spoiled(Exception):
    """A sum over rows is used for more than to be added up."""


def find_rows(
    classes: Classes,
    programs: Sequence[AxisProgram],
    seeds: Iterable[Val],
    settle: Callable[[], None],
) -> FoundRows:
    """The rows of some programs, among the axes of the `seeds`.

    `settle` marks what is pending in the programs if the rows are `classes.rows`.
    """
    size_of, others = _sizes(classes, seeds), _sizes(classes, _around(programs))
    for program in programs:
        for val in program.vals():
            of = [r for r, n in zip(classes.of(val), val.shape, strict=True) if n > 1]
            for root in {r for r in of if of.count(r) > 1}:
                classes.spoil(root, lambda: "every pair of them is looked at")
    _settled(classes, {**others, **size_of}, settle)
    _join(classes, programs, size_of, others)
    size_of = {classes.find(root): size for root, size in size_of.items()}
    left = _settled(classes, size_of, settle)
    reason = next(filter(None, map(classes.why_not, size_of)), None)
    return FoundRows(tuple(left), tuple(size_of[root] for root in left), reason)


def _around(programs: Sequence[AxisProgram]) -> Iterable[Val]:
    return (val for program in programs for val in (*program.ins, *program.outs))


def _sizes(classes: Classes, vals: Iterable[Val]) -> dict[int, int]:
    """The size of each class of the axes of arrays, those of most axes first."""
    found = dict[int, int]()
    for val in sorted(vals, key=lambda val: -len(val.shape)):
        for root, size in zip(classes.of(val), val.shape, strict=True):
            if size > 1:
                found.setdefault(root, size)
    return found


def _settled(
    classes: Classes, roots: Iterable[int], settle: Callable[[], None]
) -> list[int]:
    """Those of some classes that are rows."""
    while True:
        left = [root for root in roots if not classes.is_spoiled(root)]
        classes.rows = frozenset(left)
        # A sum that does not stay pending has spoiled its class.
        with contextlib.suppress(_Spoiled):
            settle()
            return left


def _join(
    classes: Classes,
    programs: Sequence[AxisProgram],
    rows: Iterable[int],
    others: dict[int, int],
) -> None:
    """Makes rows of what has nothing to do with them, as `y` that is of `x` alone."""
    # It is a map along axes of as many entries, and no array has both: so it makes no
    # difference which of them are together.
    arrays = lambda: [{*classes.of(val)} for one in programs for val in one.vals()]
    found = arrays()
    for other, size in others.items():
        for row in (row for row in rows if others.get(row) == size):
            # Each may have become one with another meanwhile.
            pair = one, new = classes.find(row), classes.find(other)
            is_near = any(of.issuperset(pair) for of in found)
            if not (is_near or any(map(classes.is_spoiled, pair))):
                classes.join(one, new)
                found = arrays()
                break


def mark(classes: Classes, program: AxisProgram, ins: Sequence[Rows]) -> list[Rows]:
    """Marks what is pending in a program, given what of its inputs is."""
    for val, pending in zip(program.ins, ins, strict=True):
        val.pending = pending
    for op in program.ops:
        for val, pending in zip(op.outs, _of(classes, op), strict=True):
            val.pending = pending
            _check(classes, op, pending & rows_of(classes, val))
    return [val.pending for val in program.outs]


def refuse_pending(classes: Classes, rows: Rows, why: Callable[[], str]) -> None:
    """Spoils classes over which there is a sum where none may be."""
    for root in rows:
        classes.spoil(root, why)
    if rows:
        raise _Spoiled


def rows_of(classes: Classes, val: Val) -> Rows:
    """The rows among the axes of an array."""
    return classes.rows.intersection(classes.of(val))


def _check(classes: Classes, op: Op, spoiled: Rows) -> None:
    why = lambda: f"{op.said()} reads a sum over all of them"
    refuse_pending(classes, spoiled, why)


def _of(classes: Classes, op: Op) -> list[Rows]:
    ins, name = op.ins, op.name
    every = NO_ROWS.union(*(val.pending for val in ins))
    if name == "reduce_sum":
        of = classes.of(ins[0])
        over = classes.rows.intersection(of[i] for i in op.params["axes"])
        _check(classes, op, over & every)
        return [every | over]
    if name == "dot_general":
        (_, _, lc), _ = dot_axes(op)
        of = classes.of(ins[0])
        over = classes.rows.intersection(of[i] for i in lc)
        left, right = (val.pending for val in ins)
        seen = rows_of(classes, ins[0]) | rows_of(classes, ins[1])
        _check(classes, op, (left & right) | (every & seen))
        return [every | over]
    if name == "scan":
        return _of_scan(classes, op)
    if name == "while":
        return _of_while(classes, op)
    if name == "cond":
        _check(classes, op, ins[0].pending)
        given = [val.pending for val in ins[1:]]
        outs = [mark(classes, branch, given) for branch in op.inner]
        return [NO_ROWS.union(*each) for each in zip(*outs, strict=True)]
    if not every:
        return [NO_ROWS] * len(op.outs)
    if name in ("optimization_barrier", "device_put"):
        return [val.pending for val in ins]
    is_cast = name == "convert_element_type" and is_inexact(op.outs[0].aval)
    seen = NO_ROWS.union(*(rows_of(classes, v) - v.pending for v in ins))
    linear_in = _LINEAR_IN.get(name, range(1, len(ins)) if name == "select_n" else ())
    if name in ADDITIVE or is_cast:
        linear_in = range(len(ins))
    others = [val for i, val in enumerate(ins) if i not in linear_in]
    allowed = [val.pending for i, val in enumerate(ins) if i in linear_in]
    _check(classes, op, NO_ROWS.union(*(val.pending for val in others)))
    if name == "pad" and not _is_zero(ins[1]):
        _check(classes, op, every)
    if name == "mul":
        _check(classes, op, allowed[0] & allowed[1])
    if not linear_in:
        _check(classes, op, every)
    _check(classes, op, seen & every)
    return [every] * len(op.outs)


def _is_zero(val: Val) -> bool:
    return val.literal is not None and not np.any(val.literal)


def settled_rows(
    given: list[Rows], more: Callable[[list[Rows]], Sequence[Rows]]
) -> list[Rows]:
    """What is pending of a carry, after any number of steps."""
    while True:
        grown = [a | b for a, b in zip(given, more(given), strict=True)]
        if grown == given:
            return given
        given = grown


def _of_scan(classes: Classes, op: Op) -> list[Rows]:
    n, m = scan_counts(op.params)
    consts, carry, xs = split([val.pending for val in op.ins], n, m)
    outs = lambda carry: mark(classes, op.inner[0], [*consts, *carry, *xs])
    carry = settled_rows(carry, lambda carry: outs(carry)[:m])
    return [*carry, *outs(carry)[m:]]


def _of_while(classes: Classes, op: Op) -> list[Rows]:
    counts = op.params["cond_nconsts"], op.params["body_nconsts"]
    (cond, body), pending = op.inner, [val.pending for val in op.ins]
    of_cond, of_body, carry = split(pending, *counts)

    def more(carry: list[Rows]) -> list[Rows]:
        (stops,) = mark(classes, cond, [*of_cond, *carry])
        _check(classes, op, stops)
        return mark(classes, body, [*of_body, *carry])

    return settled_rows(carry, more)
