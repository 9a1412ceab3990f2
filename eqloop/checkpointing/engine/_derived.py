"""The derivatives of a backward step, which need a forward and a reverse loop again.

Let a step be `h1 = f(h)`, and its backward step `c = J^T c1`, where `J` is the Jacobian
of `f` at `h`, and `c` and `c1` are the cotangents of `h` and `h1`.

- Forward mode (`Pushed`). The forward loop carries `(h, dh)`. The backward step is
  given both, and carries back `(c, dc)`.
- Reverse mode (`forward_step_of_reverse` and `Pulled`). `c` has a cotangent `b`, and
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
from collections.abc import Callable
from typing import Self

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
from ..._programs import has_rules, inputs_read, run, settled
from ..._types import Aval, PyTree, Value
from ..steps._loop import Loop
from ..steps._step import Step, StepResult, make_step
from ._backward_step import (
    BackwardStep,
    BlockEnds,
    BlockResult,
    Inputs,
    WrappedStep,
    indices,
    take_one,
)
from ._forward import Active


class NotLinearError(Exception):
    """A backward step is not linear in `carried` and `z`."""


@dataclasses.dataclass(frozen=True)
class Derived(WrappedStep):
    """A backward step that is derived from another one, `inner`.

    Attributes:
        forward: The step of the forward loop of `inner`, without outputs.
        active: Which inputs of that loop are differentiated.
    """

    forward: Step
    active: Active

    def with_steps(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(
            super().with_steps(rewrite), forward=rewrite(self.forward)
        )

    def _open(self, inputs: Inputs) -> tuple[list[list[Value]], list[list[Value]]]:
        # In each group the inputs of `inner` come first. How many they are, only its
        # types tell.
        types = self.inner.types
        pairs = [split(x, len(t)) for x, t in zip(inputs, types, strict=True)]
        own, added = ([pair[i] for pair in pairs] for i in (0, 1))
        return own, added


@dataclasses.dataclass(frozen=True)
class Pushed(Derived):
    """A backward step with its tangents.

    The tangents of the active consts, leaves of the carry and `xs` follow these. The
    tangents of `carried`, of `z` and of all results follow them, too; every entry has
    one, which may be zero.
    """

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        return _grown(self.inner.types, map(pick, self.inner.types, self.active))

    @property
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
        carried, z = self.inner.end_types
        return [*carried, *carried], [*z, *z]

    @property
    def const_of(self) -> tuple[int, ...]:
        return self.inner.const_of * 2

    @property
    def x_of(self) -> tuple[int, ...]:
        return self.inner.x_of * 2

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        return self._pushed(self.inner, inputs, ends)

    @property
    def joins_steps(self) -> bool:
        return self.inner.joins_steps

    def joined(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        axes = loop.x_axes[: len(self.inner.types[2])]
        inner_loop = dataclasses.replace(loop, x_axes=axes)
        take = functools.partial(self.inner.joined, inner_loop)
        return self._pushed(take, inputs, ends)

    def _pushed(
        self, take: Callable[..., BlockResult], inputs: Inputs, ends: BlockEnds
    ) -> BlockResult:
        inputs, dots = self._open(inputs)
        pairs = [split(e, len(e) // 2) for e in ends]
        ends, ends_dot = ([pair[i] for pair in pairs] for i in (0, 1))

        def run(marked: list[Value], ends: list[Value]) -> BlockResult:
            return take(list(map(put, inputs, self.active, marked)), ends)

        # All of `ends` have tangents, which may be zeros: nobody knows here which of
        # them are. Of the inputs, only the active ones do.
        primals = list(map(pick, inputs, self.active)), ends
        # Forward mode over the whole backward step, `vjp` and all. The residuals of
        # that `vjp` get tangents, too, but none outlives this call.
        taken, taken_dot = jax.jvp(run, primals, (dots, ends_dot))
        return BlockResult(*([*a, *b] for a, b in zip(taken, taken_dot, strict=True)))


@dataclasses.dataclass(frozen=True)
class Pulled(Derived):
    """The reverse mode of a backward step, for the active inputs of its forward loop.

    Consts, carry and `xs` are followed by the cotangents of the `sums`, of `carried`,
    and of the `xs` that `inner` returns. The `carried` of `inner` is followed by the
    cotangents of the active carry. The sums and `xs` of `inner` itself are not
    computed: the gradient has done so.
    """

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        return _grown(self.inner.types, _given(self.inner))

    @property
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
        carried, z = self.inner.end_types
        return [*carried, *cotangent_types(self.inner.types[1], self.active.carry)], z

    @property
    def const_of(self) -> tuple[int, ...]:
        return indices(self.active.consts)

    @property
    def x_of(self) -> tuple[int, ...]:
        return indices(self.active.xs)

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        inputs, cts = self._open(inputs)
        carried, z = ends
        carried, ct_carry = split(carried, len(self.inner.end_types[0]))

        # Two functions of the carry before the step: the carry after it, whose
        # cotangent is `g1`, and what the backward step returns, whose cotangents are
        # `cts`. One `vjp` of both adds up the two terms of `g`.
        def run(*marked: Arrays) -> tuple[Value, list[Value]]:
            merged = list(map(put, inputs, self.active, marked))
            last, _ = self.forward(*merged)
            taken = self.inner(merged, (carried, z))
            return (pick(last, self.active.carry), taken), taken.carried

        marked = map(pick, inputs, self.active)
        # `carried` is computed on the way, so it comes out as the auxiliary output: to
        # call `inner` once more for it would run the step once more.
        _, pull, carried = jax.vjp(run, *marked, has_aux=True)
        ct_consts, ct_carry, ct_xs = pull((ct_carry, BlockResult(*cts)))
        return BlockResult(ct_consts, [*carried, *ct_carry], ct_xs)


@dataclasses.dataclass(frozen=True)
class DifferentiatedOnce(Derived):
    """A backward step after it has been differentiated once, see `settled`.

    Attributes:
        reverse: Whether it was differentiated in reverse mode.
    """

    reverse: bool

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        def of_leaves(*flat: Value) -> list[Value]:
            return jax.tree.leaves(self.inner(*tree.unflatten(flat)))

        flat, tree = jax.tree.flatten((list(inputs), list(ends)))
        marks = [mark for flags in self.active for mark in flags]
        marks += [True] * (len(flat) - len(marks))
        # The rules are in the program of `inner`, which `jax.vjp` makes when it is
        # called. So that is traced first, and its rules are replaced then.
        traced = jax.make_jaxpr(of_leaves)(*flat)
        outs = run(settled(traced, tuple(marks), self.reverse), *flat)
        counts = len(self.const_of), len(self.end_types[0])
        return BlockResult(*split(outs, *counts))


def differentiated_once(
    back: BackwardStep, forward: Step, active: Active, reverse: bool
) -> BackwardStep:
    """A backward step after it has been differentiated once.

    It is the very same if nothing is active or if its step has no custom rules.
    """
    if not (any(map(any, active)) and has_rules(back.base.step.jaxpr)):
        return back
    return DifferentiatedOnce(back, forward, active, reverse)


@functools.lru_cache(maxsize=128)
def forward_step_of_reverse(back: BackwardStep, step: Step) -> Step:
    """The step of the forward loop in the reverse mode of a reverse sweep.

    `NotLinearError` is raised if the cotangents depend on `carried` or on `z`.
    """
    # Its carry is `(h, b)` in the terms of this file's docstring, and its `y` are the
    # cotangents of the `z` of the backward step. If the carry of `step` has more leaves
    # than that of the backward step, these are the first ones, see `lead`.
    types = step.const_types, step.carry_types, step.x_types
    lead = len(types[1]) - len(back.types[1])
    grown = _grown(types, _given(back))

    def run(ends: BlockEnds, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        pairs = [split(x, len(t)) for x, t in zip(inputs, types, strict=True)]
        (consts, carry, x), cts = ([pair[i] for pair in pairs] for i in (0, 1))
        # `h1 = f(h)` and `b1 = J b`, in one step. The leaves of `lead` are a part of
        # `h` and have no `b`.
        after, _ = step(consts, carry, x)
        reverse = lambda *ends: take_one(back, (consts, carry[lead:], x), ends)
        # Linear in `ends`, so its transpose is the same wherever it is taken.
        _, pull = jax.vjp(reverse, *ends)
        ct_carried, ct_z = pull(BlockResult(*cts))
        return [*after, *ct_carried], ct_z

    # The step is traced twice: here with `ends` as inputs, to see whether they are
    # read, and then with zeros in their place, since nobody carries a `c` forward.
    ends = tuple(back.end_types)
    jaxpr = jax.make_jaxpr(run)(ends, grown)
    read = inputs_read(jaxpr, [True] * len(jaxpr.out_avals))
    # Linear means here that the program of the transpose does not read `ends`.
    if any(read[: sum(map(len, ends))]):
        raise NotLinearError
    return make_step(lambda *inputs: run(_zeros(ends), inputs), *grown)


def _given(back: BackwardStep) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of the results of a backward step, in the groups of `Pulled`.

    `sums` are in the place of the consts, and `carried` in that of the carry.
    """
    consts, _, xs = back.types
    sums = [consts[i] for i in back.const_of]
    return sums, back.end_types[0], [xs[i] for i in back.x_of]


def _grown(types: PyTree, more: PyTree) -> PyTree:
    pairs = zip(types, more, strict=True)
    return tuple([*own, *(aval.to_ct_aval() for aval in added)] for own, added in pairs)


def _zeros(types: PyTree) -> PyTree:
    return jax.tree.map(lambda aval: instantiated(zero_tangent(aval)), types)


def two_scans(
    back: BackwardStep, step: Step, loop: Loop, inputs: Inputs, ends: BlockEnds
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
