"""What a reverse sweep has, and how it goes back.

Three objects take part in a sweep, and each calls the next one:

    order           which block is next, and which steps are run again to get to it
    reversal        how a block is taken back from the carry before it
    backward step   what happens to the cotangents at a single step

(`orders/_order.py`, `reversals/`, `_backward_step.py`). Orders and reversals are given
the `Sweep` of this file. An order knows positions, and which of its carries are stored.
For the rest it has these ways to move:

    advance    from a carry to a later one, by running steps again
    pull       past a block, from the carry before it
    reversal   past steps whose carries are all stored (`each`), or that are run again
               to store all of their carries (`rerun`)

A reversal runs steps again (`advance`), and takes cotangents past steps by the backward
step (`take`).
"""

import abc
import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import (
    Arrays,
    added,
    over_examples,
    stack_of,
    where_run,
    zero_cotangent_of,
)
from ..._types import Index, Value
from ...progress import NO_BAR, Gauge
from ..rewrites._in_place import run_in_place
from ..steps._loop import Loop, opaque, part, put_part, zero
from ..steps._step import Step
from ._backward_step import BackwardStep, BlockResult, past
from ._costs import Rates, StepCost
from ._forward import iterate
from ._step_parts import KnownResiduals
from .slots._slots import DeviceSlots
from .slots._stored_steps import StepsToRun, StoredSteps

_least = over_examples(jnp.min)


@dataclasses.dataclass
class Cotangents:
    """The state of a reverse sweep, in the groups of `BlockResult`.

    Attributes:
        consts: The sums so far, in the type of `Loop.sums` if that is wider.
        carry: What is carried back, at the end of the block that is next.
        xs: The cotangents of `xs`, as whole arrays, zero where steps are yet to come.
        number: What the last report to the bar returned; `None` without a bar.
    """

    consts: list[Value]
    carry: list[Value]
    xs: list[Value]
    number: Value = None


jax.tree_util.register_dataclass(
    Cotangents, data_fields=["consts", "carry", "xs", "number"], meta_fields=[]
)


