"""What the reversal of a step does, and the derivatives of that.

A gradient is a loop there and a loop back. On the way there a step makes one carry of
another. On the way back a `Back`, given such a carry, takes what is carried back past
the step: for a gradient, the cotangents of the carry. The derivative of this is a loop
there and a loop back again:

- In forward mode the carry takes its tangent along, there as well as back.
- In reverse mode what is carried back has a cotangent, and that goes there. It goes
  along with the carry, since a reversal is linear in what it carries back. Only a
  custom rule of the user can be otherwise. The way back is that of before, with the
  cotangents of the carry.

The symmetry of second derivatives would make this shorter, but the derivatives that
custom rules define need not have it.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp

from ..._partition import Arrays, Flags, pick, put, split
from ..._programs import has_rules, inputs_read, pruned, settled, traced
from ..._tangents import instantiated, zero_tangent
from ._forward import Active, Saveable, single, stored
from ._loop import Loop, stack_of
from ._step import Step, make_step

# Consts, a carry, and the elements of `xs`.
Inputs: TypeAlias = Sequence[Arrays]
# What has been carried back to a block, and what its steps get besides, along the
# leading axis: the cotangents of their outputs.
Ends: TypeAlias = Sequence[Arrays]


class Taken(NamedTuple):
    """What the reversal of a block gives.

    Attributes:
        sums: What is summed up over all steps: cotangents of consts.
        carried: What is carried on, to the block before.
        xs: What each step has of its own: cotangents of `xs`.
    """

    sums: list[Any]
    carried: list[Any]
    xs: list[Any]


class NotLinearError(Exception):
    """A reversal is not linear in what it carries back."""


class Back(abc.ABC):
    """Takes what is carried back past a block of steps: a frozen dataclass."""

    @property
    @abc.abstractmethod
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The types of consts, of a carry, and of an element of `xs`."""

    @property
    @abc.abstractmethod
    def end_types(self) -> tuple[list[Any], list[Any]]:
        """The types of what is carried back, and of what a step gets besides."""

    @property
    @abc.abstractmethod
    def const_of(self) -> tuple[int, ...]:
        """The const of which each of the `sums` has the type."""

    @property
    @abc.abstractmethod
    def x_of(self) -> tuple[int, ...]:
        """The leaf of `xs` of which each of those given has the type."""

    @property
    @abc.abstractmethod
    def base(self) -> "Pull":
        """What all of it is derived from."""

    @property
    def takes_blocks(self) -> bool:
        """Whether it takes things back past several steps at once."""
        return False

    @property
    def joins_steps(self) -> bool:
        """Whether it has `joined`."""
        return False

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        """What all steps of a block give together, without what is carried on.

        Args:
            loop: The loop over the block.
            inputs: Consts, the carry before each step, and the block's part of `xs`.
            ends: What is carried back to each step, and what it gets besides.
        """
        raise AssertionError("it takes steps back one by one")

    @abc.abstractmethod
    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        """The same for steps that are rewritten, and of the same types."""

    @abc.abstractmethod
    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        """Takes it back past the steps of `loop`: past one, unless it `takes_blocks`.

        Args:
            loop: The loop over the block.
            inputs: Consts, the carry before the block, and its elements of `xs`.
            ends: What has been carried back, and what its steps get besides.
        """


@dataclasses.dataclass(frozen=True)
class Pull(Back):
    """Cotangents of active inputs: what JAX makes of a block of steps.

    Attributes:
        step: The step.
        policy: Which residuals of a step may be stored.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
    """

    step: Step
    policy: Saveable
    active: Active
    wanted: Flags

    @property
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.step.const_types, self.step.carry_types, self.step.x_types

    @property
    def end_types(self) -> tuple[list[Any], list[Any]]:
        carry = pick(self.step.carry_types, self.active.carry)
        return _ct_types(carry), _ct_types(pick(self.step.y_types, self.wanted))

    @property
    def const_of(self) -> tuple[int, ...]:
        return _indices(self.active.consts)

    @property
    def x_of(self) -> tuple[int, ...]:
        return _indices(self.active.xs)

    @property
    def base(self) -> "Pull":
        return self

    @property
    def takes_blocks(self) -> bool:
        return True

    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(self, step=rewrite(self.step))

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        run = stored if loop.length > 1 else single

        def block(*marked: Arrays) -> tuple[list[Any], list[Any]]:
            merged = map(put, inputs, self.active, marked)
            last, ys = run(self.step, loop, self.policy, *merged)
            return pick(last, self.active.carry), pick(ys, self.wanted)

        _, pull = jax.vjp(block, *map(pick, inputs, self.active))
        return Taken(*pull(tuple(map(list, ends))))

    @property
    def joins_steps(self) -> bool:
        return True

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        # The cotangents of what all steps share are those of the batch of steps: one
        # product of matrices, where step by step each would add an outer product.
        step, (consts, carries, xs) = self.step, inputs
        if self.policy is not None:
            step = jax.checkpoint(step, policy=self.policy)
        each = jax.vmap(step, in_axes=(None, 0, list(loop.x_axes)))

        def block(*marked: Arrays) -> tuple[list[Any], list[Any]]:
            own = map(put, (consts, xs), (self.active.consts, self.active.xs), marked)
            after, ys = each(next(own), carries, next(own))
            return pick(after, self.active.carry), pick(ys, self.wanted)

        marked = pick(consts, self.active.consts), pick(xs, self.active.xs)
        _, pull = jax.vjp(block, *marked)
        sums, ct_xs = pull(tuple(map(list, ends)))
        return Taken(sums, [], ct_xs)


