"""Has XLA bring `xs` into the order of their rows in a single copy, on a CPU.

A loop there reads arrays in row-major order. If `xs` are transposed before it, as in
`x.swapaxes(0, 1)`, XLA takes that for another view of the same memory, makes a copy of
it as it is, and then, for the loop, one in row-major order. If it is told that order,
it transposes once. Other devices read a transposed array where it lies.
"""

from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching, mlir

from ..._arrays import Arrays, is_type
from ..._types import Value

# Nobody sees copies of fewer bytes, and programs are read by people.
_FEW = 2**12

# By this name, whatever reads programs knows that it does nothing to a number.
_row_order_p = jex.Primitive("copy")


def in_row_order(xs: Arrays) -> list[Value]:
    """Arrays that a loop reads, in row-major order."""
    return [_row_order_p.bind(x) if _may_be_copied(x) else x for x in xs]


def _may_be_copied(x: Value) -> bool:
    aval = jax.typeof(x)
    # What is known is a constant of the program, in its order, and takes no memory.
    if (
        not isinstance(x, jax.core.Tracer)
        or not is_type(aval)
        or jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    ):
        return False
    return len(aval.shape) > 1 and aval.size * aval.dtype.itemsize >= _FEW


def _lower(context: Any, x: Any) -> Any:
    module = context.module_context
    # An exported program may be for a later XLA, which is not told of orders. And what
    # is split over several devices would be gathered.
    is_one = getattr(module.axis_context, "num_devices", 0) == 1
    for_export = module.lowering_parameters.for_export
    if for_export or not is_one or tuple(module.platforms) != ("cpu",):
        return [x]
    (aval,) = context.avals_in
    order = Layout(tuple(range(aval.ndim)))
    run = mlir.lower_fun(
        lambda x: with_layout_constraint(x, order), multiple_results=False
    )
    return run(context, x)


_row_order_p.def_impl(lambda x: x)
_row_order_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_row_order_p, lambda ct, _: [_row_order_p.bind(ct)])
batching.defvectorized(_row_order_p)
mlir.register_lowering(_row_order_p, _lower)
