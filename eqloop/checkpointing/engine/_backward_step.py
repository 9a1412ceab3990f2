"""The backward step: what the reverse sweep does to one step.

A gradient takes two loops. The forward loop runs the step, from each carry to the next.
The reverse loop goes through the same steps from the last to the first: a
`BackwardStep` is given the carry before a step, and takes the cotangents of the carry
after the step to those of the carry before it.

The reverse loop is differentiated again for a Hessian, and then more than cotangents is
carried back (`_derived.py`). So the interface speaks of `carried` in general. For a
gradient its names mean:

    consts, carry, x    inputs of the step, at the carry before it
    carried             cotangents of the carry: after the step, then before it
    z                   cotangents of the step's outputs `y`
    sums                cotangents of the consts, added up over all steps
    xs                  cotangents of `x`, a row for each step
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeAlias

import jax
import jax.extend.core as jex

from ..._arrays import (
    Arrays,
    Flags,
    SumType,
    cotangent_types,
    on_mesh_that_is_set,
    pick,
    put,
    split,
)
from ..._programs import adding_wide, inputs_read, pruned, run, traced
from ..._types import Aval, PyTree, Value
from ..steps._loop import Loop
from ..steps._step import NoWayBackError, Step, StepResult
from ._forward import Active, Saveable, stored, under_policy
from .reversals._known_products import Products, products_of

# `(consts, carry, xs)` of a block: the carry before it, and its part of `xs`.
Inputs: TypeAlias = Sequence[Arrays]
# `(carried, zs)` of a block: what was carried back to its end, and a row of `z` for
# each of its steps.
BlockEnds: TypeAlias = Sequence[Arrays]


class BlockResult(NamedTuple):
    """What the reversal of a block returns.

    Attributes:
        sums: The block's part of the sums over all steps: cotangents of consts.
        carried: What is carried on to the block before this one.
        xs: A row for each step: cotangents of `xs`.
    """

    sums: list[Value]
    carried: list[Value]
    xs: list[Value]


class BackwardStep(abc.ABC):
    """Takes cotangents, or whatever else is carried back, past a step or a block.

    A subclass is a frozen dataclass: programs are remembered by it.
    """

    @property
    @abc.abstractmethod
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        """The types of consts, of a carry, and of an element of `xs`."""

    @property
    @abc.abstractmethod
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
        """The types of `carried`, and of the `z` of a step."""

    @property
    @abc.abstractmethod
    def const_of(self) -> tuple[int, ...]:
        """For each of the `sums`, the const whose type it has."""

    @property
    @abc.abstractmethod
    def x_of(self) -> tuple[int, ...]:
        """For each of the returned `xs`, the leaf of the inputs whose type it has."""

    @property
    @abc.abstractmethod
    def base(self) -> "Pull":
        """The gradient that this is a derivative of; a `Pull` is its own base."""

    @property
    def takes_blocks(self) -> bool:
        """Whether it can be called for several steps at once."""
        return False

    @property
    def joins_steps(self) -> bool:
        """Whether it has `joined`, so that steps can be reversed together."""
        return False

    def joined(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        """The `sums` and `xs` of a batch of steps, computed at once.

        It gets the carry before each step, and the `carried` after each.
        """
        # `carried` is empty in the result: that part has to go from step to step, and
        # has been computed before (`reversals/_together.py`).
        raise AssertionError("it takes steps back one by one")

    @property
    def products(self) -> Products | None:
        """The products in the step that are worth keeping, `None` if there are none."""
        return None

    def with_products(self, products: Products) -> "BackwardStep":
        """This backward step, given these of its own products behind `x`."""
        raise AssertionError("it has no products")

    @abc.abstractmethod
    def with_steps(self, rewrite: Callable[[Step], Step]) -> Self:
        """This backward step of rewritten steps, whose types are the same."""

    def block(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        """Goes back past all steps of a block at once, if it `takes_blocks`.

        It gets the carry before the block, and the `carried` after it.
        """
        raise AssertionError("it takes steps back one by one")

    @abc.abstractmethod
    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        """Goes back past a single step; `x`, `z` and what it returns have no rows."""


@dataclasses.dataclass(frozen=True)
class Pull(BackwardStep):
    """The backward step of a gradient: JAX's own `vjp` of a step or a block.

    Attributes:
        step: The step.
        policy: Which residuals of a step may be stored.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
        sums: The type of sums of narrower floats, see `adding_wide`.
    """

    step: Step
    policy: Saveable
    active: Active
    wanted: Flags
    sums: SumType

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

    def with_steps(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(self, step=rewrite(self.step))

    @property
    def products(self) -> Products | None:
        candidates = products_of(self.step)
        if candidates is None:
            return None
        program = program_of(self.with_products(candidates))
        consts, carry, x = map(len, self.types)
        read = inputs_read(program, [True] * len(program.out_avals))
        used = read[consts + carry + x :][: len(candidates.types)]
        # The reversal need not read all of them: a product that is only added to an
        # output has no influence on any derivative.
        return candidates if all(used) else products_of(self.step, tuple(used))

    def with_products(self, products: Products) -> "Pull":
        # The values behind `x` are not differentiated: the step takes derivatives
        # through what they are computed from.
        xs = (*self.active.xs, *[False] * len(products.types))
        active = self.active._replace(xs=xs)
        return dataclasses.replace(self, step=products.step, active=active)

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        return self.with_outputs(inputs, ends)[1]

    def with_outputs(
        self, inputs: Inputs, ends: BlockEnds
    ) -> tuple[StepResult, BlockResult]:
        """What the step returns, the carry and `y`, and what going back returns."""
        return self._pulled(under_policy(self.step, self.policy), inputs, ends)

    def block(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        run = functools.partial(stored, self.step, loop, self.policy)
        return self._pulled(run, inputs, ends)[1]

    def _pulled(
        self, run: Callable[..., StepResult], inputs: Inputs, ends: BlockEnds
    ) -> tuple[StepResult, BlockResult]:
        # `marked` has the active inputs in three groups, as `inputs` has all of them.
        def of_marked(*marked: Arrays) -> tuple[PyTree, PyTree]:
            last, ys = run(*map(put, inputs, self.active, marked))
            moving = pick(last, self.active.carry), pick(ys, self.wanted)
            return moving, (last, ys)

        marked = list(map(pick, inputs, self.active))
        # JAX runs the block here, and its residuals live until `pull`: never those of
        # more than one block. What is not marked is closed over, and so JAX computes no
        # cotangents of it.
        _, pull, outputs = jax.vjp(of_marked, *marked, has_aux=True)
        pull = adding_wide(pull, self.step.jaxpr, self.sums)
        try:
            cts = pull(tuple(map(list, ends)))
        except ValueError as error:
            # A `lax.while_loop` in the step, for example. The way back may turn out not
            # to need it, once it is known which outputs have a cotangent.
            raise NoWayBackError.of(error) from error.__cause__
        pairs = zip(cts, marked, strict=True)
        return outputs, BlockResult(
            *(list(map(on_mesh_that_is_set, *pair)) for pair in pairs)
        )

    @property
    def joins_steps(self) -> bool:
        return True

    def joined(self, loop: Loop, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        # The cotangent of a weight is that of the batch of steps: one product of
        # matrices, instead of an outer product that each step adds. The carries are not
        # among what is differentiated, so none of their cotangents are computed.
        consts, carries, xs = inputs
        step = under_policy(self.step, self.policy)
        # Consts are not batched, so the transpose of this `vmap` adds up over the steps
        # by itself.
        each = jax.vmap(step, in_axes=(None, 0, list(loop.x_axes)))

        def block(*marked: Arrays) -> tuple[list[Value], list[Value]]:
            own = map(put, (consts, xs), (self.active.consts, self.active.xs), marked)
            after, ys = each(next(own), carries, next(own))
            return pick(after, self.active.carry), pick(ys, self.wanted)

        marked = pick(consts, self.active.consts), pick(xs, self.active.xs)
        _, pull = jax.vjp(block, *marked)
        pull = adding_wide(pull, self.step.jaxpr, self.sums)
        sums, ct_xs = pull(tuple(map(list, ends)))
        return BlockResult(sums, [], ct_xs)


@dataclasses.dataclass(frozen=True)
class WrappedStep(BackwardStep):
    """A wrapper of another backward step, with the same types unless it overrides them.

    Attributes:
        inner: The other one.
    """

    inner: BackwardStep

    @property
    def types(self) -> tuple[list[Aval], list[Aval], list[Aval]]:
        return self.inner.types

    @property
    def end_types(self) -> tuple[list[Aval], list[Aval]]:
        return self.inner.end_types

    @property
    def const_of(self) -> tuple[int, ...]:
        return self.inner.const_of

    @property
    def x_of(self) -> tuple[int, ...]:
        return self.inner.x_of

    @property
    def base(self) -> Pull:
        return self.inner.base

    def with_steps(self, rewrite: Callable[[Step], Step]) -> Self:
        return dataclasses.replace(self, inner=self.inner.with_steps(rewrite))


def take_one(back: BackwardStep, inputs: Inputs, ends: BlockEnds) -> BlockResult:
    """Goes back past a single step; `x` and `z` have no axis for steps."""
    (consts, carry, x), (carried, z) = inputs, ends
    outs = run(program_of(back), *consts, *carry, *x, *z, *carried)
    return BlockResult(*split(outs, len(back.const_of), len(carried)))


@functools.lru_cache(maxsize=256)
def program_of(back: BackwardStep) -> jex.ClosedJaxpr:
    """The backward step for a single step, as a program to `[*sums, *carried, *xs]`.

    Its inputs are `[*consts, *carry, *x, *z, *carried]`.
    """
    # Differentiating a step takes longer than everything else that is traced for a
    # gradient. So it is done once, and all who reverse single steps run this program.
    return _traced_for_one(back, lambda *step: _flat(back(*step)))


@functools.lru_cache(maxsize=128)
def program_with_outputs(back: Pull) -> jex.ClosedJaxpr:
    """`program_of` with `[*carry, *y]` first: both ways past a step share work."""

    def take(*step: PyTree) -> list[Value]:
        outputs, taken = back.with_outputs(*step)
        return [*_flat(outputs), *_flat(taken)]

    return _traced_for_one(back, take)


def _traced_for_one(
    back: BackwardStep, take: Callable[[PyTree, PyTree], list[Value]]
) -> jex.ClosedJaxpr:
    """A program from `[*consts, *carry, *x, *z, *carried]`, which calls `take`."""
    (consts, carry, x), (carried, z) = back.types, back.end_types
    counts = len(consts), len(carry), len(x), len(z)

    def of_step(*flat: Value) -> list[Value]:
        *inputs, z, carried = split(flat, *counts)
        return take(inputs, (carried, z))

    return pruned(traced(of_step, [*consts, *carry, *x, *z, *carried]))


def _flat(groups: Sequence[Sequence[Value]]) -> list[Value]:
    return [value for group in groups for value in group]


def indices(flags: Flags) -> tuple[int, ...]:
    """Where the flags are set."""
    return tuple(i for i, flag in enumerate(flags) if flag)
