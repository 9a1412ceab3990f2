"""Kernels under `vmap`: its axis is one more axis of rows.

A loop is batched before it is a kernel. A gradient of each example is not: there `vmap`
comes upon the kernel itself, and in place of one kernel for each example there is to be
one for all. If examples stop at steps of their own, their steps are masked.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._arrays import Arrays, Flags, split
from ..._programs import run
from ..._types import Aval, PyTree, Value
from ..engine._backward_step import BackwardStep
from ..engine.orders._levels import Nest
from ..steps._loop import Loop
from ..steps._step import Step
from ._backward import Backward, WayBack
from ._forward import Forward
from ._row_programs import Settings


@functools.lru_cache(maxsize=64)
def forward_kernel(step: Step, loop: Loop, settings: Settings) -> Forward:
    """The kernel that runs a loop."""
    return Forward(step, loop, settings.of(loop))


@functools.lru_cache(maxsize=64)
def backward_kernel(way: WayBack, loop: Loop, settings: Settings) -> Backward:
    """The kernel that goes back through a loop."""
    return Backward(way, loop, settings.of(loop))


@functools.lru_cache(maxsize=64)
def way_back(step: Step, back: BackwardStep, own: Aval | None = None) -> WayBack:
    """The programs of a way back. `own` is the type of how many steps were run."""
    one = back.one
    counts = step.num_consts, *one.counts[1:]
    return WayBack(step.jaxpr, one.program, counts, one.const_of, one.x_of, own)


def run_forward(
    step: Step,
    loop: Loop,
    settings: Settings,
    saved: tuple[tuple[Nest, ...], Flags, int],
    inputs: PyTree,
) -> tuple[list[Value], list[Value], list[Value]]:
    """The final carry, `ys` and stored carries; see `Forward`."""

    @jax.custom_batching.custom_vmap
    def one(*inputs: Arrays) -> PyTree:
        return forward_kernel(step, loop, settings)(*saved, *inputs)

    @one.def_vmap
    def of_all(size: int, batched: PyTree, *inputs: Arrays) -> tuple[PyTree, PyTree]:
        (consts, init, xs), (of_consts, of_init, of_xs) = inputs, batched
        more = _batched_step(step, loop.stops, size, tuple(of_consts), tuple(of_xs))
        init = [_in_front(x, flag, size) for x, flag in zip(init, of_init, strict=True)]
        along = _shifted(loop, of_xs)
        made = run_forward(more, along, settings, saved, (consts, init, xs))
        carry, *rows = made
        made = carry, *([jnp.moveaxis(x, 1, 0) for x in group] for group in rows)
        return made, jax.tree.map(lambda _: True, made)

    return one(*map(list, inputs))


def run_back(
    way: WayBack, loop: Loop, settings: Settings, nests: Sequence[Nest], given: PyTree
) -> tuple[list[Value], list[Value], list[Value]]:
    """The cotangents of consts, of the initial carry, and of `xs`; see `Backward`.

    `given` are the groups of arrays that a `Backward` is called with, `own` the first.
    """

    @jax.custom_batching.custom_vmap
    def one(*given: Arrays) -> PyTree:
        return backward_kernel(way, loop, settings)(nests, *given)

    @one.def_vmap
    def of_all(size: int, batched: PyTree, *given: Arrays) -> tuple[PyTree, PyTree]:
        own, consts, xs, zs, stored, carried = map(list, batched)
        # Whatever has a cotangent of its own in each example, or is carried.
        own = [flag or n.ndim > 0 for flag, n in zip(own, given[0], strict=True)]
        consts = [flag or i in way.const_of for i, flag in enumerate(consts)]
        xs = [flag or i in way.x_of for i, flag in enumerate(xs)]
        flags = own, consts, xs, zs, [True] * len(stored), [True] * len(carried)
        groups = [
            [
                _in_front(x, had, size) if has else x
                for x, had, has in zip(*group, strict=True)
            ]
            for group in zip(given, batched, flags, strict=True)
        ]
        # Steps are along the first axis of these, as `vmap` has most likely found them.
        for group, of in ((3, zs), (4, flags[4])):
            pairs = zip(groups[group], of, strict=True)
            groups[group] = [jnp.moveaxis(x, 0, 1) if f else x for x, f in pairs]
        more = _batched_way(way, size, *map(tuple, (own, consts, xs, zs)))
        made = run_back(more, _shifted(loop, xs), settings, nests, groups)
        return made, jax.tree.map(lambda _: True, made)

    return one(*map(list, given))


def _in_front(x: Value, is_batched: bool, size: int) -> Value:
    return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))


def _shifted(loop: Loop, is_batched: Sequence[bool]) -> Loop:
    axes = zip(loop.x_axes, is_batched, strict=True)
    return dataclasses.replace(loop, x_axes=tuple(axis + flag for axis, flag in axes))


def _vmapped(
    program: Any, types: Sequence[Aval], size: int, flags: Sequence[bool]
) -> jex.ClosedJaxpr:
    axes = [0 if flag else None for flag in flags]
    wide = [
        aval.update(shape=(size, *aval.shape)) if flag else aval
        for aval, flag in zip(types, flags, strict=True)
    ]
    return jax.make_jaxpr(jax.vmap(program, axes, 0, axis_size=size))(*wide)


def _where(runs: Value, new: Arrays, old: Arrays) -> list[Value]:
    return [jnp.where(runs, *pair) for pair in zip(new, old, strict=True)]


def _zeros(arrays: Arrays) -> list[Value]:
    return list(map(jnp.zeros_like, arrays))


@functools.lru_cache(maxsize=64)
def _batched_step(step: Step, stops: bool, size: int, consts: Flags, xs: Flags) -> Step:
    n, m = step.num_consts, step.num_carry
    masks = stops and not step.carry_types[0].shape

    def program(*flat: Value) -> list[Value]:
        carry, made = flat[n : n + m], run(step.jaxpr, *flat)
        if not masks:
            return made
        after, y = split(made, m)
        return [*_where(carry[0], after, carry), *_where(carry[0], y, _zeros(y))]

    flags = *consts, *[True] * m, *xs
    jaxpr = _vmapped(program, step.jaxpr.in_avals, size, flags)
    return Step(jaxpr, n, m)


@functools.lru_cache(maxsize=64)
def _batched_way(
    way: WayBack, size: int, own: Flags, consts: Flags, xs: Flags, zs: Flags
) -> WayBack:
    if (one := way.own) is not None and any(own):
        way = way if one.shape else _masked(way)
        way = dataclasses.replace(way, own=one.update(shape=(size, *one.shape)))
    # The position of a step is the same for all.
    consts = (*consts, True, False) if way.is_masked else consts
    carry = [True] * way.counts[1]
    before, types = [*consts, *carry, *xs], way.pull.in_avals
    going = [True] * (len(types) - len(before) - len(zs))
    again, pull = (
        _vmapped(functools.partial(run, program), program.in_avals, size, flags)
        for program, flags in ((way.again, before), (way.pull, [*before, *zs, *going]))
    )
    return dataclasses.replace(way, again=again, pull=pull)


def _masked(way: WayBack) -> WayBack:
    """A way back with two more consts: the number of steps run, and a position.

    A step that was not run changes nothing.
    """
    n, m, *others = way.counts
    more = [jax.core.ShapedArray((), np.dtype("int32"))] * 2

    def again(*flat: Value) -> list[Value]:
        consts, (own, position), carry, x = split(flat, n, 2, m)
        new = run(way.again, *consts, *carry, *x)
        return _where(position < own, new, carry)

    def pull(*flat: Value) -> list[Value]:
        consts, (own, position), carry, rest = split(flat, n, 2, m)
        going = rest[sum(others) :]
        new = run(way.pull, *consts, *carry, *rest)
        sums, before, ct_x = split(new, len(way.const_of), len(going))
        runs, others_of = position < own, (sums, ct_x)
        sums, ct_x = (_where(runs, cts, _zeros(cts)) for cts in others_of)
        return [*sums, *_where(runs, before, going), *ct_x]

    of = lambda f, types: jax.make_jaxpr(f)(*types[:n], *more, *types[n:])
    return dataclasses.replace(
        way,
        again=of(again, way.again.in_avals),
        pull=of(pull, way.pull.in_avals),
        counts=(n + 2, m, *others),
        is_masked=True,
    )
