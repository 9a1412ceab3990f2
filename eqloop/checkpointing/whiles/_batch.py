"""A loop of a batch, in which each example stops at its own time.

It is a loop again, which runs while any example does. The examples that have stopped
keep their carry: it is selected. For their derivatives that is not enough, as `body`
may be singular where an example has stopped. Its cotangent there is zero; but zero
times infinity is not, and it would be added to the cotangents of what the examples
share. So the step of an example that has stopped is evaluated for a carry at which that
example did run: its initial one. And an example that never runs borrows that of another
which does, with everything else that the two do not share.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from ..._array_types import where_leading
from ..._effects import refuse_callbacks
from ..._partition import Arrays, split
from ..._reaching import mixes_examples
from ..engine._loop import with_batch_axis
from ..engine._problem import Problem, batched_problem
from ..engine._step import make_step

# The axes of consts, of the carry, and of `xs`, of which there are none.
Dims: TypeAlias = tuple[tuple[int | None, ...], ...]


def stops_apart(problem: Problem, axis_data: Any, dims: Dims) -> bool:
    """Whether the examples of a batch may stop at different times."""
    _, carry, _ = batched_problem(problem, axis_data, dims)
    return carry[0]


def joint_loop(
    problem: Problem, axis_data: Any, consts: Arrays, init: Arrays, dims: Dims
) -> tuple[Problem, list[Any], list[Any]]:
    """The loop of the batch, its consts and its initial carry.

    Its carry starts with whether any example is to go on; what follows is the carry of
    the examples, all of it batched along the leading axis.
    """
    refuse_callbacks(
        problem.step.jaxpr.effects,
        "Under `vmap`, a while loop also runs the steps of examples that have stopped",
        "Map over the examples one by one (`el.Map`)",
    )
    size = axis_data.size
    init = [with_batch_axis(c, dim, size) for c, dim in zip(init, dims[1], strict=True)]
    guards: list[Any] = []
    # Examples that depend on each other cannot borrow: those that have stopped take
    # part in what the others do, as in `jax.lax.while_loop`.
    if not mixes_examples(problem.step.jaxpr, axis_data.name):
        borrow = functools.partial(_borrow, init[0])
        consts = [
            c if dim is None else jnp.moveaxis(borrow(jnp.moveaxis(c, dim, 0)), 0, dim)
            for c, dim in zip(consts, dims[0], strict=True)
        ]
        guards = [lax.stop_gradient(borrow(c)) for c in init[1:]]
    problem = _joint_problem(problem, axis_data, dims[0], bool(guards))
    return problem, [*consts, *guards], [jnp.any(init[0]), *init]


@functools.lru_cache(maxsize=128)
def _joint_problem(
    problem: Problem, axis_data: Any, const_dims: Any, is_guarded: bool
) -> Problem:
    num_consts, num_carry = problem.step.num_consts, problem.step.num_carry
    dims = (const_dims, (0,) * num_carry, ())
    batched, _, _ = batched_problem(problem, axis_data, dims)

    def joint(
        consts: list[Any], carry: list[Any], x: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        consts, guards = split(consts, num_consts)
        (_, is_active, *before) = carry
        where_active = functools.partial(where_leading, is_active)
        safe = before
        if is_guarded:
            safe = list(map(where_active, before, guards))
        (goes_on, *after), _ = batched.step(consts, [is_active, *safe], x)
        carry = list(map(where_active, after, before))
        is_active = is_active & goes_on
        return [jnp.any(is_active), is_active, *carry], []

    const_types, carry_types = batched.step.const_types, batched.step.carry_types
    (any_type,) = jax.make_jaxpr(jnp.any)(carry_types[0]).out_avals
    guard_types = carry_types[1:] if is_guarded else []
    step = make_step(joint, [*const_types, *guard_types], [any_type, *carry_types], [])
    loop = dataclasses.replace(batched.loop, meter=batched.loop.meter.moved(1))
    return dataclasses.replace(batched, step=step, loop=loop)


def _borrow(runs: Any, x: Any) -> Any:
    """`x` in which the examples that never run have that of one which does."""
    lender = lax.dynamic_index_in_dim(x, jnp.argmax(runs), 0)
    return where_leading(runs, x, lax.stop_gradient(lender))
