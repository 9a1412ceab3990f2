"""Which axes of the operands and results of an operation are of one class."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ._classes import CUMULATIVE, EMPTY, OF_KEYS, REDUCTIONS, SCATTERS, Classes, Op, Val
from ._windows import Windows

Rule = Callable[[Classes, Op], None]


def elementwise_axes(classes: Classes, op: Op) -> None:
    # Each of several results has the shape of its own operand, or of all.
    many = op.name in ("optimization_barrier", "device_put")
    for n, out in enumerate(op.outs):
        for a in [op.ins[n]] if many else op.ins:
            if len(a.shape) == len(out.shape):
                classes.tie(a, out)
            elif a.shape:
                # Of other bits per entry: the last axis is another one.
                first_axes(classes, dataclasses.replace(op, ins=[a], outs=[out]))


def mixed(classes: Classes, op: Op, val: Val, axes: Sequence[int]) -> None:
    for i in axes:
        classes.spoil(val.dims[i], lambda: f"{op.said()} mixes them")


def _others(classes: Classes, op: Op, a: Val, b: Val, along: Sequence[int]) -> None:
    """Two arrays of as many axes: all but these are of one class."""
    for i in range(len(a.shape)):
        if i not in along:
            classes.same(a, i, b, i)
    mixed(classes, op, a, along)
    mixed(classes, op, b, along)


def broadcast_axes(classes: Classes, op: Op) -> None:
    for i, j in enumerate(op.params["broadcast_dimensions"]):
        classes.same(op.ins[0], i, op.outs[0], j)


def kept_by_reshape(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """The axes that a reshape leaves as they are, in pairs."""
    pairs, i, j = list[tuple[int, int]](), 0, 0
    while i < len(old) and j < len(new):
        if old[i] == new[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif old[i] == 1:
            i += 1
        elif new[j] == 1:
            j += 1
        else:
            # The shortest runs of axes with as many entries.
            a, b, i, j = old[i], new[j], i + 1, j + 1
            # Of empty arrays there may be none.
            while a != b and i < len(old) and j < len(new):
                if a < b:
                    a, i = a * old[i], i + 1
                else:
                    b, j = b * new[j], j + 1
    return pairs


def reshape_axes(classes: Classes, op: Op) -> None:
    (a, *_), (out,) = op.ins, op.outs
    is_in_order = op.params["dimensions"] is None
    pairs = kept_by_reshape(a.shape, out.shape) if is_in_order else []
    for i, j in pairs:
        classes.same(a, i, out, j)
    big = lambda val, kept: [
        i for i, n in enumerate(val.shape) if n > 1 and i not in kept
    ]
    mixed(classes, op, a, big(a, [i for i, _ in pairs]))
    mixed(classes, op, out, big(out, [j for _, j in pairs]))


def squeeze_axes(classes: Classes, op: Op) -> None:
    (a,), (out,), gone = op.ins, op.outs, op.params["dimensions"]
    for j, i in enumerate(i for i in range(len(a.shape)) if i not in gone):
        classes.same(a, i, out, j)


def transpose_axes(classes: Classes, op: Op) -> None:
    for j, i in enumerate(op.params["permutation"]):
        classes.same(op.ins[0], i, op.outs[0], j)


def mixed_along(name: str) -> Rule:
    """Operations that mix along one axis, which this parameter names."""

    def rule(classes: Classes, op: Op) -> None:
        axis = op.params.get(name, len(op.ins[0].shape) - 1)
        for a in op.ins:
            for out in op.outs:
                if len(a.shape) == len(out.shape):
                    _others(classes, op, a, out, [axis])

    return rule


def changed_axes(classes: Classes, op: Op) -> None:
    """Slices and the like: an axis whose size they keep is kept."""
    a, out = op.ins[0], op.outs[0]
    cut = [i for i in range(len(a.shape)) if a.shape[i] != out.shape[i]]
    if op.name == "slice" and op.params["strides"] is not None:
        cut += [i for i, s in enumerate(op.params["strides"]) if s != 1]
    if op.name == "rev":
        cut = list(op.params["dimensions"])
    if op.name == "pad":
        cut = [i for i, c in enumerate(op.params["padding_config"]) if any(c)]
    _others(classes, op, a, out, sorted(set(cut)))


def update_slice_axes(classes: Classes, op: Op) -> None:
    (a, update), (out,) = op.ins[:2], op.outs
    cut = [i for i in range(len(a.shape)) if a.shape[i] != update.shape[i]]
    _others(classes, op, a, out, cut)
    _others(classes, op, update, out, cut)


def reduce_axes(classes: Classes, op: Op) -> None:
    axes, (out,) = op.params["axes"], op.outs
    for a in op.ins:
        left = [i for i in range(len(a.shape)) if i not in axes]
        for j, i in enumerate(left):
            classes.same(a, i, out, j)
        # A sum over rows is allowed if it stays pending.
        if op.name != "reduce_sum":
            mixed(classes, op, a, axes)


def dot_axes(op: Op) -> tuple[Any, ...]:
    """The batch axes, the axes that are left and the contracted ones of a product.

    They are in a tuple for the left operand, and in one for the right.
    """
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    free = lambda val, *gone: [
        i for i in range(len(val.shape)) if not any(i in g for g in gone)
    ]
    left, right = op.ins
    return (lb, free(left, lb, lc), lc), (rb, free(right, rb, rc), rc)


def product_axes(classes: Classes, op: Op) -> None:
    (left, right), (out,) = op.ins, op.outs
    (lb, lf, lc), (rb, rf, rc) = dot_axes(op)
    for n, (i, j) in enumerate(zip(lb, rb, strict=True)):
        classes.same(left, i, out, n)
        classes.same(right, j, out, n)
    for n, i in enumerate(lf):
        classes.same(left, i, out, len(lb) + n)
    for n, i in enumerate(rf):
        classes.same(right, i, out, len(lb) + len(lf) + n)
    for i, j in zip(lc, rc, strict=True):
        classes.same(left, i, right, j)


def _window_axes(
    op: Op, parts: Val
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The axes of the parts that a gather reads or a scatter writes, in two lists.

    They are pairs of an axis of the operand, or of the indices, and one of the parts.
    """
    # Axes along which the parts do not have all of the operand are missing.
    windows, (a, at) = Windows.of(op.params), op.ins[:2]
    whole = [
        (i, j)
        for i, j in zip(windows.kept(len(a.shape)), windows.own, strict=True)
        if a.shape[i] == parts.shape[j] and i not in windows.starts
    ]
    batch = windows.of_indices(len(parts.shape))
    taken = list(zip(range(len(at.shape) - 1), batch, strict=True))
    whole += [(i, dict(taken)[k]) for i, k in windows.batch]
    return whole, taken


