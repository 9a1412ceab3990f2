"""Reverses steps together: one part of it is a loop, the others are batches.

The reversal of a step has three parts:

1. linearise the step at the carry before it,
2. take the cotangents of the carry back through this linear map,
3. compute the cotangents of the parameters and of `xs` from those of the carry.

Only the second part has to wait for the step after it. If the carries of many steps are
known, the first and the third part are batches:

    1. maps      = vmap(linearise)(h0, h1, h2, h3)
    2. c3 <- c4, c2 <- c3, c1 <- c2, c0 <- c1       by maps[3], maps[2], ...
    3. ct_W, ct_x = transpose of the batch, at c1, c2, c3, c4

The loop of the second part has little more than products of a matrix and a vector. The
cotangent of a weight is one product of matrices, whereas step by step, each step adds
an outer product.

Fused kernels of recurrent cells do the same by hand (J. Appleyard, T. Kocisky and
P. Blunsom, *Optimizing performance of recurrent neural networks on GPUs*,
[arXiv:1604.01946](https://arxiv.org/abs/1604.01946), section 3.2).

Where somebody watches for the first step that gives a NaN, a batch would not say which
of its steps it was. So there, steps are taken back one by one.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ...._arrays import (
    Arrays,
    Flags,
    changes_mesh,
    is_inexact,
    is_type,
    pick,
    put,
)
from ...._programs import (
    aval_of,
    equations,
    formula_of,
    has_rules,
    is_watched,
    jvp_of,
    parted,
    pruned,
    reached,
    run,
    sees_batch,
)
from ...._types import Index, Value
from ...steps._find_lists import leaves_written
from ...steps._loop import part
from ...steps._step import Step
from .._backward_step import BackwardStep, BlockResult, past
from .._costs import Rates, StepCost
from .._sweep import AbstractReversal, Cotangents, Sweep
from ..slots._slots import DeviceSlots
from ..slots._stored_steps import StepsToRun, StoredSteps
from ._block_reversals import ByResiduals, run_again
from ._known_products import products_of
from ._products_in_parts import added_in_parts

_CONTROL = frozenset({"cond", "while", "shard_map", "pure_callback"})

# XLA compiles a loop of small steps to one kernel, but a batch of them to many. On the
# CPU, any loop was seen to take so many nanoseconds more (JAX 0.10).
_START = 2e5


@dataclasses.dataclass(frozen=True)
class Together(AbstractReversal):
    """Consecutive steps whose carries are known are reversed in batches.

    Attributes:
        size: How many steps a batch has at most.
    """

    size: int

    def __call__(
        self, sweep: Sweep, carry: Arrays, start: Index, count: int, cts: Cotangents
    ) -> Cotangents:
        if count == 1:
            return sweep.take(carry, start, 1, cts)
        if is_watched.value or not sweep.back.joins_steps:
            return ByResiduals()(sweep, carry, start, count, cts)
        steps = StepsToRun(DeviceSlots(), start, carry, count, count)
        return _joined(sweep, run_again(sweep, steps, products_of(sweep.back)), cts)

    def rerun(self, sweep: Sweep, steps: StepsToRun, cts: Cotangents) -> Cotangents:
        # Products are kept only if all steps make one batch, which is reversed at once.
        # The products of several batches would be in memory until it is their turn.
        is_one_batch = self._size_of_batches(sweep, steps.most) == steps.most > 1
        products = products_of(sweep.back) if is_one_batch else None
        return self.each(sweep, run_again(sweep, steps, products), cts)

    def each(self, sweep: Sweep, steps: StoredSteps, cts: Cotangents) -> Cotangents:
        size = self._size_of_batches(sweep, steps.most)
        if size == 1:
            return super().each(sweep, steps, cts)
        # Under `vmap`, examples may have run different numbers of steps. The steps that
        # all of them ran are reversed in batches. Only step by step is it possible to
        # leave out those examples that had stopped.
        batches = sweep.common(steps.start, steps.count) // size
        # Those that are left over are the last steps, so they are reversed first.
        within = batches * size
        left = steps.count - within
        if not isinstance(left, int) or left:
            cts = super().each(sweep, steps.from_step(within, left, size - 1), cts)

        def body(i: Index, cts: Cotangents) -> Cotangents:
            batch = steps.from_step((batches - 1 - i) * size, size, size)
            return _joined(sweep, batch, cts)

        return lax.fori_loop(0, batches, body, cts)

    def _size_of_batches(self, sweep: Sweep, most: int) -> int:
        """The size of a batch, if `most` steps are divided as evenly as possible."""
        if is_watched.value or not sweep.back.joins_steps:
            return 1
        # `-(-a // b)` rounds up: it is the number of batches that are needed.
        return most // -(-most // self.size)

    @property
    def start(self) -> float:
        return _START

    def batch(self, count: int) -> int:
        # Steps whose carries are stored are blocks of one, reversed with others.
        return self.size if count == 1 else count

    def described(self, block: int) -> list[tuple[str, str]]:
        return [("reversed together", f"{self.batch(block)} steps")]

    def block_bytes(self, cost: StepCost, count: int) -> int:
        # Roughly: the linear maps of all steps, beside the products of which they are
        # made, or what is carried back; and later what is added to the cotangents of
        # parameters. When that is made, about half of what the steps save is gone, and
        # their ends are there.
        count = self.batch(count)
        linear_maps = count * (cost.maps + max(cost.known, cost.carry))
        ends = count * (cost.residuals // 2 + cost.carry // 2)
        return max(linear_maps, cost.products + ends)

    def bytes_of_blocks(self, cost: StepCost, counts: Sequence[int]) -> int:
        # No loop carries any of this, so XLA has all of them use the same memory.
        return max((self.block_bytes(cost, count) for count in counts), default=0)

    def block_time(self, cost: StepCost, count: int, rate: Rates) -> float:
        size = self.batch(count)
        # The product is written, read, and added to the sum. All operations but those
        # that go back step by step are started once.
        entry = 8 * cost.ct_consts * rate.byte_of_sums + 100 * rate.iteration
        entry += cost.started_once + cost.dots_once * rate.dot_of_batch
        linearised = cost.evaluation + cost.reversal - cost.started_once
        # The carries are read from their slots, and what is carried back is stored.
        moved = cost.residuals + cost.held + cost.carry
        step = linearised + 2 * moved * rate.byte + 3 * rate.iteration + entry / size
        advances = 0.0 if count == 1 else cost.evaluation + rate.iteration
        return count * (step + advances)


def together(step: Step, size: int) -> AbstractReversal:
    """The reversal of steps in batches of this size, if the step allows it."""
    # A batch runs both sides of a branch, and so would evaluate derivatives where a
    # side is not meant to be run, which may be NaN. So steps with branches or effects
    # are reversed one by one. Steps with loops of this library are, too: these have
    # plans of their own. So are steps that write rows of a buffer, as the cotangents of
    # a batch have the whole buffer for each step. And so are steps that can see their
    # batch, which would give other numbers in it.
    return Together(size) if size > 1 and can_join(step) else ByResiduals()


@functools.lru_cache(maxsize=512)
def can_join(step: Step) -> bool:
    """Whether a batch of steps does the same as the steps one by one."""
    if step.jaxpr.effects or not all(map(_is_plain, equations(step.jaxpr))):
        return False
    if sees_batch(step.jaxpr) or any(leaves_written(step)):
        return False
    if not has_rules(step.jaxpr, ("custom_jvp_call",)):
        return True
    # The equations of a `custom_jvp` rule show only when it is used. The rule of a
    # `custom_vjp` may have branches, as it is not differentiated again.
    marks = tuple(map(is_inexact, step.jaxpr.in_avals))
    nonzeros_out = tuple(map(is_inexact, step.jaxpr.out_avals))
    try:
        rules = jvp_of(step.jaxpr, (marks,), (nonzeros_out,))
    except Exception:
        # The rule may raise an error for tangents that the user never asks for. If the
        # user does ask for them, the loop raises it again.
        return False
    return all(map(_is_plain, equations(rules)))


def _is_plain(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is neither a loop of this library nor a branch."""
    # Nor may it have to do with a value of a `hijax` type, of which there may be no
    # batches, or end a `jax.sharding.auto_axes`: what is closed over there has
    # cotangents that JAX does not add up over a batch.
    avals = list(map(aval_of, (*eqn.invars, *eqn.outvars)))
    if not all(map(is_type, avals)) or formula_of(eqn) is not None:
        return False
    name = eqn.primitive.name
    ends_automatic = name == "reshard" and changes_mesh(avals[0], avals[1])
    return name not in _CONTROL and not ends_automatic


