"""What all reverse sweeps share: they take cotangents back, one block at a time.

A block is all that JAX differentiates; the order of the blocks is not in this file.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._lists import Arrays, pick, put
from ...progress import Gauge
from ._forward import Active, Saveable, Walk, single, stored
from ._loop import Loop, element, opaque, part, put_part, stack_of
from ._slots import read
from ._step import Step


@dataclasses.dataclass
class Cotangents:
    """The cotangents that a reverse sweep carries along: active leaves only."""

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]
    number: Any  # of the progress bar, if there is one


jax.tree_util.register_dataclass(
    Cotangents, data_fields=["consts", "carry", "xs", "number"], meta_fields=[]
)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A reverse sweep: all that stays the same while it runs.

    Attributes:
        active: Which inputs are differentiated.
        ct_ys: The cotangents of `ys`, `None` for those that are zero.
        count: How many steps were run, if not all that the loop may have.
    """

    step: Step
    loop: Loop
    policy: Saveable
    active: Active
    consts: Arrays
    xs: Arrays
    ct_ys: Sequence[Any | None]
    count: Any = None

    @property
    def gauge(self) -> Gauge | None:
        """The bar of the sweep."""
        if self.loop.meter is None:
            return None
        gauge = self.loop.meter.back
        return gauge if self.count is None else gauge.of(self.count)

    @property
    def walk(self) -> Walk:
        return Walk(self._again, self.loop, self.consts, self.xs)

    @property
    def _again(self) -> Step:
        """The step, without the bars of loops in it: they were shown by the primal."""
        return self.step.muted(backward=False)

    def opaque(self) -> "Sweep":
        """The same for loops in loops: what they read is not known to be repeated."""
        return dataclasses.replace(
            self,
            consts=opaque(self.consts),
            xs=opaque(self.xs),
            ct_ys=[None if ct is None else opaque([ct])[0] for ct in self.ct_ys],
        )

    def start(self, ct_carry: Arrays, slots: Arrays) -> Cotangents:
        """The cotangents at the end of the loop: those of the active final carry.

        Args:
            ct_carry: These cotangents.
            slots: The carries to start from. Until they are there, no bar is shown.
        """
        ct_ys = [ct for ct in self.ct_ys if ct is not None]
        return Cotangents(
            [jnp.zeros_like(c) for c in pick(self.consts, self.active.consts)],
            list(ct_carry),
            [jnp.zeros_like(x) for x in pick(self.xs, self.active.xs)],
            self.gauge and self.gauge.open([*slots, *ct_carry, *ct_ys]),
        )

    def carry(self, slots: Arrays, row: Any) -> list[Any]:
        """The carry in a row of the slots."""
        return read(slots, row, self.step.carry_types)

    def pull(
        self, carry: Arrays, start: Any, count: int, cts: Cotangents
    ) -> Cotangents:
        """Reverses a block of `count` steps, given the carry before it."""
        xs = self.loop.block(self.xs, start, count)
        at = self.loop.block_start(start, count)
        _, pull = jax.vjp(
            self._block(carry, xs, count),
            pick(self.consts, self.active.consts),
            pick(carry, self.active.carry),
            pick(xs, self.active.xs),
        )
        ct_consts, ct_carry, ct_xs = pull((cts.carry, self._ct_ys(at, count)))
        axes = pick(self.loop.x_axes, self.active.xs)
        length = self.loop.length if self.count is None else self.count
        number, done = cts.number, length - start
        if self.gauge is not None:
            number = self.gauge.report_if_due(number, done, count, ct_carry)
        return Cotangents(
            [a + b for a, b in zip(cts.consts, ct_consts, strict=True)],
            ct_carry,
            [
                put_part(whole, ct, at, axis)
                for whole, ct, axis in zip(cts.xs, ct_xs, axes, strict=True)
            ],
            number,
        )

    def _ct_ys(self, start: Any, count: int) -> list[Any]:
        """Those of `count` outputs from an index on: zeros for what is not kept."""
        ct_ys = [ct for ct in self.ct_ys if ct is not None]
        if self.loop.kept is None:
            return [part(ct, start, count) for ct in ct_ys]

        def ct_y(index: Any) -> list[Any]:
            row, is_kept = self.loop.row(index)
            return [jnp.where(is_kept, element(ct, row), 0) for ct in ct_ys]

        if count == 1:
            return [stack_of(ct, 1) for ct in ct_y(start)]
        return jax.vmap(ct_y)(start + jnp.arange(count))

    def _block(self, carry: Arrays, xs: Arrays, count: int) -> Callable[..., Any]:
        """A block as a function of the active inputs, to its active outputs."""
        active, loop = self.active, self.loop.part(count)
        wanted = [ct is not None for ct in self.ct_ys]
        run = stored if count > 1 else single

        def block(*marked: Arrays) -> tuple[list[Any], list[Any]]:
            inputs = [
                put(leaves, flags, new)
                for leaves, flags, new in zip(
                    (self.consts, carry, xs),
                    (active.consts, active.carry, active.xs),
                    marked,
                    strict=True,
                )
            ]
            last, ys = run(self._again, loop, self.policy, *inputs)
            return pick(last, active.carry), pick(ys, wanted)

        return block
