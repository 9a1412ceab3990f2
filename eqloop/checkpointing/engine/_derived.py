"""The derivatives of a backward step, which need a forward and a reverse loop again.

Let a step be `h1 = f(h)`, and its backward step `c = J^T c1`, where `J` is the Jacobian
of `f` at `h`, and `c` and `c1` are the cotangents of `h` and `h1`.

- Forward mode (`jvp_of_back`). The forward loop carries `(h, dh)`. The backward step
  is given both, and carries back `(c, dc)`.
- Reverse mode (`forward_step_of_reverse`, `vjp_of_back`). `c` has a cotangent `b`, and
  that of `c1` is `b1 = J b`: it goes from the first step to the last, so the forward
  loop carries `(h, b)`. It needs no `c`, since the backward step is linear in `c1`,
  unless a custom rule of the user is not. Then the reverse loop is given `h` and `b`.
  It carries back `c`, as before, and the cotangent `g` of `h`, to which the second
  derivative of `f` contributes at each step:

      g = J^T g1  +  d/dh <b, J^T c1>

If second derivatives were symmetric, this could be shorter. But derivatives that custom
rules define need not be.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    added,
    cast_like,
    cotangent_types,
    instantiated,
    pick,
    put,
    split,
    zero_cotangent_of,
    zero_tangent,
)
from ..._programs import (
    has_rules,
    inputs_read,
    joined,
    jvp_of,
    pruned,
    settled,
    traced,
)
from ..._types import Aval, PyTree, Value
from ..steps._loop import Loop
from ..steps._step import Step, StepResult, make_step
from ._backward_step import (
    Back,
    BackwardStep,
    BlockEnds,
    BlockResult,
    Inputs,
    indices,
)
from ._forward import Active


class NotLinearError(Exception):
    """A way back is not linear in `carried` and `z`."""


def jvp_of_back(back: Back, active: Active) -> Back:
    """A way back with its tangents.

    The tangents of the active consts, leaves of the carry and `xs` follow these. The
    tangents of `carried`, of `z` and of all results follow them, too; every entry has
    one, which may be zero.
    """
    # All of `carried` and `z` have tangents: nobody knows here which are zeros. This is
    # forward mode over the whole way back, `vjp` and all. The residuals of that `vjp`
    # get tangents, too, but none outlives the step.
    *_, z, carried = back.types
    takes = (*active, (True,) * len(z), (True,) * len(carried))
    sums, kept = back.outs
    gives = tuple((True,) * count for count in (sums, kept, len(back.x_of)))
    counts = (n + sum(marks) for n, marks in zip(back.counts, takes, strict=False))
    return dataclasses.replace(
        back,
        program=pruned(jvp_of(back.program, takes, gives)),
        counts=tuple(counts),
        const_of=back.const_of * 2,
        x_of=back.x_of * 2,
    )


def vjp_of_back(back: Back, forward: Step, active: Active) -> Back:
    """The reverse mode of a way back, for the active inputs of its forward loop.

    Consts, carry and `xs` are followed by the cotangents of the `sums`, of `carried`,
    and of the `xs` that it returns, and `carried` by those of the active carry. The
    sums and `xs` themselves are not computed: the gradient has done so.
    """
    # `forward` is the step of the forward loop, without outputs.
    *types, z, carried = back.types
    before, grown = list(map(len, types)), _grown(types, _given(back))
    ends = [*carried, *cotangent_types(types[1], active.carry)]
    counts = (*map(len, grown), len(z))

    def of_step(*flat: Value) -> list[Value]:
        *groups, z, both = split(flat, *counts)
        inputs, cts = zip(*map(split, groups, before), strict=True)
        given, ct_carry = split(both, len(carried))

        # Two functions of the carry before the step: the carry after it, whose
        # cotangent is `g1`, and what the backward step returns, whose cotangents are
        # `cts`. One `vjp` of both adds up the two terms of `g`.
        def run(*marked: Arrays) -> tuple[Value, list[Value]]:
            merged = list(map(put, inputs, active, marked))
            last, _ = forward(*merged)
            taken = back(merged, (given, z))
            return (pick(last, active.carry), taken), taken.carried

        # `carried` is computed on the way, so it comes out as the auxiliary output: to
        # call `back` once more for it would run the step once more.
        marked = map(pick, inputs, active)
        _, pull, carried_on = jax.vjp(run, *marked, has_aux=True)
        sums, ct_carry, xs = pull((ct_carry, BlockResult(*cts)))
        return [*sums, *carried_on, *ct_carry, *xs]

    program = traced(of_step, [*itertools.chain(*grown), *z, *ends])
    return Back(pruned(program), counts, indices(active.consts), indices(active.xs))


def _settled(back: Back, active: Active, reverse: bool) -> Back:
    marks = joined(active)
    marks += (True,) * (len(back.program.in_avals) - len(marks))
    return dataclasses.replace(back, program=settled(back.program, marks, reverse))


def differentiated_once(
    back: BackwardStep, active: Active, reverse: bool
) -> BackwardStep:
    """A backward step after it has been differentiated once, see `settled`.

    It is the very same if nothing is active or if its step has no custom rules.
    """
    if not (any(map(any, active)) and has_rules(back.step.jaxpr)):
        return back
    return back.changed(_settled, active, reverse)


@functools.lru_cache(maxsize=128)
def forward_step_of_reverse(back: Back, step: Step) -> Step:
    """The step of the forward loop in the reverse mode of a reverse sweep.

    `NotLinearError` is raised if the cotangents depend on `carried` or on `z`.
    """
    # Its carry is `(h, b)` in the terms of this file's docstring, and its `y` are the
    # cotangents of the `z` of the backward step. If the carry of `step` has more leaves
    # than that of the backward step, these are the first ones, see `lead`.
    types = step.const_types, step.carry_types, step.x_types
    *_, own, _, z, carried = back.types
    lead = len(types[1]) - len(own)
    grown = _grown(types, _given(back))

    def run(ends: BlockEnds, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        pairs = [split(x, len(t)) for x, t in zip(inputs, types, strict=True)]
        (consts, carry, x), cts = ([pair[i] for pair in pairs] for i in (0, 1))
        # `h1 = f(h)` and `b1 = J b`, in one step. The leaves of `lead` are a part of
        # `h` and have no `b`.
        after, _ = step(consts, carry, x)
        reverse = lambda *ends: back((consts, carry[lead:], x), ends)
        # Linear in `ends`, so its transpose is the same wherever it is taken.
        _, pull = jax.vjp(reverse, *ends)
        ct_carried, ct_z = pull(BlockResult(*cts))
        return [*after, *ct_carried], ct_z

    # The step is traced twice: here with `ends` as inputs, to see whether they are
    # read, and then with zeros in their place, since nobody carries a `c` forward.
    ends = carried, z
    jaxpr = jax.make_jaxpr(run)(ends, grown)
    read = inputs_read(jaxpr, [True] * len(jaxpr.out_avals))
    # Linear means here that the program of the transpose does not read `ends`.
    if any(read[: sum(map(len, ends))]):
        raise NotLinearError
    return make_step(lambda *inputs: run(_zeros(ends), inputs), *grown)


def _given(back: Back) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of the results of a way back, in the groups of its inputs."""
    consts, _, xs, _, carried = back.types
    sums = [consts[i] for i in back.const_of]
    return sums, carried, [xs[i] for i in back.x_of]