class AbstractReversal(abc.ABC):
    """How a block of steps is taken back: a frozen, hashable dataclass."""

    @abc.abstractmethod
    def __call__(
        self, sweep: "Sweep", carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past a block of `count` steps, the first of them at `start`.

        It gets the carry before the block, and the cotangents after it.
        """

    def each(self, sweep: "Sweep", steps: StoredSteps, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps whose carries are all stored: one by one."""
        return sweep.one_by_one(steps, cts)

    @abc.abstractmethod
    def rerun(self, sweep: "Sweep", steps: StepsToRun, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps that are run again, which stores all carries."""

    @property
    def kind(self) -> Hashable:
        """What programs of similar reversals have in common, see `Layout.kind`."""
        return type(self)

    @property
    def start(self) -> float:
        """Roughly the time that a loop takes apart from its blocks, in nanoseconds."""
        return 0.0

    @property
    def stores_residuals(self) -> bool:
        """Whether the residuals of a block are stored, as far as the policy allows."""
        return False

    def batch(self, count: int) -> int:
        """How many steps are linearised at once in blocks of `count` steps."""
        return count

    def described(self, block: int) -> list[tuple[str, str]]:
        """How blocks of this size are taken back, as rows of a plan's table."""
        return []

    @abc.abstractmethod
    def block_bytes(self, cost: StepCost, count: int) -> int:
        """The bytes that a block takes while it is reversed."""

    def bytes_of_blocks(self, cost: StepCost, counts: Sequence[int]) -> int:
        """The bytes of blocks that are reversed by several loops, one after the other.

        XLA does not share memory between the residuals of these loops.
        """
        return sum(self.block_bytes(cost, count) for count in counts)

    @abc.abstractmethod
    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        """Roughly the time that the reversal of a block takes, in nanoseconds."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Everything in a reverse sweep that stays the same while it runs.

    Attributes:
        reversal: How a block is taken back.
        step: The step to advance by. It has no outputs.
        loop: The loop around it.
        back: The backward step.
        consts: The consts of the step.
        xs: The `xs` of the loop.
        zs: The `z` of all steps, for a gradient the cotangents of `ys`.
        residuals: The residuals of the last steps, if they were.
        count: How many steps were run, for a loop that may end early; else `None`.
        own: How many steps this example has run. In a batch of sweeps, `count` is the
            number of the example that ran most, so that all share one loop, and `own`
            differs. `None` for loops whose examples are not told apart.
        first: Where the part of the loop starts that this sweep is for, see `part`;
            `None` for the whole loop.
        init: The initial carry, for layouts that read it (`AbstractLayout.reads_init`).
        gauge: Its bar, for the number of steps that the whole loop has run.
    """

    reversal: AbstractReversal
    step: Step
    loop: Loop
    back: BackwardStep
    consts: Arrays
    xs: Arrays
    zs: Arrays
    residuals: KnownResiduals | None = None
    count: Index | None = None
    own: Value = None
    first: Index | None = None
    init: Arrays = ()
    gauge: Gauge = NO_BAR

    def opaque(self) -> "Sweep":
        """This sweep for nested loops, see `opaque` in `_loop.py`."""
        return dataclasses.replace(
            self,
            consts=opaque(self.consts),
            xs=opaque(self.xs),
            zs=opaque(self.zs),
        )

    def start(self, ct_carry: Arrays, after: Arrays) -> Cotangents:
        """The state at the end of the loop, where nothing has been reversed yet.

        `after` has to be computed before the bar is shown, with `zs` and `ct_carry`.
        """
        # Whole arrays from the start, though most rows come late: the loops carry them,
        # and so XLA can write each row where it stays.
        return Cotangents(
            [
                zero_cotangent_of(self.consts[i], self.loop.sums)
                for i in self.back.one.const_of
            ],
            list(ct_carry),
            [jnp.zeros_like(self.xs[i]) for i in self.back.one.x_of],
            self.gauge.open([*after, *self.zs, *ct_carry]),
        )

    def part(self, start: Index) -> "Sweep":
        """The sweep past a part of the loop: positions count from `start` on."""

        def left(count: Value) -> Value:
            # Of the type of the count, as the index of a loop may have more bits.
            return None if count is None else count - jnp.asarray(start, count.dtype)

        return dataclasses.replace(
            self,
            first=self.position(start),
            count=left(self.count),
            own=left(self.own),
        )

    def until(self, count: Index) -> "Sweep":
        """The sweep back past a loop that has run `count` steps."""
        return dataclasses.replace(self, count=count, gauge=self.gauge.of(count))

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
        # Between segments of unequal lengths no trip count is static, so this is a
        # `while_loop`. JAX could not reverse it, and is never asked to.
        return iterate(move, (start, list(carry)), left, self.loop.unroll)[1]

    def next(self, carry: Arrays, position: Index) -> list[Value]:
        """The carry after the step at a position."""
        position = self.position(position)
        return self.step(self.consts, carry, self.loop.x(self.xs, position))[0]

    def previous(self, carry: Arrays, position: Index) -> list[Value]:
        """The carry before the step at a position, from the one after it."""
        x = self.loop.x(self.xs, self.position(position))
        return self.step.before(self.consts, carry, x)

    # Steps that are reversed.

    def pull(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past a block of `count` steps, given the carry before it."""
        # A loop that cannot end early has only whole blocks. The reversal runs them
        # from `carry`, and calls `take` or its own loops.
        if count == 1 or self.count is None:
            return self.reversal(self, carry, start, count, cts)
        # The loop may have ended within this block, and then its steps are reversed one
        # by one. A `lax.cond` would copy the cotangents of `xs`, which both branches
        # return. So both ways are loops, of which one has no iteration.
        is_whole = (self.common(start, count) == count).astype(jnp.int32)
        whole = lambda _, cts: self.reversal(self, carry, start, count, cts)
        cts = lax.fori_loop(0, is_whole, whole, cts)
        left = jnp.where(is_whole, 0, jnp.clip(self.count - start, 0, count))
        # The steps of the block that were run, `left` of them, are run again. Their
        # carries go to as many slots as the block has steps, since `left` is not
        # static.
        steps = StepsToRun(DeviceSlots(), start, carry, left, count)
        return self.reversal.rerun(self, steps, cts)

    def one_by_one(self, steps: StoredSteps, cts: Cotangents) -> Cotangents:
        """Takes cotangents past steps whose carries are all stored, one at a time."""

        def body(i: Index, cts: Cotangents) -> Cotangents:
            i = steps.count - 1 - i
            carry = steps.carries.read(steps.row + i)
            return self.take(carry, steps.start + i, 1, cts)

        unroll = min(self.loop.unroll, steps.most)
        return lax.fori_loop(0, steps.count, body, cts, unroll=unroll)

    def pull_stored(self, cts: Cotangents) -> Cotangents:
        """Takes cotangents past the last steps, whose residuals are stored."""
        assert self.residuals is not None
        last = self.loop.length - 1
        body = lambda i, cts: self.take_stored(last - i, cts)
        count = self.loop.length - self.residuals.first
        unroll = min(self.loop.unroll, count)
        return lax.fori_loop(0, count, body, cts, unroll=unroll)

    def pull_first(self, carry: Arrays, count: int, cts: Cotangents) -> Cotangents:
        """Reverses the first `count` steps from the initial carry, if any step was run.

        It is for orders whose first block is not like the others.
        """

        def pull(i: Index, cts: Cotangents) -> Cotangents:
            # XLA does not know that this loop has one iteration at most, and would
            # hoist the evaluation of the steps out of it: the initial carry does not
            # change. All residuals would be kept from before the loop on. The barrier
            # makes the carry depend on the index.
            # There is one for each leaf. On JAX 0.10, all that a barrier returns
            # differs between devices if anything that it is given does, and the step
            # may not expect that of a counter.
            held = [lax.optimization_barrier((i, leaf))[1] for leaf in carry]
            return self.pull(held, i, count, cts)

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
        # A batch of sweeps is one loop. Steps can be taken back together only if each
        # example has run them; the others are taken one by one, with a mask.
        return jnp.clip(_least(self.own) - start, 0, count)

    def take(
        self, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        """Takes cotangents past `count` steps by the backward step."""
        # A single step has no stacks of one row. A block is run once more for its
        # residuals, so these live no longer than this call.
        back = past(self.back, None if count == 1 else self.loop.part(count), False)
        x, z = self.step_at(start) if count == 1 else self.block(start, count)
        inputs, ends = (self.consts, carry, x), (cts.carry, z)
        # `run_in_place` asks the step of the gradient whether it writes to buffers,
        # but runs `back`, which may be a derivative of it.
        taken = run_in_place(self.back.step.jaxpr, back, inputs, ends)
        if count > 1:
            return self.added(cts, taken, start, count)
        if self.own is not None:
            taken = self._if_run(start, taken, cts)
        return self.added_step(cts, taken, start)

    def take_stored(self, position: Index, cts: Cotangents) -> Cotangents:
        """Takes cotangents past a step whose residuals are stored."""
        assert self.residuals is not None
        x, z = self.step_at(position)
        ends = cts.carry, z
        taken = self.residuals.take(self.consts, x, ends, position, self.back)
        return self.added_step(cts, taken, position)

    def block(self, start: Index, count: int) -> tuple[list[Value], list[Value]]:
        """The `xs` and `zs` of `count` steps from a position on.

        `xs` lie along `loop.x_axes`, and `zs` along the first axis.
        """
        start = self.position(start)
        zs = self._zs(self.loop.block_start(start, count), count)
        return self.loop.block(self.xs, start, count), zs

    def step_at(self, position: Index) -> tuple[list[Value], list[Value]]:
        """The `x` of the step at a position, and its `z`."""
        xs, zs = self.block(position, 1)
        x = [lax.squeeze(x, [a]) for x, a in zip(xs, self.loop.x_axes, strict=True)]
        return x, [lax.squeeze(z, [0]) for z in zs]

    def added(
        self, cts: Cotangents, taken: BlockResult, start: Index, count: int
    ) -> Cotangents:
        """The state before a block: `cts` are after it, `taken` is of its reversal."""
        # The sum of a const is added up here, from block to block: `vjp` of a block
        # gives the block's part.
        sums = added(cts.consts, taken.sums)
        return self.before(cts, taken._replace(sums=sums), start, count)

    def added_step(
        self, cts: Cotangents, taken: BlockResult, position: Index
    ) -> Cotangents:
        """The state before a single step, whose `taken.xs` have no axis for steps."""
        axes = [self.loop.x_axes[i] for i in self.back.one.x_of]
        xs = list(map(jnp.expand_dims, taken.xs, axes))
        return self.added(cts, taken._replace(xs=xs), position, 1)

    def before(
        self, cts: Cotangents, taken: BlockResult, start: Index, count: int
    ) -> Cotangents:
        """The state before a block, if `taken.sums` are the new totals already."""
        axes = [self.loop.x_axes[i] for i in self.back.one.x_of]
        # In a loop in reverse, the first of these steps has the last of their rows.
        start = self.position(start)
        at = self.loop.block_start(start, count)
        number = cts.number
        if self.gauge.is_shown:
            done = self.gauge.total - start
            number = self.gauge.report_if_due(number, done, count, taken.carried)
        return Cotangents(
            taken.sums,
            taken.carried,
            [
                put_part(whole, ct, at, axis)
                for whole, ct, axis in zip(cts.xs, taken.xs, axes, strict=True)
            ],
            number,
        )

    def _if_run(self, start: Index, taken: BlockResult, cts: Cotangents) -> BlockResult:
        # An example that had stopped before keeps its `carried`. To sums and rows it
        # adds zeros.
        nothing = jax.tree.map(jnp.zeros_like, taken)._replace(carried=cts.carry)
        new, tree = jax.tree.flatten(taken)
        old = tree.flatten_up_to(nothing)
        return tree.unflatten(where_run(start < self.own, new, old))

    def _zs(self, start: Index, count: int) -> list[Value]:
        # A step whose row is not kept has no influence by it: its `z` is zero.
        if self.loop.kept is None:
            return [part(z, start, count) for z in self.zs]
        of_step = functools.partial(self.loop.row_or_zeros, self.zs)
        if count == 1:
            return [stack_of(z, 1) for z in of_step(start)]
        return jax.vmap(of_step)(start + jnp.arange(count, dtype=jnp.int32))