@dataclasses.dataclass(frozen=True)
class Around(Back):
    """What wraps another one; it is given and gives the same, if not said otherwise.

    Attributes:
        of: The other one.
    """

    of: Back

    @property
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.of.types

    @property
    def end_types(self) -> tuple[list[Any], list[Any]]:
        return self.of.end_types

    @property
    def const_of(self) -> tuple[int, ...]:
        return self.of.const_of

    @property
    def x_of(self) -> tuple[int, ...]:
        return self.of.x_of

    @property
    def base(self) -> Pull:
        return self.of.base

    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(self, of=self.of.mapped(rewrite))


@dataclasses.dataclass(frozen=True)
class Derived(Around):
    """What is derived from another one.

    Attributes:
        forward: The step of its loop there, without outputs.
        active: Which of the inputs of its loop are differentiated.
    """

    forward: Step
    active: Active

    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(
            super().mapped(rewrite), forward=rewrite(self.forward)
        )

    def _open(
        self, loop: Loop, inputs: Inputs
    ) -> tuple[Loop, list[list[Any]], list[list[Any]]]:
        """The loop and the inputs of the other one, and what follows upon these."""
        pairs = [split(x, len(t)) for x, t in zip(inputs, self.of.types, strict=True)]
        own, more = ([pair[i] for pair in pairs] for i in (0, 1))
        return _over(loop, own[2]), own, more


