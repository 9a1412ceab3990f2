"""Along which axes a single operation is a map, or a sum.

The same rules as for kernels (`_axes.py`), of one operation by itself: an array that is
read along two axes is in two classes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex

from ..._arrays import explicit_sharding
from ..._compat import form_of, form_params
from ..._programs import alone, aval_of, formula_of
from ._axes import program_of_vals, put_into_classes
from ._axis_rules import dot_axes, elementwise_axes, mixed_along, scatter_rows
from ._classes import Classes, NotInKernelError, Op, Val

# Sums over axes that no result has: what these contract, or add at some places.
_SCATTERED = ("scatter-add", "scatter_add")
_SUMS = ("reduce_sum", "dot_general", *_SCATTERED)


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
    # The bits of keys of XLA's generator depend on how many keys there are.
    dtypes = {aval_of(x).dtype.name for x in (*eqn.invars, *eqn.outvars)}
    is_of_xla = not dtypes.isdisjoint(("key<rbg>", "key<urbg>"))
    if form_of(eqn) == "while" or eqn.effects or is_of_xla:
        raise NotInKernelError  # a `while` may go on until the last row is done
    if (program := _program_of(eqn)) is not None:
        found = program_of_vals(classes, program, ins)
        for op in _every(found.ops):
            for root in _summed(classes, op):
                classes.spoil(root, lambda: "it is a sum")
        return found.outs
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
    # A primitive of another library has a program that tells the axes.
    has_program = has_steps(eqn) or eqn.primitive.name in ("maybe_set", "vprim")
    return alone(eqn) if has_program else None


def has_steps(eqn: jex.JaxprEqn) -> bool:
    """Whether it is a loop, a branch or a checkpoint."""
    return formula_of(eqn) is not None or form_of(eqn) in ("scan", "cond", "remat2")


def _every(ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        yield op
        for program in op.inner:
            yield from _every(program.ops)


def _maps_along(classes: Classes, op: Op, axes: Sequence[Sequence[int]]) -> None:
    """It is a map along these axes of its operands and results, and along no others."""
    vals = *op.ins, *op.outs
    for val, own in zip(vals, axes, strict=True):
        for i, j in zip(axes[0], own, strict=False):
            classes.same(vals[0], i, val, j)
        for i in set(range(len(val.shape))) - {*own}:
            classes.spoil(val.dims[i], lambda: f"{op.said()} mixes them")


def _conv(classes: Classes, op: Op) -> None:
    """A convolution: its examples are rows."""
    numbers = op.params["dimension_numbers"]
    axes = numbers.lhs_spec[:1], (), numbers.out_spec[:1]
    _maps_along(classes, op, axes if op.params["batch_group_count"] == 1 else [()] * 3)


def _in_windows(classes: Classes, op: Op) -> None:
    """What slides over an array: along an axis where the window is one entry."""
    of = op.params
    names = "window_dimensions", "window_strides", "base_dilation"
    sizes = zip(*(of.get(x) or (1,) * len(of["padding"]) for x in names), strict=True)
    pairs = zip(sizes, of["padding"], strict=True)
    kept = [i for i, (each, pad) in enumerate(pairs) if {*each} == {1} and not any(pad)]
    vals = *op.ins, *op.outs
    _maps_along(classes, op, [kept if val.shape else () for val in vals])


def _in_batches(core: int) -> Callable[[Classes, Op], None]:
    """What does the same to each matrix or so: the last axes of its first operand."""

    def rule(classes: Classes, op: Op) -> None:
        last = len(op.params.get("fft_lengths", ())) or core
        batch = range(len(op.ins[0].shape) - last)
        _maps_along(classes, op, [batch] * (len(op.ins) + len(op.outs)))

    return rule


_SLIDING = """reduce_window reduce_window_max reduce_window_min reduce_window_sum
select_and_gather_add select_and_scatter select_and_scatter_add"""
_OF_ENTRIES = """igamma igamma_grad_a igammac log2 mulhi polygamma random_gamma_grad
regularized_incomplete_beta zeta"""
_OF_MATRICES = """cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg
householder_product lu ormqr qr schur svd triangular_solve tridiagonal"""
# Those that no kernel has.
_OTHERS: dict[str, Callable[[Classes, Op], None]] = {
    "name": elementwise_axes,
    "conv_general_dilated": _conv,
    "approx_top_k": mixed_along("reduction_dimension"),
    "lu_pivots_to_permutation": _in_batches(1),
    "tridiagonal_solve": _in_batches(1),
    **dict.fromkeys(_SLIDING.split(), _in_windows),
    **dict.fromkeys(_OF_ENTRIES.split(), elementwise_axes),
    **dict.fromkeys(_OF_MATRICES.split(), _in_batches(2)),
}


def _summed(classes: Classes, op: Op) -> list[int]:
    """The classes over which an operation is a sum."""
    if op.name not in _SUMS:
        return []
    if op.name in _SCATTERED:
        return [classes.of(op.ins[2])[j] for j in scatter_rows(op)]
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
        if all(of_outs) or is_sum or (has_steps(eqn) and any(of_outs)):
            yield AxisMap(of(of_ins), of(of_outs))
