"""Along which axes a single operation is a map, or a sum.

The same rules as for kernels (`_axes.py`), of one operation by itself: an array that is
read along two axes is in two classes.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex

from ..._arrays import explicit_sharding
from ..._compat import form_of, form_params
from ..._programs import alone, aval_of, formula_of
from ._axes import open_call, put_into_classes
from ._axis_rules import dot_axes
from ._classes import Classes, NotInKernelError, Op, Val

# Sums over axes that no result has: what these contract.
_SUMS = ("reduce_sum", "dot_general")
# Programs of their own. A condition may depend on the row.
_WITH_CONDITIONS = ("while", "cond")


@dataclasses.dataclass(frozen=True)
class AxisMap:
    """An axis of some operands along which an operation is a map, or a sum.

    Attributes:
        ins: For each operand, which of its axes it is. `None`: all of it is read.
        outs: The same for each result. `None`: it is a sum. Of a loop, it is the same
            for all rows, such as a counter.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]


def axis_maps(eqn: jex.JaxprEqn) -> list[AxisMap]:
    """The axes along which an operation is a map, or a sum; none if it is unknown."""
    values = map(aval_of, (*eqn.invars, *eqn.outvars))
    if any(explicit_sharding(aval) is not None for aval in values):
        return []  # devices have rows already
    classes = Classes(is_kernel=False)
    ins = [classes.array(aval_of(x)) for x in eqn.invars]
    try:
        outs = _with_outputs(classes, eqn, ins)
    except NotInKernelError:
        return []
    return list(_maps_in(classes, eqn, ins, outs))


def _with_outputs(classes: Classes, eqn: jex.JaxprEqn, ins: list[Val]) -> list[Val]:
    if form_of(eqn) in _WITH_CONDITIONS or eqn.effects:
        raise NotInKernelError
    if (program := _program_of(eqn)) is not None:
        outs, ops = open_call(classes, program, ins)
        for op in _every(ops):
            for root in _summed(classes, op):
                classes.spoil(root, lambda: "it is a sum")
        return outs
    op = Op(eqn, ins, [classes.array(aval_of(x)) for x in eqn.outvars])
    rule = _OTHERS.get(form_of(eqn), put_into_classes)
    rule(classes, op)
    return op.outs


def _program_of(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The program of a loop, or of a function with a derivative rule."""
    if form_of(eqn) == "custom_jvp_call":
        return form_params(eqn)["call_jaxpr"]
    if (formula := formula_of(eqn)) is not None:
        return formula.expanded
    return alone(eqn) if is_loop(eqn) else None


def is_loop(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a loop of JAX, or one of this library's that are asked about."""
    return form_of(eqn) == "scan" or formula_of(eqn) is not None


def _every(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        for program in op.inner:
            yield from _every(program.ops)


def _name(classes: Classes, op: Op) -> None:
    classes.tie(op.ins[0], op.outs[0])


def _conv(classes: Classes, op: Op) -> None:
    """A convolution: its examples are rows."""
    numbers, (left, right), (out,) = op.params["dimension_numbers"], op.ins, op.outs
    a, b = numbers.lhs_spec[0], numbers.out_spec[0]
    if op.params["batch_group_count"] == 1:
        classes.same(left, a, out, b)
    others = (left, a), (out, b), (right, None)
    for val, kept in others:
        for i in range(len(val.shape)):
            if i != kept:
                classes.spoil(val.dims[i], lambda: "it is a convolution")


# Those that no kernel has.
_OTHERS = {"name": _name, "conv_general_dilated": _conv}


def _summed(classes: Classes, op: Op) -> list[int]:
    """The classes over which an operation is a sum."""
    if op.name not in _SUMS:
        return []
    (_, _, contracted), _ = (
        dot_axes(op) if op.name == "dot_general" else ((0, 0, op.params["axes"]), 0)
    )
    return [classes.of(op.ins[0])[i] for i in contracted]


def _maps_in(
    classes: Classes, eqn: jex.JaxprEqn, ins: list[Val], outs: list[Val]
) -> Iterator[AxisMap]:
    found = dict[int, tuple[list[list[int]], list[list[int]]]]()
    for side, vals in enumerate((ins, outs)):
        for n, val in enumerate(vals):
            for axis, root in enumerate(classes.of(val)):
                if val.shape[axis] > 1 and not classes.is_spoiled(root):
                    new: Any = [[] for _ in ins], [[] for _ in outs]
                    found.setdefault(root, new)[side][n].append(axis)
    for of_ins, of_outs in found.values():
        if any(len(axes) > 1 for axes in (*of_ins, *of_outs)):
            continue  # every pair of them is looked at
        of = lambda each: tuple(axes[0] if axes else None for axes in each)
        is_sum = not any(of_outs) and form_of(eqn) in _SUMS
        if all(of_outs) or is_sum or (is_loop(eqn) and any(of_outs)):
            yield AxisMap(of(of_ins), of(of_outs))
