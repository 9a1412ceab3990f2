"""A reverse sweep: takes cotangents back through a whole loop, block by block.

Three objects take part, and each calls the next one:

    order           which block is next, and which steps are run again to get to it
    reversal        how a block is taken back from the carry before it
    backward step   what happens to the cotangents at a single step

(`orders/_order.py`, `reversals/_block_reversals.py`, `_backward_step.py`). All of them
are given the sweep. It has the arrays of the loop, runs steps for them (`advance`), and
calls the next one (`pull` the reversal, `take` the backward step).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, over_examples, stack_of, where_run, zero_cotangent_of
from ..._types import Index, Value
from ._backward_step import BackwardStep, Taken, take_one
from ._forward import iterate
from ._in_place import run_in_place
from ._layout import Layout
from ._loop import Loop, opaque, part, put_part, zero
from ._step import Step
from .reversals._block_reversals import AbstractReversal, one_by_one
from .reversals._known_products import KnownProducts
from .reversals._reruns import carries_within
from .slots._slots import DeviceSlots, StoredSteps

_least = over_examples(jnp.min)


@dataclasses.dataclass
class Cotangents:
    """The state of a reverse sweep, in the groups of `Taken`.

    Attributes:
        consts: The sums so far.
        carry: What is carried back, at the end of the block that is next.
        xs: The cotangents of `xs`, as whole arrays, zero where steps are yet to come.
    """

    consts: list[Value]
    carry: list[Value]
    xs: list[Value]


jax.tree_util.register_dataclass(
    Cotangents, data_fields=["consts", "carry", "xs"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Everything in a reverse sweep that stays the same while it runs.

    Attributes:
        step: The step to advance by. It has no outputs.
        loop: The loop around it.
        back: The backward step.
        reversal: How a block is taken back.
        consts: The consts of the step.
        xs: The `xs` of the loop.
        zs: The `z` of all steps, for a gradient the cotangents of `ys`.
        products: The products of the last steps, if they were stored.
        count: How many steps were run, for a loop that may end early; else `None`.
        own: How many steps this example has run. In a batch of sweeps, `count` is the
            number of the example that ran most, so that all share one loop, and `own`
            differs. `None` for loops whose examples are not told apart.
        first: Where the part of the loop starts that this sweep is for, see `part`;
            `None` for the whole loop.
        init: The initial carry, for layouts that read it (`AbstractLayout.reads_init`).
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
    init: Arrays = ()

    def run(self, layout: Layout, slots: Arrays, ct_carry: Arrays) -> Cotangents:
        """Runs the whole sweep.

        Args:
            layout: How the loop was stored.
            slots: The carries that were stored.
            ct_carry: What is carried back from the end of the loop.
        """
        order = layout.order.by_carries()
        # XLA makes a broadcast array anew, again and again, only within an outer loop.
        sweep = self if order.is_flat else self.opaque()
        cts = sweep.start(ct_carry)
        carries = layout.slots.holding(slots, self.step.carry_types)
        return layout.slots.released(slots, order.reverse(sweep, carries, cts))

    def opaque(self) -> "Sweep":
        """The same for nested loops, see `opaque` in `_loop.py`."""
        return dataclasses.replace(
            self,
            consts=opaque(self.consts),
            xs=opaque(self.xs),
            zs=opaque(self.zs),
        )

    def start(self, ct_carry: Arrays) -> Cotangents:
        """The state at the end of the loop, where nothing has been reversed yet."""
        return Cotangents(
            [zero_cotangent_of(self.consts[i]) for i in self.back.const_of],
            list(ct_carry),
            [jnp.zeros_like(self.xs[i]) for i in self.back.x_of],
        )

    @property
    def multiplying(self) -> "Sweep":
        """The same for steps whose products were not stored, and which multiply."""
        return dataclasses.replace(self, products=None)

    def part(self, start: Index) -> "Sweep":
        """The same for a part of the loop: positions count from `start` on."""
        left = lambda count: None if count is None else count - start
        return dataclasses.replace(
            self,
            first=self.position(start),
            count=left(self.count),
            own=left(self.own),
        )

    @property
    def steps(self) -> Index:
        """How many steps there are to reverse."""
        return self.loop.length if self.count is None else self.count

    def position(self, start: Index) -> Index:
        """The position in the whole loop, given one that counts from `first`."""
        return start if self.first is None else self.first + start

    # Steps that are run again.

    def advance(self, carry: Arrays, start: Index, count: int) -> list[Value]:
        """The carry `count` steps after the position `start`; the count is static."""
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
        # The loop may have ended within this block, and then its steps are reversed one
        # by one. A `lax.cond` would copy the cotangents of `xs`, which both branches
        # return. So both ways are loops, of which one has no iteration.
        is_whole = (self.common(start, count) == count).astype(jnp.int32)
        whole = lambda _, cts: self.reversal(self, carry, start, count, cts)
        cts = lax.fori_loop(0, is_whole, whole, cts)
        left = jnp.where(is_whole, 0, jnp.clip(self.count - start, 0, count))
        carries = carries_within(self, DeviceSlots(), carry, start, left, count)
        steps = StoredSteps(carries, 0, start, left, count)
        return one_by_one(self, steps, cts)

    def pull_first(self, carry: Arrays, count: int, cts: Cotangents) -> Cotangents:
        """Reverses the first `count` steps from the initial carry, if any step was run.

        It is for orders whose first block is not like the others.
        """

        def pull(i: Index, cts: Cotangents) -> Cotangents:
            # XLA does not know that this loop has one iteration at most, and would
            # hoist the evaluation of the steps out of it: the initial carry does not
            # change. All residuals would be kept from before the loop on. The barrier
            # makes the carry depend on the index.
            start, *held = lax.optimization_barrier([i, *carry])
            return self.pull(held, start, count, cts)

        if self.count is None:
            return self.pull(carry, zero(), count, cts)
        # A loop of at most one iteration, as in `pull`.
        return lax.fori_loop(0, jnp.clip(self.count, 0, 1), pull, cts)

    def common(self, start: Index, count: Index) -> Value:
        """How many of `count` steps from a position on all examples have run.

        `_least` also reduces over the axes of `vmap`.
        """
        if self.own is None:
            return count
        return jnp.clip(_least(self.own) - start, 0, count)

    def take(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past `count` steps by the backward step."""
        if count == 1:
            return self._take_one(carry, start, cts)
        at, xs, zs = self.block(start, count)
        inputs, ends = (self.consts, carry, xs), (cts.carry, zs)
        # `run_in_place` asks the step of the gradient whether it writes to buffers,
        # but runs `back`, which may be a derivative of it.
        back = functools.partial(self.back, self.loop.part(count))
        taken = run_in_place(self.back.base.step.jaxpr, back, inputs, ends)
        return self.added(cts, taken, at)

    def _take_one(self, carry: Arrays, start: Index, cts: Cotangents) -> Cotangents:
        """Takes cotangents past a single step, without a stack of one row."""
        at, x, z = self.step_at(start)
        inputs, ends = (self.consts, carry, x), (cts.carry, z)
        back = functools.partial(take_one, self.back)
        taken = run_in_place(self.back.base.step.jaxpr, back, inputs, ends)
        if self.own is not None:
            taken = self._if_run(start, taken, cts)
        return self.added_step(cts, taken, at)

    def block(self, start: Index, count: int) -> tuple[Index, list[Value], list[Value]]:
        """The inputs of `count` steps from a position on.

        Returns:
            The smallest index among them, their `xs`, which lie along `loop.x_axes`,
            and their `zs`, which lie along the first axis.
        """
        start = self.position(start)
        at = self.loop.block_start(start, count)
        return at, self.loop.block(self.xs, start, count), self._zs(at, count)

    def step_at(self, position: Index) -> tuple[Index, list[Value], list[Value]]:
        """The index of the step at a position, its `x`, and its `z`."""
        at, xs, zs = self.block(position, 1)
        x = [lax.squeeze(x, [a]) for x, a in zip(xs, self.loop.x_axes, strict=True)]
        return at, x, [lax.squeeze(z, [0]) for z in zs]

    def added(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The state before a block, given what its reversal returned.

        Args:
            cts: The state after the block.
            taken: What the reversal of the block returned.
            at: The smallest index in the block.
        """
        sums = [a + b for a, b in zip(cts.consts, taken.sums, strict=True)]
        return self.before(cts, taken._replace(sums=sums), at)

    def added_step(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The same for a single step, whose `taken.xs` have no axis for steps."""
        axes = [self.loop.x_axes[i] for i in self.back.x_of]
        xs = list(map(jnp.expand_dims, taken.xs, axes))
        return self.added(cts, taken._replace(xs=xs), at)

    def before(self, cts: Cotangents, taken: Taken, at: Index) -> Cotangents:
        """The same, if `taken.sums` are the new totals, and not the block's part."""
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
        """`taken` for the examples that have run the step.

        For the others, `carried` stays as it is, and everything else is zero.
        """
        nothing = jax.tree.map(jnp.zeros_like, taken)._replace(carried=cts.carry)
        new, tree = jax.tree.flatten(taken)
        old = tree.flatten_up_to(nothing)
        return tree.unflatten(where_run(start < self.own, new, old))

    def _zs(self, start: Index, count: int) -> list[Value]:
        """The `z` of `count` steps from an index on; zeros for those not kept."""
        if self.loop.kept is None:
            return [part(z, start, count) for z in self.zs]
        of_step = functools.partial(self.loop.row_or_zeros, self.zs)
        if count == 1:
            return [stack_of(z, 1) for z in of_step(start)]
        return jax.vmap(of_step)(start + jnp.arange(count, dtype=jnp.int32))
