"""The backward step: what the reverse sweep does to one step.

A gradient takes two loops. The forward loop runs the step, from each carry to the next.
The reverse loop goes through the same steps from the last to the first: a
`BackwardStep` is given the carry before a step, and takes the cotangents of the carry
after the step to those of the carry before it.

The reverse loop is differentiated again for a Hessian, and then more than cotangents is
carried back (`_derived.py`). So `BackwardStep` speaks of *what is carried back* in
general.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeAlias

import jax
import jax.extend.core as jex
from jax import lax

from ..._arrays import Arrays, Flags, cotangent_types, pick, put, split, stack_of
from ..._programs import (
    aval_of,
    inputs_read,
    pruned,
    renamed,
    run,
    traced,
    with_equations,
)
from ..._types import Aval, Value
from ._forward import Active, Saveable, stored, under_policy
from ._loop import Loop
from ._step import Step
from .reversals._known_products import Products, products_of

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

    sums: list[Value]
    carried: list[Value]
    xs: list[Value]


class BackwardStep(abc.ABC):
    """Takes what is carried back past a step, or a block: a frozen dataclass."""

    @property
    @abc.abstractmethod
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        """The types of consts, of a carry, and of an element of `xs`."""

    @property
    @abc.abstractmethod
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
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
        """The gradient that it is a derivative of, or itself."""

    @property
    def takes_blocks(self) -> bool:
        """Whether it takes things back past several steps at once."""
        return False

    @property
    def joins_steps(self) -> bool:
        """Whether it has `joined`, and so steps may be reversed in a batch."""
        return False

    def joined(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        """What all steps of a block give together, without what is carried on.

        Args:
            loop: The loop over the block.
            inputs: Consts, the carry before each step, and the block's part of `xs`.
            ends: What is carried back to each step, and what it gets besides.
        """
        raise AssertionError("it takes steps back one by one")

    @property
    def products(self) -> Products | None:
        """The products of a step that are worth keeping for it, if there are any."""
        return None

    def with_products(self, products: Products) -> "BackwardStep | None":
        """The same for steps that are given products behind `x`, if it can take them.

        Args:
            products: Of its own, or of a backward step that reads no fewer.
        """
        return None

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
class Pull(BackwardStep):
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
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        return self.step.const_types, self.step.carry_types, self.step.x_types

    @property
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
        carry = cotangent_types(self.step.carry_types, self.active.carry)
        return carry, cotangent_types(self.step.y_types, self.wanted)

    @property
    def const_of(self) -> tuple[int, ...]:
        return indices(self.active.consts)

    @property
    def x_of(self) -> tuple[int, ...]:
        return indices(self.active.xs)

    @property
    def base(self) -> "Pull":
        return self

    @property
    def takes_blocks(self) -> bool:
        return True

    def mapped(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(self, step=rewrite(self.step))

    @property
    def products(self) -> Products | None:
        found = products_of(self.step)
        if found is None:
            return None
        program = program_of(self.with_products(found))
        consts, carry, x = map(len, self.types)
        read = inputs_read(program, [True] * len(program.out_avals))
        used = read[consts + carry + x :][: len(found.types)]
        # The last product of a step may only be added to what it returns.
        return found if all(used) else products_of(self.step, tuple(used))

    def with_products(self, products: Products) -> "Pull":
        xs = (*self.active.xs, *[False] * len(products.types))
        active = self.active._replace(xs=xs)
        return dataclasses.replace(self, step=products.step, active=active)

    def __call__(self, loop: Loop, inputs: Inputs, ends: Ends) -> Taken:
        run = stored if loop.length > 1 else single

        def block(*marked: Arrays) -> tuple[list[Value], list[Value]]:
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
        consts, carries, xs = inputs
        step = under_policy(self.step, self.policy)
        each = jax.vmap(step, in_axes=(None, 0, list(loop.x_axes)))

        def block(*marked: Arrays) -> tuple[list[Value], list[Value]]:
            own = map(put, (consts, xs), (self.active.consts, self.active.xs), marked)
            after, ys = each(next(own), carries, next(own))
            return pick(after, self.active.carry), pick(ys, self.wanted)

        marked = pick(consts, self.active.consts), pick(xs, self.active.xs)
        _, pull = jax.vjp(block, *marked)
        sums, ct_xs = pull(tuple(map(list, ends)))
        return Taken(sums, [], ct_xs)


@dataclasses.dataclass(frozen=True)
class Around(BackwardStep):
    """What wraps another one; it is given and gives the same, if not said otherwise.

    Attributes:
        of: The other one.
    """

    of: BackwardStep

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        return self.of.types

    @property
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
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


def single(
    step: Step, loop: Loop, policy: Saveable, consts: Arrays, init: Arrays, xs: Arrays
) -> tuple[list[Value], list[Value]]:
    """A loop of one step, without the loop."""
    x = [lax.squeeze(x, [axis]) for x, axis in zip(xs, loop.x_axes, strict=True)]
    carry, y = under_policy(step, policy)(consts, init, x)
    return carry, [stack_of(leaf, 1) for leaf in y]


def one(back: BackwardStep, inputs: Inputs, ends: Ends) -> Taken:
    """Takes things back past one step, all of them without an axis for steps."""
    (consts, carry, x), (carried, z) = inputs, ends
    outs = run(program_of(back), *consts, *carry, *x, *z, *carried)
    return Taken(*split(outs, len(back.const_of), len(carried)))


@functools.lru_cache(maxsize=256)
def program_of(back: BackwardStep) -> jex.ClosedJaxpr:
    """The backward step as a program.

    To differentiate a step takes longer than all else that is traced for a gradient. So
    it is done once, and whoever reverses single steps runs this program.

    Returns:
        A program from consts, carry, `x`, what the step gets besides, and what is
        carried back, to what is taken of it, see `Taken`.
    """
    (consts, carry, x), (carried, z) = back.types, back.end_types
    counts = len(consts), len(carry), len(x), len(z)
    loop = Loop(1, x_axes=(0,) * len(x))

    def take(*flat: Value) -> list[Value]:
        consts, carry, *rows, carried = split(flat, *counts)
        xs, zs = ([stack_of(leaf, 1) for leaf in leaves] for leaves in rows)
        taken = back(loop, (consts, carry, xs), (carried, zs))
        xs = [lax.squeeze(ct, [0]) for ct in taken.xs]
        return [*taken.sums, *taken.carried, *xs]

    program = traced(take, [*consts, *carry, *x, *z, *carried])
    return pruned(_without_rows(program))


def _without_rows(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program that reads its inputs themselves, and not the one row of a stack.

    XLA would find that they are the same. But what a step reads of its `x` need not be
    stored, and it should be seen here that it does.
    """
    jaxpr = program.jaxpr
    stacked, same = dict[jex.Var, jex.Var](), dict[jex.Var, jex.Var]()
    eqns = list[jex.JaxprEqn]()
    now = lambda x: renamed(x, same)
    for eqn in jaxpr.eqns:
        eqn = eqn.replace(invars=list(map(now, eqn.invars)))
        name, first = eqn.primitive.name, next(iter(eqn.invars), None)
        if name == "squeeze" and isinstance(first, jex.Var) and first in stacked:
            if eqn.outvars[0].aval == stacked[first].aval:
                same[eqn.outvars[0]] = stacked[first]
                continue
        elif (
            name == "broadcast_in_dim"
            and isinstance(first, jex.Var)
            and aval_of(eqn.outvars[0]).shape == (1, *aval_of(first).shape)
        ):
            stacked[eqn.outvars[0]] = first
        eqns.append(eqn)
    return with_equations(program, eqns, list(map(now, jaxpr.outvars)))


def indices(flags: Flags) -> tuple[int, ...]:
    """Where the flags are set."""
    return tuple(i for i, flag in enumerate(flags) if flag)
