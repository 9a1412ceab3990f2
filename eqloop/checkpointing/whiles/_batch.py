"""Joins the loops of a batch, in which each example stops at its own time, to one loop.

The joint loop runs while any example does:

    carry    (any(is_active), is_active, the carries of all examples)
    step     new = step of every example;  carry = where(is_active, new, carry)

For derivatives, this `where` is not enough. `body` may be singular where an example has
stopped, `sqrt(x)` at 0 for instance. The cotangent there is zero, but zero times
infinity is NaN, and would be added to the cotangents of what the examples share. So the
step of an example that has stopped is evaluated at a carry at which this example did
run: its initial one. An example that never runs borrows the initial carry of one that
does, and everything else that is not shared.

A batch of joint loops is one more of them. Its examples keep their carries already, so
its step selects nothing, and all that is new is `any`.

This would not do for steps that can see their batch. The examples of their loops keep
in step, which is for all examples to go on or none (`_lockstep.py`).
"""

import dataclasses
import functools
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    Flags,
    explicit_sharding,
    pick,
    put,
    split,
    where_leading,
    with_batch_axis,
)
from ..._programs import batched_axes, batched_types, detached, refuse_callbacks
from ..._types import BatchAxis, Index, PyTree, Value
from ..engine._problem import Problem
from ..engine._transformed import batched_problem
from ..rewrites._masked_writes import NOTE, with_masked_writes, written_leaves
from ..steps._loop import element
from ..steps._step import Step, make_step

# The axes of consts, of the carry, and of `xs`.
Dims: TypeAlias = tuple[tuple[int | None, ...], ...]

P = TypeVar("P", bound=Problem[Any])


def stops_apart(problem: Problem, axis_data: BatchAxis, dims: Dims) -> bool:
    """Whether the examples of a batch may stop at different times."""
    _, carry, _ = batched_problem(problem, axis_data, dims)
    return carry[0]


def joint_loop(
    problem: P,
    axis_data: BatchAxis,
    args: PyTree,
    dims: Dims,
    count_at: int,
    is_joint: bool,
) -> tuple[P, list[Value], list[Value]]:
    """The loop of the batch, its consts and its initial carry.

    With `is_joint`, each example is a joint loop itself.
    """
    # Its carry starts with whether any example goes on. The carry of the examples
    # follows, batched along the first axis. So are its `ys`. The `xs` stay as they are.
    # `count_at` is the place in the carry of the number of steps, which an inverse
    # reads.
    refuse_callbacks(
        problem.step.jaxpr.effects,
        "Under `vmap`, a while loop also runs the steps of examples that have stopped",
        "Map over the examples one by one (`el.Map`)",
    )
    consts, init, xs = args
    with_axis = functools.partial(with_batch_axis, axis_data=axis_data)
    init = [with_axis(c, dim) for c, dim in zip(init, dims[1], strict=True)]
    borrow = functools.partial(_borrow, init[0])
    consts = [
        c if dim is None else jnp.moveaxis(borrow(jnp.moveaxis(c, dim, 0)), 0, dim)
        for c, dim in zip(consts, dims[0], strict=True)
    ]
    settings = axis_data, (dims[0], dims[2]), count_at, is_joint
    joint: Any = _joint_problem(problem, *settings)
    if is_joint:
        return joint, consts, [jnp.any(init[0]), *init]
    # The guard of `x` is the element of the first step: an example that runs at all has
    # run there.
    first = problem.loop.index(0)
    axes, x_dims = batched_axes(problem.loop.x_axes, dims[2])
    x = [element(x, first, axis) for x, axis in zip(xs, axes, strict=True)]
    x = [with_axis(e, dim) for e, dim in zip(x, x_dims, strict=True)]
    read = pick(init[1:], _not_written(problem.step))
    # Guards are detached: an example that has stopped adds nothing to the cotangents of
    # its initial carry and of `xs`.
    guards = [detached(borrow(c)) for c in [*read, *x]]
    return joint, [*consts, *guards], [jnp.any(init[0]), *init]