def _grown(types: PyTree, more: PyTree) -> PyTree:
    pairs = zip(types, more, strict=True)
    return tuple([*own, *(aval.to_ct_aval() for aval in added)] for own, added in pairs)


def _zeros(types: PyTree) -> PyTree:
    return jax.tree.map(lambda aval: instantiated(zero_tangent(aval)), types)


def two_scans(
    back: Back, step: Step, loop: Loop, inputs: Inputs, ends: BlockEnds
) -> BlockResult:
    """A forward and a reverse sweep as two scans, for JAX to differentiate.

    It returns what the reverse sweep returns for the whole loop.
    """
    # This stores every carry. It is for the reverse mode of a backward step that is not
    # linear in `carried`, which is not possible otherwise.
    (consts, init, xs), (carried, zs) = inputs, ends
    # Plain scans, not the two primitives: JAX differentiates both by its own rules, and
    # needs nothing to be linear.
    xs = [jnp.moveaxis(x, axis, 0) for x, axis in zip(xs, loop.x_axes, strict=True)]

    def move(carry: list[Value], x: list[Value]) -> StepResult:
        return step(consts, carry, x)[0], carry

    def take(state: tuple[list[Value], list[Value]], at: PyTree) -> PyTree:
        carried, sums = state
        carry, x, z = at
        taken = back((consts, carry, x), (carried, z))
        return (taken.carried, added(sums, taken.sums)), taken.xs

    z_of_all = list(zs)
    if loop.kept is not None:
        all_indices = jnp.arange(loop.length, dtype=jnp.int32)
        z_of_all = jax.vmap(lambda index: loop.row_or_zeros(zs, index))(all_indices)
    # `lax.scan` reads and stacks from the front, or all of it from the back. So the way
    # back is a scan in the other direction, over the same rows.
    carry, carries = lax.scan(move, list(init), xs, loop.length, reverse=loop.reverse)
    del carry
    sums = [zero_cotangent_of(consts[i], loop.sums) for i in back.const_of]
    (carried, sums), given = lax.scan(
        take,
        (list(carried), sums),
        (carries, xs, z_of_all),
        loop.length,
        reverse=not loop.reverse,
    )
    axes = [loop.x_axes[i] for i in back.x_of]
    return BlockResult(
        [cast_like(ct, consts[i]) for ct, i in zip(sums, back.const_of, strict=True)],
        carried,
        [jnp.moveaxis(x, 0, axis) for x, axis in zip(given, axes, strict=True)],
    )