def _joined(sweep: Sweep, steps: StoredSteps, cts: Cotangents) -> Cotangents:
    """Takes cotangents past a batch of steps, in the three parts of this file."""
    loop, consts, count = sweep.loop, sweep.consts, steps.count
    xs, zs = sweep.block(steps.start, count)
    before = steps.carries.read_part(steps.row, count)
    back, given = sweep.back, list[Value]()
    if steps.products and (found := products_of(back)) is not None:
        back, given = found.back, [part(x, steps.row, count) for x in steps.products]
    if loop.reverse:  # from the order of the steps to that of `xs` and `zs`
        before, given = ([jnp.flip(x, 0) for x in e] for e in (before, given))
    x_axes = loop.x_axes[: len(xs)]
    if given:
        xs, x_axes = [*xs, *given], (*x_axes, *[0] * len(given))
        loop = dataclasses.replace(loop, x_axes=x_axes)
    # 1. The linear maps. Arrays in them that are the same for all steps stay one.
    known, linear, varies = parts_in_turn(back)
    axes = [*[None] * len(consts), *[0] * len(before), *x_axes, *[0] * len(zs)]
    maps = jax.vmap(
        lambda *inputs: run(known, *inputs),
        in_axes=axes,
        out_axes=[0 if flag else None for flag in varies],
        axis_size=count,
    )(*consts, *before, *xs, *zs)

    # 2. Back through them. The outputs are what is carried to each step from after it.
    def step(carried: list[Value], own: list[Value]) -> tuple[list[Value], list[Value]]:
        return run(linear, *put(maps, varies, own), *carried), carried

    carried, ends = lax.scan(
        step,
        cts.carry,
        pick(maps, varies),
        length=count,
        reverse=not loop.reverse,
        unroll=min(loop.unroll, count),
    )

    # 3. All that is left, for the whole batch. The steps are evaluated once more here;
    #    XLA merges that with the first part.
    inputs = [*consts, *before, *xs, *zs, *ends]
    program = past(back, loop.part(count), True).program
    sums, ct_xs = added_in_parts(program, inputs, cts.consts)
    return sweep.before(cts, BlockResult(sums, carried, ct_xs), steps.start, count)


@functools.lru_cache(maxsize=128)
def parts_in_turn(back: BackwardStep) -> tuple[jex.ClosedJaxpr, jex.ClosedJaxpr, Flags]:
    """The first and the second part of the reversal of one step.

    They come with which arrays between the two differ from step to step.
    """
    # The first takes consts, carry, `x` and `z` to the linear map of the step, as a
    # list of arrays. The second takes this map and `carried` to the new `carried`.
    one = back.one
    (sums, carried), counts = one.outs, one.counts
    # Only what is carried has to wait for the step after it. The cotangents of consts
    # and `x` are left out here: the third part computes them for the whole batch.
    used = (False,) * sums + (True,) * carried + (False,) * len(one.x_of)
    program = pruned(one.program, used)
    known, linear = parted(program, (True,) * sum(counts) + (False,) * carried)
    varies = (False,) * counts[0] + (True,) * sum(counts[1:])
    return known, linear, reached(known, varies)
