"""The backward step: what the reverse sweep does to one step.

A gradient takes two loops. The forward loop runs the step, from each carry to the next.
The reverse loop goes through the same steps from the last to the first: a
`BackwardStep` is given the carry before a step, and takes the cotangents of the carry
after the step to those of the carry before it.

The reverse loop is differentiated again for a Hessian, and then more than cotangents is
carried back (`_derived.py`). So we speak of `carried` in general. For a gradient the
names mean:

    consts, carry, x    inputs of the step, at the carry before it
    carried             cotangents of the carry: after the step, then before it
    z                   cotangents of the step's outputs `y`
    sums                cotangents of the consts, added up over all steps
    xs                  cotangents of `x`, a row for each step

A backward step is that of a gradient, and a list of changes. What runs is a program,
`Back`, and each change makes another program of it: in forward mode, in reverse mode,
or one that reads fewer leaves of the carry.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

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
    stack_type,
)
from ..._programs import adding_wide, pruned, run, traced
from ..._types import Aval, PyTree, Value
from ..steps._loop import Loop
from ..steps._step import NoWayBackError, Step
from ._forward import Active, Saveable, stored, under_policy

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


@dataclasses.dataclass(frozen=True)
class Back:
    """The way back past a step, a block or a batch of steps, as a program.

    Attributes:
        program: From `[*consts, *carry, *x, *z, *carried]` to `[*sums, *carried, *xs]`.
        counts: How many inputs are in each of these groups but the last.
        const_of: For each of the `sums`, the const whose type it has.
        x_of: For each of the returned `xs`, the leaf of `x` whose type it has.
        is_batch: Whether it gets the carry before each of its steps, and the `carried`
            after each. It returns no `carried`: that has to go from step to step, and
            has been computed before (`reversals/_together.py`).
    """

    program: jex.ClosedJaxpr
    counts: tuple[int, ...]
    const_of: tuple[int, ...] = ()
    x_of: tuple[int, ...] = ()
    is_batch: bool = False

    @property
    def types(self) -> tuple[list[Aval], ...]:
        """The types of its inputs, in five groups."""
        return split(self.program.in_avals, *self.counts)

    @property
    def outs(self) -> tuple[int, int]:
        """How many `sums` and how many leaves of `carried` are among its outputs."""
        count = len(self.program.out_avals)
        return len(self.const_of), count - len(self.const_of) - len(self.x_of)

    def __call__(self, inputs: Inputs, ends: BlockEnds) -> BlockResult:
        (consts, carry, x), (carried, z) = inputs, ends
        outs = run(self.program, *consts, *carry, *x, *z, *carried)
        return BlockResult(*split(outs, *self.outs))


@dataclasses.dataclass(frozen=True)
class BackwardStep:
    """Takes cotangents, or whatever else is carried back, past steps.

    Attributes:
        step: The step.
        policy: Which residuals of a step may be stored.
        active: Which inputs are differentiated.
        wanted: Which leaves of `y` have a cotangent.
        sums: The type of sums of narrower floats, see `adding_wide`.
        changes: What was made of the gradient: functions from one `Back` to another,
            each with what else it is given.
        takes_blocks: Whether it can go back past several steps at once.
        joins_steps: Whether it can be that of a batch, see `Back`.
    """

    step: Step
    policy: Saveable
    active: Active
    wanted: Flags
    sums: SumType
    changes: tuple[tuple[Any, ...], ...] = ()
    takes_blocks: bool = dataclasses.field(default=True, compare=False)
    joins_steps: bool = dataclasses.field(default=True, compare=False)

    def changed(
        self,
        change: Callable[..., Back],
        *args: Any,
        takes_blocks: bool = False,
        joins_steps: bool = False,
    ) -> Self:
        """This backward step after one more change, which may be one of blocks, too."""
        return dataclasses.replace(
            self,
            changes=(*self.changes, (change, *args)),
            takes_blocks=self.takes_blocks and takes_blocks,
            joins_steps=self.joins_steps and joins_steps,
        )

    def with_steps(self, rewrite: Callable[[Step], Step]) -> Self:
        """This backward step of rewritten steps, whose types are the same."""
        of = lambda x: rewrite(x) if isinstance(x, Step) else x
        changes = tuple(tuple(map(of, change)) for change in self.changes)
        return dataclasses.replace(self, step=rewrite(self.step), changes=changes)

    def of(self, back: Back) -> Back:
        """What its changes make of a way back of the gradient."""
        return functools.reduce(lambda b, c: c[0](b, *c[1:]), self.changes, back)

    @property
    def one(self) -> Back:
        """The way back past a single step; `x`, `z` and `xs` have no rows."""
        return past(self, None, False)


@functools.lru_cache(maxsize=256)
def past(back: BackwardStep, block: Loop | None, is_batch: bool) -> Back:
    """The way back past a single step, or past all steps of a block or of a batch."""
    # No defaults: `lru_cache` takes one that is left out for another argument.
    # Differentiating a step takes longer than everything else that is traced for a
    # gradient. So it is done once, and all who reverse single steps run this program.
    # A loop in several nests has blocks of the same size in each of them.
    if back.changes:
        gradient = dataclasses.replace(back, changes=())
        return back.of(past(gradient, block, is_batch))
    active, program = back.active, pruned(_differentiated(back, block, is_batch))
    step, of = back.step, (indices(active.consts), indices(active.xs))
    counts = step.num_consts, step.num_carry, len(step.x_types), sum(back.wanted)
    return Back(program, counts, *of, is_batch)


@functools.lru_cache(maxsize=128)
def program_with_outputs(back: BackwardStep) -> jex.ClosedJaxpr:
    """The program of a `Back` with `[*carry, *y]` first: both ways share work."""
    return pruned(_differentiated(back, has_outputs=True))


def _differentiated(
    back: BackwardStep,
    block: Loop | None = None,
    is_batch: bool = False,
    has_outputs: bool = False,
) -> jex.ClosedJaxpr:
    """JAX's own `vjp` of a step, a block or a batch, as a program."""
    step, active = back.step, back.active
    consts, carry, x = step.const_types, step.carry_types, step.x_types
    carried = cotangent_types(carry, active.carry)
    z = cotangent_types(step.y_types, back.wanted)
    counts = len(consts), len(carry), len(x), len(z)
    take, moving = under_policy(step, back.policy), active
    if block is not None:
        axes = block.x_axes[: len(x)]
        block = dataclasses.replace(block, x_axes=axes)
        x = [stack_type(aval, block.length, a) for aval, a in zip(x, axes, strict=True)]
        z = [stack_type(aval, block.length) for aval in z]
        take = functools.partial(stored, step, block, back.policy)
    if block is not None and is_batch:
        # The cotangent of a weight is that of the batch of steps: one product of
        # matrices, instead of an outer product that each step adds. Consts are not
        # batched, so the transpose of this `vmap` adds up over the steps by itself.
        # The carries are not differentiated: none of their cotangents are computed.
        each = under_policy(step, back.policy)
        take = jax.vmap(each, in_axes=(None, 0, list(block.x_axes)))
        moving = active._replace(carry=(False,) * len(carry))
        carry, carried = (
            [stack_type(aval, block.length) for aval in group]
            for group in (carry, carried)
        )

    def differentiate(*flat: Value) -> list[Value]:
        *inputs, z, carried = split(flat, *counts)

        # `marked` has the active inputs in three groups, as `inputs` has all of them.
        def of_marked(*marked: Arrays) -> tuple[PyTree, PyTree]:
            last, ys = take(*map(put, inputs, moving, marked))
            return (pick(last, active.carry), pick(ys, back.wanted)), [*last, *ys]

        marked = list(map(pick, inputs, moving))
        # JAX runs the block here, and its residuals live until `pull`: never those of
        # more than one block. What is not marked is closed over, and so JAX computes no
        # cotangents of it.
        _, pull, outputs = jax.vjp(of_marked, *marked, has_aux=True)
        pull = adding_wide(pull, step.jaxpr, back.sums)
        try:
            cts = pull((carried, z))
        except ValueError as error:
            # A `lax.while_loop` in the step, for example. The way back may turn out not
            # to need it, once it is known which outputs have a cotangent.
            raise NoWayBackError.of(error) from error.__cause__
        cts = map(on_mesh_that_is_set, _flat(cts), _flat(marked))
        return [*(outputs if has_outputs else ()), *cts]

    return traced(differentiate, [*consts, *carry, *x, *z, *carried])


def _flat(groups: Sequence[Sequence[Value]]) -> list[Value]:
    return list(itertools.chain(*groups))


def indices(flags: Flags) -> tuple[int, ...]:
    """Where the flags are set."""
    return tuple(i for i, flag in enumerate(flags) if flag)