@functools.lru_cache(maxsize=128)
def _joint_problem(
    problem: Problem, axis_data: BatchAxis, dims: PyTree, count_at: int, is_joint: bool
) -> Problem:
    const_dims, xs_dims = dims
    with_axis = functools.partial(with_batch_axis, axis_data=axis_data)
    num_consts, num_carry = problem.step.num_consts, problem.step.num_carry
    axes, x_dims = batched_axes(problem.loop.x_axes, xs_dims)
    # Buffers that rows are written to are not selected: an example that has stopped
    # writes no rows.
    is_read = _not_written(problem.step)
    written = (False, *[not mark for mark in is_read])
    one_way = dataclasses.replace(problem.step, inverse=None, saved=())
    masked = one_way if is_joint else with_masked_writes(one_way, written)
    masked = dataclasses.replace(problem, step=masked)
    # With masked writes, the last of the consts is whether an example is active.
    dims_of_consts = const_dims if is_joint else (*const_dims, 0)
    in_front = (dims_of_consts, (0,) * num_carry, (0,) * len(xs_dims))
    batched, _, y_batched = batched_problem(masked, axis_data, in_front)

    def with_axes(y: Arrays) -> list[Value]:
        pairs = zip(y, y_batched, strict=True)
        return [e if is_batched else with_axis(e, None) for e, is_batched in pairs]

    def joint(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        x = [with_axis(e, dim) for e, dim in zip(x, x_dims, strict=True)]
        if is_joint:
            (goes_on, *after), y = batched.step(consts, carry[1:], x)
            return [jnp.any(goes_on), goes_on, *after], with_axes(y)
        consts, guards = split(consts, num_consts)
        (_, is_active, *before) = carry
        # `safe` is what the step is evaluated at: the guards for examples that have
        # stopped, and buffers of rows as they are.
        where_active = functools.partial(where_leading, is_active)
        safe = [*pick(before, is_read), *x]
        safe = list(map(where_active, safe, guards))
        safe, x = split(safe, sum(is_read))
        safe = put(before, is_read, safe)
        inputs = [*consts, is_active], [is_active, *safe], x
        (goes_on, *after), y = batched.step(*inputs)
        pairs = zip(pick(after, is_read), pick(before, is_read), strict=True)
        carry = put(after, is_read, [where_active(*pair) for pair in pairs])
        # Rows for steps that an example does not run are zeros.
        y = [where_active(e, jnp.zeros_like(e)) for e in with_axes(y)]
        # At its guards, the condition of an example that has stopped may hold again. So
        # the mask only ever loses examples.
        is_active = is_active & goes_on
        return [jnp.any(is_active), is_active, *carry], y

    def joint_back(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        any_active, *after = carry
        x = [with_axis(e, dim) for e, dim in zip(x, x_dims, strict=True)]
        undone = batched_problem(problem, axis_data, (const_dims, *in_front[1:]))[0]
        before = undone.step.before(consts[:num_consts], after, x)
        # On its way back, an example has run fewer steps than those that ran longer,
        # until they come to its last step.
        count = after[count_at]
        own = jnp.max(count, range(1, count.ndim))
        ran = own == jnp.max(own)
        pairs = zip(before[1:], after[1:], strict=True)
        return [any_active, ran, *(where_leading(ran, *pair) for pair in pairs)], []

    step, one = problem.step, batched.step
    (any_type,) = jax.make_jaxpr(jnp.any)(one.carry_types[0]).out_avals
    guard_types = [*pick(one.carry_types[1:], is_read), *one.x_types]
    own = one.const_types if is_joint else [*one.const_types[:-1], *guard_types]
    types = (
        own,
        [any_type, *one.carry_types],
        batched_types(step.x_types, x_dims, axis_data),
    )
    joint_step = make_step(joint, *types)
    if step.inverse is not None:
        inverse, saved = make_step(joint_back, *types).jaxpr, (False, *step.saved)
        saved = saved if step.saved else ()
        joint_step = dataclasses.replace(joint_step, inverse=inverse, saved=saved)
    meter = batched.loop.meter.moved(1)
    paths = problem.loop.carry_paths
    paths = paths and ("whether any example goes on", *paths)
    own = dict[str, Any](meter=meter, x_axes=axes, starts=(), carry_paths=paths)
    noted = batched.loop.noting(NOTE, () if is_joint else written)
    loop = dataclasses.replace(noted, **own)
    return dataclasses.replace(batched, step=joint_step, loop=loop)


def _not_written(step: Step) -> Flags:
    """Which leaves of the carry, after the first, are more than buffers of rows."""
    # The others only have rows written to them. Selecting between an old and a new
    # buffer would take as long as the whole buffer does, at every step
    # (`_masked_writes.py`).
    return tuple(not mark for mark in written_leaves(step)[1:])


def _borrow(runs: Value, x: Value) -> Value:
    """`x`, where examples that never run have the entry of one that does."""
    # `argmax` finds the first example that runs. If none does, it finds example 0,
    # which does not matter, as the loop runs no step.
    lender = _example(x, jnp.argmax(runs))
    return where_leading(runs, x, detached(lender))


def _example(batch: Value, index: Index) -> Value:
    """One example of a batch, as a batch of one."""
    sharding = explicit_sharding(batch)
    if sharding is None or sharding.spec[0] is None:
        return lax.dynamic_index_in_dim(batch, index, 0)
    if jnp.issubdtype(batch.dtype, jax.dtypes.prng_key):
        data = _example(jax.random.key_data(batch), index)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(batch))
    # JAX does not slice along an axis that is split over devices. To collect all of the
    # examples on each device would take the memory of the batch.
    is_it = jnp.arange(batch.shape[0]) == index
    others = jnp.zeros_like(batch)
    only = where_leading(is_it, batch, others)
    return jnp.sum(only, 0, keepdims=True).astype(batch.dtype)
