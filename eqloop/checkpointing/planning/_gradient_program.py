"""The gradient of a loop as a program by itself, to be compiled or run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
from jax.sharding import NamedSharding

from ..._arrays import is_inexact, pick, put, stack_type
from ..._types import Aval, PyTree, Value
from ..engine._forward import Active
from ..engine._layout import AbstractLayout, AbstractRunner
from ..engine._planned_loop import planned_loop
from ..engine._problem import Problem
from ..engine._transformed import with_cotangents
from ..steps._loop import Loop


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Plans the one layout."""

    only: AbstractLayout

    @property
    def runner(self) -> AbstractRunner | None:
        return self.only.runner

    def _decide(self, problem: Problem[Any], active: Active) -> AbstractLayout:
        return self.only


def flat(
    run: Callable[..., PyTree], *types: PyTree
) -> tuple[Callable[..., PyTree], list[Aval]]:
    """A function of arrays in place of one of trees, and their types."""
    # One argument of a program for each array: that is what is split over devices.
    leaves, tree = jax.tree.flatten(types)
    return (lambda *leaves: run(*tree.unflatten(leaves))), leaves


def gradient_of(
    problem: Problem, active: Active
) -> tuple[Callable[..., PyTree], list[Aval]]:
    """The gradient of a loop as a function, and the types of its arguments.

    These are the inputs and the cotangents of `ys`.
    """
    # The cotangents of the leaves that are `undifferentiated` are not among its
    # results: they take memory as well, and not that of an output. Nor are those of
    # inputs without influence. They would be zeros, which are written last, and until
    # then XLA uses their memory for other values: a gradient that is not asked for them
    # would take more.
    step, loop = problem.step, problem.loop
    nonzeros = problem.moving(_with_influence(problem, active))

    def gradient(inputs: PyTree, ct_ys: Value) -> PyTree:
        def run(*marked: PyTree) -> PyTree:
            merged = (put(*g) for g in zip(inputs, nonzeros, marked, strict=True))
            carry, ys = planned_loop(problem, *merged)
            return pick(carry, active.carry), list(filter(is_inexact, ys))

        (carry, _), pull = jax.vjp(run, *map(pick, inputs, nonzeros))
        # A loss depends on the last carry, and so do its cotangents.
        return pull(([-leaf for leaf in carry], ct_ys))

    ct_ys = [stack_type(y, loop.rows) for y in step.y_types if is_inexact(y)]
    return flat(gradient, input_types(problem), ct_ys)


def _with_influence(problem: Problem, active: Active) -> Active:
    """The inputs that have a cotangent other than zero, if all outputs have one."""
    is_wanted = lambda y: problem.loop.rows > 0 and is_inexact(y)
    ys = list(map(is_wanted, problem.step.y_types))
    return with_cotangents(problem.step, active, active.carry, ys)


def input_types(problem: Problem) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of what a loop is given: consts, the initial carry, and `xs`."""
    return _with_placements(problem, _placed)


def types_on_device(problem: Problem) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of what one device has of the consts, of a carry, and of an `x`."""
    consts, carry, xs = _with_placements(problem, _of_one_device)
    x = [
        jex.mapped_aval(aval.shape[axis], axis, aval)
        for aval, axis in zip(xs, problem.loop.x_axes, strict=True)
    ]
    return consts, carry, x


def _with_placements(
    problem: Problem, change: Callable[[Aval, NamedSharding], Aval]
) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of a loop's inputs, changed where it is known how they are split."""
    step, loop = problem.step, problem.loop
    xs = [
        stack_type(aval, loop.length, axis)
        for aval, axis in zip(step.x_types, loop.x_axes, strict=True)
    ]
    groups = step.const_types, step.carry_types, xs
    if not problem.placed:
        return groups
    consts, init, xs = (
        [
            change(aval, at) if at else aval
            for aval, at in zip(group, placed, strict=True)
        ]
        for group, placed in zip(groups, problem.placed, strict=True)
    )
    return consts, init, xs


def _placed(aval: Aval, sharding: NamedSharding) -> Aval:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _of_one_device(aval: Aval, sharding: NamedSharding) -> Aval:
    return aval.update(shape=sharding.shard_shape(aval.shape))


def of_length(loop: Loop, length: int) -> Loop:
    """The loop with another length that keeps as many of its outputs, if it can."""
    if length == loop.length:
        return loop
    if loop.kept is None:
        return dataclasses.replace(loop, length=length)
    _, between, _ = loop.gaps
    kept = range(0, length, between + 1)[: loop.rows]
    return dataclasses.replace(loop, length=length, kept=kept)
