"""What all reverse sweeps share: they take cotangents back, one block at a time.

What is done to a block is told by a `Back`; the order of the blocks is not in this
file.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..._lists import Arrays
from ...progress import Gauge
from ._back import Back, Pull
from ._forward import Walk
from ._loop import Loop, element, opaque, part, put_part, stack_of
from ._slots import new_slots, read, write
from ._step import Step


@dataclasses.dataclass
class Cotangents:
    """What a reverse sweep carries along, see `Taken`."""

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
        step: The step, to advance by.
        loop: The loop around it.
        back: What is done to a block.
        zs: What the blocks get besides: the cotangents of `ys`.
        count: How many steps were run, if not all that the loop may have.
    """

    step: Step
    loop: Loop
    back: Back
    consts: Arrays
    xs: Arrays
    zs: Arrays
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
        return Walk(self.step, self.loop, self.consts, self.xs)

    def opaque(self) -> "Sweep":
        """The same for loops in loops: what they read is not known to be repeated."""
        return dataclasses.replace(
            self,
            consts=opaque(self.consts),
            xs=opaque(self.xs),
            zs=opaque(self.zs),
        )

    def start(self, ct_carry: Arrays, slots: Arrays) -> Cotangents:
        """What there is at the end of the loop.

        Args:
            ct_carry: What is carried back from there.
            slots: The carries to start from. Until they are there, no bar is shown.
        """
        return Cotangents(
            [jnp.zeros_like(self.consts[i]) for i in self.back.const_of],
            list(ct_carry),
            [jnp.zeros_like(self.xs[i]) for i in self.back.x_of],
            self.gauge and self.gauge.open([*slots, *ct_carry, *self.zs]),
        )

    def carry(self, slots: Arrays, row: Any) -> list[Any]:
        """The carry in a row of the slots."""
        return read(slots, row, self.step.carry_types)

    def pull(
        self, carry: Arrays, start: Any, count: int, cts: Cotangents
    ) -> Cotangents:
        """Reverses a block of `count` steps, given the carry before it."""
        if count == 1 or isinstance(self.back, Pull):
            return self._tell(start, count, self._taken(carry, start, count, cts))
        # JAX would store residuals of the block. What it makes of a loop when it is
        # differentiated twice is not always what it makes of the steps (JAX 0.10).
        slots = new_slots(carry, count)

        def fill(i: Any, state: tuple[list[Any], list[Any]]) -> Any:
            carry, slots = state
            carry = self.walk.next(carry, start + i)
            return carry, write(slots, carry, i + 1)

        def back(i: Any, cts: Cotangents) -> Cotangents:
            i = count - 1 - i
            return self._taken(self.carry(slots, i), start + i, 1, cts)

        _, slots = lax.fori_loop(0, count - 1, fill, (list(carry), slots))
        return self._tell(start, count, lax.fori_loop(0, count, back, cts))

    def _taken(
        self, carry: Arrays, start: Any, count: int, cts: Cotangents
    ) -> Cotangents:
        xs = self.loop.block(self.xs, start, count)
        at = self.loop.block_start(start, count)
        inputs, ends = (self.consts, carry, xs), (cts.carry, self._zs(at, count))
        taken = self.back(self.loop.part(count), inputs, ends)
        axes = [self.loop.x_axes[i] for i in self.back.x_of]
        return Cotangents(
            [a + b for a, b in zip(cts.consts, taken.sums, strict=True)],
            taken.carried,
            [
                put_part(whole, ct, at, axis)
                for whole, ct, axis in zip(cts.xs, taken.xs, axes, strict=True)
            ],
            cts.number,
        )

    def _tell(self, start: Any, count: int, cts: Cotangents) -> Cotangents:
        """Has the bar move by a block, if there is one."""
        if self.gauge is None:
            return cts
        length = self.loop.length if self.count is None else self.count
        done = length - start
        number = self.gauge.report_if_due(cts.number, done, count, cts.carry)
        return dataclasses.replace(cts, number=number)

    def _zs(self, start: Any, count: int) -> list[Any]:
        """Those of `count` outputs from an index on: zeros for what is not kept."""
        if self.loop.kept is None:
            return [part(z, start, count) for z in self.zs]

        def of_step(index: Any) -> list[Any]:
            row, is_kept = self.loop.row(index)
            at = [element(z, row) for z in self.zs]
            return [jnp.where(is_kept, z, jnp.zeros_like(z)) for z in at]

        if count == 1:
            return [stack_of(z, 1) for z in of_step(start)]
        return jax.vmap(of_step)(start + jnp.arange(count, dtype=jnp.int32))