def gather_axes(classes: Classes, op: Op) -> None:
    (a, at), (out,) = op.ins[:2], op.outs
    whole, taken = _window_axes(op, out)
    for i, j in whole:
        classes.same(a, i, out, j)
    for k, j in taken:
        classes.same(at, k, out, j)
    ours = [i for i, _ in whole]
    mixed(classes, op, a, [i for i in range(len(a.shape)) if i not in ours])
    theirs = {j for _, j in (*whole, *taken)}
    mixed(classes, op, out, [j for j in range(len(out.shape)) if j not in theirs])
    mixed(classes, op, at, [len(at.shape) - 1])


def scatter_rows(op: Op) -> list[int]:
    """The axes of what a scatter writes along which it has other places."""
    whole, taken = _window_axes(op, op.ins[2])
    return [j for _, j in taken if j not in [j for _, j in whole]]


def scatter_axes(classes: Classes, op: Op) -> None:
    (a, at, up), (out,) = op.ins, op.outs
    classes.tie(a, out)
    whole, taken = _window_axes(op, up)
    for i, j in whole:
        classes.same(a, i, up, j)
    for k, j in taken:
        classes.same(at, k, up, j)
    ours = [i for i, _ in whole]
    mixed(classes, op, a, [i for i in range(len(a.shape)) if i not in ours])
    batched = [j for _, j in whole]
    # Rows of indices that are no rows of the operand would all write to the same. That
    # is a sum, but none that a kernel has.
    batched += scatter_rows(op) if not classes.is_kernel and "add" in op.name else []
    mixed(classes, op, up, [j for j in range(len(up.shape)) if j not in batched])
    mixed(classes, op, at, [len(at.shape) - 1])


def first_axes(classes: Classes, op: Op) -> None:
    """Keys and their words: the axes that all have are the first ones."""
    (out,) = op.outs
    n = min(len(val.shape) for val in (*op.ins, out))
    for a in op.ins:
        for i in range(n):
            classes.same(a, i, out, i)
    for val in (*op.ins, out):
        mixed(classes, op, val, range(n, len(val.shape)))


def iota_axes(classes: Classes, op: Op) -> None:
    """Every axis of it may be rows: then it is the number of the row."""


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_axes,
    "reshape": reshape_axes,
    "squeeze": squeeze_axes,
    "transpose": transpose_axes,
    **dict.fromkeys(("concatenate", "sort"), mixed_along("dimension")),
    **dict.fromkeys(CUMULATIVE, mixed_along("axis")),
    "top_k": mixed_along("axis"),  # the last one in older versions of JAX
    **dict.fromkeys(("slice", "rev", "pad", "dynamic_slice"), changed_axes),
    "dynamic_update_slice": update_slice_axes,
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), reduce_axes),
    "dot_general": product_axes,
    "gather": gather_axes,
    **dict.fromkeys(SCATTERS, scatter_axes),
    "iota": iota_axes,
    **dict.fromkeys(EMPTY, lambda classes, op: None),
    **dict.fromkeys(OF_KEYS, first_axes),
}
