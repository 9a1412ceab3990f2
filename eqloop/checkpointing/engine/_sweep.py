"""A reverse sweep: takes cotangents back through a whole loop, block by block.

Three others say how. An order decides which steps are run again and which block is next
(`_order.py`), a reversal how a block is taken back (`_block_reversals.py`), and a
backward step what is done to a step (`_backward_step.py`). A sweep is what they all
work with.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, over_examples, stack_of, where_run
from ..._types import Index, Value
from ._backward_step import BackwardStep, Taken, one
from ._forward import iterate
from ._in_place import run_in_place
from ._layout import Layout
from ._loop import Loop, opaque, part, put_part, zero
from ._step import Step
from .reversals._block_reversals import AbstractReversal, carries_within, one_by_one
from .reversals._known_products import KnownProducts
from .slots._slots import DeviceSlots, StoredSteps

_least = over_examples(jnp.min)


@dataclasses.dataclass
class Cotangents:
    """What a reverse sweep carries along, see `Taken`."""

    consts: list[Value]
    carry: list[Value]
    xs: list[Value]


jax.tree_util.register_dataclass(
    Cotangents, data_fields=["consts", "carry", "xs"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A reverse sweep: all that stays the same while it runs.

    Attributes:
        step: The step, to advance by.
        loop: The loop around it.
        back: What is done to a step.
        reversal: How a block is taken back.
        zs: What the blocks get besides: the cotangents of `ys`.
        products: Those of the last steps, if they are known.
        count: How many steps were run, if not all that the loop may have.
        own: The same, where each example of a batch ran as many as it needed: then the
            count is that of the one that ran most.
        first: The position in the loop from which positions count; `None` if that is
            its start.
    """

    step: Step
    loop: Loop
    back: BackwardStep
    reversal: AbstractReversal
    consts: Arrays
    xs: Arrays
    zs: Arrays
    products: KnownProducts | None = None
    count: Index | None = None
    own: Value = None
    first: Index | None = None

    def run(self, layout: Layout, slots: Arrays, ct_carry: Arrays) -> Cotangents:
        """Takes the cotangents of the outputs back to those of the inputs.

        Args:
            layout: How the loop was stored.
            slots: The carries that were stored.
            ct_carry: The cotangents of the active leaves of the final carry.
        """
        order = layout.order.by_carries()
        sweep = self if order.is_flat else self.opaque()
        cts = sweep.start(ct_carry)
        carries = layout.slots.holding(slots, self.step.carry_types)
        return layout.slots.released(slots, order.reverse(sweep, carries, cts))

    def opaque(self) -> "Sweep":
        """The same for loops in loops: what they read is not known to be repeated."""
        return dataclasses.replace(
            self,
            consts=opaque(self.consts),
            xs=opaque(self.xs),
            zs=opaque(self.zs),
        )

    def start(self, ct_carry: Arrays) -> Cotangents:
        """What there is at the end of the loop, given what is carried back from it."""
        return Cotangents(
            [jnp.zeros_like(self.consts[i]) for i in self.back.const_of],
            list(ct_carry),
            [jnp.zeros_like(self.xs[i]) for i in self.back.x_of],
        )

    @property
    def multiplying(self) -> "Sweep":
        """The same for steps whose products are not known."""
        return dataclasses.replace(self, products=None)

    def part(self, start: Index) -> "Sweep":
        """The same for the steps from a position on, which they count from."""
        left = lambda count: None if count is None else count - start
        return dataclasses.replace(
            self,
            first=self.position(start),
            count=left(self.count),
            own=left(self.own),
        )

    @property
    def steps(self) -> Index:
        """How many steps are reversed."""
        return self.loop.length if self.count is None else self.count

    def position(self, start: Index) -> Index:
        """Where in the loop a position of these steps is."""
        return start if self.first is None else self.first + start

    # Steps that are run again.

    def advance(self, carry: Arrays, start: Index, count: int) -> list[Value]:
        """The carry `count` steps after `start`; the count is static."""
        if count == 1:
            return self.next(carry, start)
        body = lambda i, carry: self.next(carry, start + i)
        unroll = min(self.loop.unroll, count)
        return lax.fori_loop(0, count, body, list(carry), unroll=unroll)

    def advance_to(self, carry: Arrays, start: Index, stop: Index) -> list[Value]:
        """The carry at the position `stop`; both positions are dynamic."""

        def move(state: tuple[Value, list[Value]]) -> tuple[Value, list[Value]]:
            position, carry = state
            return position + 1, self.next(carry, position)

        left = lambda state: stop - state[0]
        return iterate(move, (start, list(carry)), left, self.loop.unroll)[1]

    def next(self, carry: Arrays, position: Index) -> list[Value]:
        """The carry after the step at a position."""
        position = self.position(position)
        x = self.loop.x(self.xs, position)
        if self.products is None:
            return self.step(self.consts, carry, x)[0]
        x = [*x, *self.products.of_step(position)]
        return self.products.step(self.consts, carry, x)[0]

    def previous(self, carry: Arrays, position: Index) -> list[Value]:
        """The carry before the step at a position, from the one after it."""
        x = self.loop.x(self.xs, self.position(position))
        return self.step.before(self.consts, carry, x)

    # Steps that are reversed.

    def pull(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Reverses a block of `count` steps, given the carry before it."""
        if count == 1 or self.count is None:
            return self.reversal(self, carry, start, count, cts)
        # Loops of at most one iteration, as a branch would copy the cotangents of `xs`.
        is_whole = (self.common(start, count) == count).astype(jnp.int32)
        whole = lambda _, cts: self.reversal(self, carry, start, count, cts)
        cts = lax.fori_loop(0, is_whole, whole, cts)
        left = jnp.where(is_whole, 0, jnp.clip(self.count - start, 0, count))
        carries = carries_within(self, DeviceSlots(), carry, start, left, count)
        steps = StoredSteps(carries, 0, start, left, count)
        return one_by_one(self, steps, cts)

    def pull_first(self, carry: Arrays, count: int, cts: Cotangents) -> Cotangents:
        """Reverses the first `count` steps, given the initial carry, if any was run."""

        def pull(i: Index, cts: Cotangents) -> Cotangents:
            # Behind a barrier with the index the carry is not the same in each
            # iteration, as far as XLA can see. So it evaluates the steps in the loop,
            # and does not keep all that their reversal needs from before it.
            start, *held = lax.optimization_barrier([i, *carry])
            return self.pull(held, start, count, cts)

        if self.count is None:
            return self.pull(carry, zero(), count, cts)
        # A loop, as a branch would copy the cotangents.
        return lax.fori_loop(0, jnp.clip(self.count, 0, 1), pull, cts)

    def common(self, start: Index, count: Index) -> Value:
        """How many of `count` steps from a position on were run by all examples."""
        if self.own is None:
            return count
        return jnp.clip(_least(self.own) - start, 0, count)

    def take(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past `count` steps by the `BackwardStep`."""
        if count == 1:
            return self._take_one(carry, start, cts)
        at, xs, zs = self.block(start, count)
        inputs, ends = (self.consts, carry, xs), (cts.carry, zs)
        back = functools.partial(self.back, self.loop.part(count))
        taken = run_in_place(self.back.base.step.jaxpr, back, inputs, ends)
        return self.added(cts, taken, at)

    def _take_one(self, carry: Arrays, start: Index, cts: Cotangents) -> Cotangents:
        """Takes cotangents past a single step."""
        at, x, z = self.step_at(start)
        back, program = functools.partial(one, self.back), self.back.base.step.jaxpr
        taken = run_in_place(program, back, (self.consts, carry, x), (cts.carry, z))
        if self.own is not None:
            taken = self._if_run(start, taken, cts)
        return self.added_step(cts, taken, at)

    def block(self, start: Index, count: int) -> tuple[Index, list[Value], list[Value]]:
        """The smallest index of `count` steps from a position on, their `xs` and `zs`.

        The `xs` lie along `loop.x_axes`, and the `zs` along their first axis.
        """
        start = self.position(start)
        at = self.loop.block_start(start, count)
        return at, self.loop.block(self.xs, start, count), self._zs(at, count)

    def step_at(self, position: Index) -> tuple[Index, list[Value], list[Value]]:
        """The index of the step at a position, its `x`, and what it gets besides."""
        at, xs, zs = self.block(position, 1)
        x = [lax.squeeze(x, [a]) for x, a in zip(xs, self.loop.x_axes, strict=True)]
        return at, x, [lax.squeeze(z, [0]) for z in zs]

    def added(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The cotangents before a block, whose smallest index is `at`."""
        sums = [a + b for a, b in zip(cts.consts, taken.sums, strict=True)]
        return self.before(cts, taken._replace(sums=sums), at)

    def added_step(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The cotangents before the step at an index, of which rows have no axis."""
        axes = [self.loop.x_axes[i] for i in self.back.x_of]
        xs = list(map(jnp.expand_dims, taken.xs, axes))
        return self.added(cts, taken._replace(xs=xs), at)

    def before(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The same, where the sums of the blocks behind it have been added already."""
        axes = [self.loop.x_axes[i] for i in self.back.x_of]
        return Cotangents(
            taken.sums,
            taken.carried,
            [
                put_part(whole, ct, at, axis)
                for whole, ct, axis in zip(cts.xs, taken.xs, axes, strict=True)
            ],
        )

    def _if_run(self, start: Index, taken: Taken, cts: Cotangents) -> Taken:
        """What was taken past a step, and nothing for examples that had stopped."""
        nothing = jax.tree.map(jnp.zeros_like, taken)._replace(carried=cts.carry)
        new, tree = jax.tree.flatten(taken)
        old = tree.flatten_up_to(nothing)
        return tree.unflatten(where_run(start < self.own, new, old))

    def _zs(self, start: Index, count: int) -> list[Value]:
        """Those of `count` outputs from an index on: zeros for what is not kept."""
        if self.loop.kept is None:
            return [part(z, start, count) for z in self.zs]
        of_step = functools.partial(self.loop.z, self.zs)
        if count == 1:
            return [stack_of(z, 1) for z in of_step(start)]
        return jax.vmap(of_step)(start + jnp.arange(count, dtype=jnp.int32))
