"""The backward step, differentiated: a forward and a reverse loop.

- In forward mode, the forward loop carries the tangents of the carry along, and the
  reverse loop the tangents of what is carried back.
- In reverse mode, what is carried back has cotangents, which are taken through the
  steps from the first to the last. The forward loop carries them along, since they do
  not depend on what is carried back: a reversal is linear in that, unless a custom
  rule of the user is not. The reverse loop is that of before, and carries the
  cotangents of the carry as well.

The symmetry of second derivatives would make this shorter, but the derivatives that
custom rules define need not have it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Self

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    cotangent_types,
    instantiated,
    pick,
    put,
    split,
    stack_of,
    zero_tangent,
)
from ..._programs import has_rules, inputs_read, settled
from ..._types import Aval, PyTree, Value
from ._backward_step import (
    Around,
    BackwardStep,
    Ends,
    Inputs,
    Taken,
    indices,
    take_one,
    single,
)
from ._forward import Active
from ._loop import Loop
from ._step import Step, make_step


class NotLinearError(Exception):
    """A backward step is not linear in what it carries back."""


@dataclasses.dataclass(frozen=True)
class Derived(Around):
    """A backward step that is derived from another one.

    Attributes:
        forward: The step of the other one's forward loop, without outputs.
        active: Which of the inputs of that loop are differentiated.
    """

    forward: Step
    active: Active

    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(
            super().mapped(rewrite), forward=rewrite(self.forward)
        )

    def _open(
        self, loop: Loop, inputs: Inputs
    ) -> tuple[Loop, list[list[Value]], list[list[Value]]]:
        """The loop and the inputs of the other one, and what comes behind these."""
        pairs = [split(x, len(t)) for x, t in zip(inputs, self.inner.types, strict=True)]
        own, more = ([pair[i] for pair in pairs] for i in (0, 1))
        of_other = dataclasses.replace(loop, x_axes=loop.x_axes[: len(own[2])])
        return of_other, own, more


@dataclasses.dataclass(frozen=True)
class Pushed(Derived):
    """The other one, and its tangents.

    Behind the consts, the carry and `xs` are the tangents of those that are active.
    Behind all that is carried back, and all that is given, are their tangents.
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

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        return self._pushed(self.inner, loop, inputs, ends)

    @property
    def joins_steps(self) -> bool:
        return self.inner.joins_steps

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        return self._pushed(self.inner.joined, loop, inputs, ends)

    def _pushed(
        self, take: Callable[..., Taken], loop: Loop, inputs: Inputs, ends: Ends
    ) -> Taken:
        loop, inputs, dots = self._open(loop, inputs)
        pairs = [split(e, len(e) // 2) for e in ends]
        ends, ends_dot = ([pair[i] for pair in pairs] for i in (0, 1))

        def run(marked: list[Value], ends: list[Value]) -> Taken:
            return take(loop, list(map(put, inputs, self.active, marked)), ends)

        primals = list(map(pick, inputs, self.active)), ends
        taken, taken_dot = jax.jvp(run, primals, (dots, ends_dot))
        return Taken(*([*a, *b] for a, b in zip(taken, taken_dot, strict=True)))


@dataclasses.dataclass(frozen=True)
class Pulled(Derived):
    """The cotangents of the inputs of another one, beside what that carries back.

    Consts, carry and `xs` have behind them the cotangents of the `sums`, of what is
    carried back, and of the `xs` that are given. What is carried back is that of the
    other one, and behind it the cotangents of the active carry.
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

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        loop, inputs, cts = self._open(loop, inputs)
        carried, z = ends
        carried, ct_carry = split(carried, len(self.inner.end_types[0]))

        def run(*marked: Arrays) -> tuple[Value, list[Value]]:
            merged = list(map(put, inputs, self.active, marked))
            last, _ = single(self.forward, loop, None, *merged)
            taken = self.inner(loop, merged, (carried, z))
            return (pick(last, self.active.carry), taken), taken.carried

        marked = map(pick, inputs, self.active)
        _, pull, carried = jax.vjp(run, *marked, has_aux=True)
        ct_consts, ct_carry, ct_xs = pull((ct_carry, Taken(*cts)))
        return Taken(ct_consts, [*carried, *ct_carry], ct_xs)


@dataclasses.dataclass(frozen=True)
class Left(Derived):
    """What is left of another one when it has been differentiated, see `settled`.

    Attributes:
        reverse: Whether in reverse mode.
    """

    reverse: bool

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        def run(*flat: Value) -> list[Value]:
            return jax.tree.leaves(self.inner(loop, *tree.unflatten(flat)))

        flat, tree = jax.tree.flatten((list(inputs), list(ends)))
        marks = [mark for flags in self.active for mark in flags]
        marks += [True] * (len(flat) - len(marks))
        traced = jax.make_jaxpr(run)(*flat)
        taken = settled(traced, tuple(marks), self.reverse)
        outs = jax.core.eval_jaxpr(taken.jaxpr, taken.consts, *flat)
        counts = len(self.const_of), len(self.end_types[0])
        return Taken(*split(outs, *counts))


def left_of(
    back: BackwardStep, forward: Step, active: Active, reverse: bool
) -> BackwardStep:
    """What is left of a backward step when it has been differentiated."""
    if not (any(map(any, active)) and has_rules(back.base.step.jaxpr)):
        return back
    return Left(back, forward, active, reverse)


@functools.lru_cache(maxsize=128)
def onward(back: BackwardStep, step: Step) -> Step:
    """The step of a forward loop that takes the cotangents of a way back along.

    Args:
        back: The backward step.
        step: The step of its forward loop. If its carry has more leaves, the way back
            is not given the first ones.

    Returns:
        A step for consts, carry and `xs` as `Pulled` has them. Its `y` are the
        cotangents of what the steps of the way back get besides.

    Raises:
        NotLinearError: If that cannot be done without knowing what is carried back.
    """
    types = step.const_types, step.carry_types, step.x_types
    lead = len(types[1]) - len(back.types[1])
    grown = _grown(types, _given(back))

    def run(ends: Ends, inputs: Inputs) -> tuple[list[Value], list[Value]]:
        pairs = [split(x, len(t)) for x, t in zip(inputs, types, strict=True)]
        (consts, carry, x), cts = ([pair[i] for pair in pairs] for i in (0, 1))
        after, _ = step(consts, carry, x)
        reverse = lambda *ends: take_one(back, (consts, carry[lead:], x), ends)
        _, pull = jax.vjp(reverse, *ends)
        ct_carried, ct_z = pull(Taken(*cts))
        return [*after, *ct_carried], ct_z

    ends = tuple(back.end_types)
    jaxpr = jax.make_jaxpr(run)(ends, grown)
    read = inputs_read(jaxpr, [True] * len(jaxpr.out_avals))
    if any(read[: sum(map(len, ends))]):
        raise NotLinearError
    return make_step(lambda *inputs: run(_zeros(ends), inputs), *grown)


def _given(back: BackwardStep) -> tuple[list[Aval], list[Aval], list[Aval]]:
    """The types of what a backward step gives, by what they come behind in `Pulled`."""
    consts, _, xs = back.types
    sums = [consts[i] for i in back.const_of]
    return sums, back.end_types[0], [xs[i] for i in back.x_of]


def _grown(types: PyTree, more: PyTree) -> PyTree:
    pairs = zip(types, more, strict=True)
    return tuple([*own, *(aval.to_ct_aval() for aval in added)] for own, added in pairs)


def _zeros(types: PyTree) -> PyTree:
    return jax.tree.map(lambda aval: instantiated(zero_tangent(aval)), types)


def there_and_back(
    back: BackwardStep, step: Step, loop: Loop, inputs: Inputs, ends: Ends
) -> Taken:
    """What a way back gives in the end: two loops for JAX to differentiate.

    It takes memory for every carry, and so it is for what cannot be had otherwise: the
    cotangents of a backward step that is not linear in what it carries back.

    Args:
        back: What the way back does to a step.
        step: The step of the forward loop.
        loop: The loop.
        inputs: Consts, the initial carry and `xs`.
        ends: What is carried back from the end, and what the steps get besides.
    """
    (consts, init, xs), (carried, zs) = inputs, ends
    xs = [jnp.moveaxis(x, axis, 0) for x, axis in zip(xs, loop.x_axes, strict=True)]
    of_one = loop.part(1)

    def move(carry: list[Value], x: list[Value]) -> tuple[list[Value], list[Value]]:
        return step(consts, carry, x)[0], carry

    def take(state: tuple[list[Value], list[Value]], at: PyTree) -> PyTree:
        carried, sums = state
        carry, x, z = at
        x = [jnp.expand_dims(e, axis) for e, axis in zip(x, loop.x_axes, strict=True)]
        z = [stack_of(e, 1) for e in z]
        taken = back(of_one, (consts, carry, x), (carried, z))
        axes = [loop.x_axes[i] for i in back.x_of]
        given = [jnp.squeeze(e, axis) for e, axis in zip(taken.xs, axes, strict=True)]
        sums = [a + b for a, b in zip(sums, taken.sums, strict=True)]
        return (taken.carried, sums), given

    every_z = list(zs)
    if loop.kept is not None:
        every = jnp.arange(loop.length, dtype=jnp.int32)
        every_z = jax.vmap(lambda index: loop.row_or_zeros(zs, index))(every)
    # The order of `xs` and of the rows is that of the steps, or the other way round.
    carry, carries = lax.scan(move, list(init), xs, loop.length, reverse=loop.reverse)
    del carry
    sums = [jnp.zeros_like(consts[i]) for i in back.const_of]
    (carried, sums), given = lax.scan(
        take,
        (list(carried), sums),
        (carries, xs, every_z),
        loop.length,
        reverse=not loop.reverse,
    )
    axes = [loop.x_axes[i] for i in back.x_of]
    return Taken(
        sums,
        carried,
        [jnp.moveaxis(x, 0, axis) for x, axis in zip(given, axes, strict=True)],
    )