@dataclasses.dataclass(frozen=True)
class Pushed(Derived):
    """The same with tangents.

    Active consts, leaves of the carry and of `xs` have their tangents behind them; so
    do all that are carried back, and all that is given.
    """

    @property
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        return _grown(self.of.types, map(pick, self.of.types, self.active))

    @property
    def end_types(self) -> tuple[list[Any], list[Any]]:
        carried, z = self.of.end_types
        return [*carried, *carried], [*z, *z]

    @property
    def const_of(self) -> tuple[int, ...]:
        return self.of.const_of * 2

    @property
    def x_of(self) -> tuple[int, ...]:
        return self.of.x_of * 2

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        return self._pushed(self.of, loop, inputs, ends)

    @property
    def joins_steps(self) -> bool:
        return self.of.joins_steps

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        return self._pushed(self.of.joined, loop, inputs, ends)

    def _pushed(
        self, take: Callable[..., Taken], loop: Loop, inputs: Inputs, ends: Ends
    ) -> Taken:
        loop, inputs, dots = self._open(loop, inputs)
        pairs = [split(e, len(e) // 2) for e in ends]
        ends, ends_dot = ([pair[i] for pair in pairs] for i in (0, 1))

        def run(marked: list[Any], ends: list[Any]) -> Taken:
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
    def types(self) -> tuple[list[Any], list[Any], list[Any]]:
        return _grown(self.of.types, _given(self.of))

    @property
    def end_types(self) -> tuple[list[Any], list[Any]]:
        carried, z = self.of.end_types
        carry = pick(self.of.types[1], self.active.carry)
        return [*carried, *_ct_types(carry)], z

    @property
    def const_of(self) -> tuple[int, ...]:
        return _indices(self.active.consts)

    @property
    def x_of(self) -> tuple[int, ...]:
        return _indices(self.active.xs)

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        loop, inputs, cts = self._open(loop, inputs)
        carried, z = ends
        carried, ct_carry = split(carried, len(self.of.end_types[0]))

        def run(*marked: Arrays) -> tuple[Any, list[Any]]:
            merged = list(map(put, inputs, self.active, marked))
            last, _ = single(self.forward, loop, None, *merged)
            taken = self.of(loop, merged, (carried, z))
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
        def run(*flat: Any) -> list[Any]:
            return jax.tree.leaves(self.of(loop, *tree.unflatten(flat)))

        flat, tree = jax.tree.flatten((list(inputs), list(ends)))
        marks = [mark for flags in self.active for mark in flags]
        marks += [True] * (len(flat) - len(marks))
        traced = jax.make_jaxpr(run)(*flat)
        taken = settled(traced, tuple(marks), self.reverse)
        outs = jax.core.eval_jaxpr(taken.jaxpr, taken.consts, *flat)
        counts = len(self.const_of), len(self.end_types[0])
        return Taken(*split(outs, *counts))


def left_of(back: Back, forward: Step, active: Active, reverse: bool) -> Back:
    """What is left of a reversal when it has been differentiated."""
    if not (any(map(any, active)) and has_rules(back.base.step.jaxpr)):
        return back
    return Left(back, forward, active, reverse)


@functools.lru_cache(maxsize=128)
def onward(back: Back, step: Step, loop: Loop) -> Step:
    """The step of the loop that takes the cotangents of a reversal there.

    Args:
        back: The reversal.
        step: The step of its loop there. If its carry has more leaves, the first ones
            are not for the reversal.
        loop: The loop.

    Returns:
        A step for consts, carry and `xs` as `Pulled` has them. Its `y` are the
        cotangents of what the steps of the way back get besides.

    Raises:
        NotLinearError: If that cannot be done without knowing what is carried back.
    """
    types = step.const_types, step.carry_types, step.x_types
    lead = len(types[1]) - len(back.types[1])
    grown = _grown(types, _given(back))

    def run(ends: Ends, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        pairs = [split(x, len(t)) for x, t in zip(inputs, types, strict=True)]
        (consts, carry, x), cts = ([pair[i] for pair in pairs] for i in (0, 1))
        after, _ = step(consts, carry, x)
        reverse = lambda *ends: one(back, loop, (consts, carry[lead:], x), ends)
        _, pull = jax.vjp(reverse, *ends)
        ct_carried, ct_z = pull(Taken(*cts))
        return [*after, *ct_carried], ct_z

    ends = tuple(back.end_types)
    jaxpr = jax.make_jaxpr(run)(ends, grown)
    read = inputs_read(jaxpr, [True] * len(jaxpr.out_avals))
    if any(read[: sum(map(len, ends))]):
        raise NotLinearError
    return make_step(lambda *inputs: run(_zeros(ends), inputs), *grown)


def one(back: Back, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
    """A reversal of one step, of which all is given without an axis for steps."""
    (consts, carry, x), (carried, z) = inputs, ends
    loop = _over(loop.part(1), x)
    xs = list(map(jnp.expand_dims, x, loop.x_axes))
    zs = [stack_of(leaf, 1) for leaf in z]
    taken = back(loop, (consts, carry, xs), (list(carried), zs))
    axes = [loop.x_axes[i] for i in back.x_of]
    return taken._replace(xs=list(map(jnp.squeeze, taken.xs, axes)))


@functools.lru_cache(maxsize=256)
def program_of(back: Back, loop: Loop) -> jex.ClosedJaxpr:
    """The reversal of one step as a program.

    Returns:
        A program from consts, carry, `x`, what the step gets besides, and what is
        carried back, to what is taken of it, see `Taken`.
    """
    (consts, carry, x), (carried, z) = back.types, back.end_types
    counts = len(consts), len(carry), len(x), len(z)

    def take(*flat: Any) -> list[Any]:
        *inputs, z, carried = split(flat, *counts)
        taken = one(back, loop, inputs, (carried, z))
        return [*taken.sums, *taken.carried, *taken.xs]

    return pruned(traced(take, [*consts, *carry, *x, *z, *carried]))


def _over(loop: Loop, xs: Arrays) -> Loop:
    """The loop over the first of its `xs`."""
    return dataclasses.replace(loop, x_axes=loop.x_axes[: len(xs)])


def _given(back: Back) -> tuple[list[Any], list[Any], list[Any]]:
    """The types of what a reversal gives, by what they follow upon in `Pulled`."""
    consts, _, xs = back.types
    sums = [consts[i] for i in back.const_of]
    return sums, back.end_types[0], [xs[i] for i in back.x_of]


def _grown(types: Any, more: Any) -> Any:
    return tuple([*t, *_ct_types(m)] for t, m in zip(types, more, strict=True))


def _ct_types(avals: Any) -> list[Any]:
    return [aval.to_ct_aval() for aval in avals]


def _zeros(types: Any) -> Any:
    return jax.tree.map(lambda aval: instantiated(zero_tangent(aval)), types)


def _indices(flags: Flags) -> tuple[int, ...]:
    return tuple(i for i, flag in enumerate(flags) if flag)
