"""Runs a loop as one kernel each way, where that is possible."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import lax

from ..._arrays import Arrays, axes_of, type_of
from ..._device import planning_device
from ..._programs import refuse_callbacks, warn_once
from ..._types import PyTree, Value
from ..engine._layout import AbstractRunner, Layout, Saves
from ..engine._sweep import Cotangents, Sweep
from ..engine.orders._levels import Nest
from ..engine.orders._nested import Nested
from ..engine.slots._slots import DeviceSlots
from ..steps._loop import Loop
from ..steps._step import Step
from ._backward import Backward
from ._forward import Forward
from ._more_rows import backward_kernel, forward_kernel, run_back, run_forward, way_back
from ._pallas import NAME
from ._row_programs import Settings

# A row that carries more numbers is none: they are written out one by one.
_MOST_OF_A_ROW = 256
# With more operations in a step, the way back takes minutes to compile: for an H100,
# with 3,152 (a GRU of 16 units) half a minute, and with 7,840 (of 32) more than four.
MOST_OF_A_STEP = 7000
_NEW = (
    "Fused: kernels of this kind have been interpreted and compiled, but none has run "
    "on such a device yet: compare a gradient with that of `Chunked()`."
)


@dataclasses.dataclass(frozen=True)
class FusedRunner(AbstractRunner):
    """Runs a loop as one kernel, and its way back as another.

    Attributes:
        settings: How the kernels are made.
        nests: Which carries its layout stores, if it is that of one.
    """

    kernel: ClassVar[str] = NAME

    settings: Settings
    nests: tuple[Nest, ...] = ()

    def forward(
        self, step: Step, loop: Loop, saves: Saves[Layout] | None, inputs: PyTree
    ) -> tuple[list[Value], list[Value], list[Value]] | None:
        if saves is not None and not self._is_of(saves.layout):
            return None
        if (why := self._why_left(step, loop)) is not None:
            warn_once(f"Fused: a loop is not one kernel: {why}.")
            return None
        self._warn_if_new(step, loop)
        saved, slots = ((Nest((1, loop.length)),), (), 0), DeviceSlots()
        if saves is not None:
            rows, slots = len(saves.layout.slot_order.starts) + 1, saves.layout.slots
            saved = self.nests, saves.held, rows
        carry, ys, carries = run_forward(step, loop, self.settings, saved, inputs)
        return carry, ys, slots.packed(carries)

    def reverse(
        self, sweep: Sweep, layout: Layout, carries: Arrays, carried: Arrays
    ) -> Cotangents | None:
        # A loop that shows a bar, a part of another one, and one that was left to the
        # engine before.
        is_whole = sweep.count is None and sweep.first is None and not _is_checked()
        if not is_whole or sweep.loop.meter.is_shown or not self._is_of(layout):
            return None
        own = sweep.own
        if own is not None:
            # Examples have their axes first in what is carried, if anything is.
            shapes = [x.shape[: own.ndim] for x in (*carried, *sweep.step.carry_types)]
            own = own if own.shape in shapes else jnp.max(own)
        way = way_back(sweep.step, sweep.back, own if own is None else type_of(own))
        kernel = backward_kernel(way, sweep.loop, self.settings)
        # Of a carry that is not read again, the way back has the cotangents alone.
        numbers = max(_numbers(sweep.step), sum(ct.size for ct in carried))
        is_left = sweep.step.carry_types and self._why_left(sweep.step, sweep.loop)
        if is_left or _declines(kernel, numbers) is not None:
            return None  # it was said of the way there
        if self._is_tiled and (why := kernel.why_not_tiled(self.nests)):
            warn_once(f"Fused: the way back of a loop is not one kernel: {why}.")
            return None
        is_row = isinstance(kernel.panels, str)
        if is_row and sweep.step.carry_types and self.by_panels(sweep.step, sweep.loop):
            return None  # its plan says so
        dtypes = [aval.dtype for aval in sweep.step.carry_types]
        stored = layout.slots.unpacked(carries, dtypes)
        counts = [] if own is None else [own]
        given = counts, sweep.consts, sweep.xs, sweep.zs, stored, carried
        return Cotangents(*run_back(way, sweep.loop, self.settings, self.nests, given))

    def storing(self, nests: Sequence[Nest]) -> Self:
        return dataclasses.replace(self, nests=tuple(nests))

    def described(self, step: Step, loop: Loop, layout: Layout) -> str:
        if not self._is_of(layout):
            return "none: a schedule around this one stores other carries, or elsewhere"
        if (why := self._why_left(step, loop)) is not None:
            return f"none: {why}"
        kernel = forward_kernel(step, loop, self.settings)
        found, backend = kernel.programs.found, kernel.backend
        numbers = _numbers(step) // max(found.count, 1)
        rows = f"{found.count} rows" if found.count > 1 else "one row"
        why = f"; no more rows, as {found.reason}" if found.reason else ""
        how, said = "one each way", f"{rows} of about {max(numbers, 1)} numbers"
        if self.by_panels(step, loop):
            how, why = "one each way with a row in several threads", ""
            again = max(nest.stride for nest in self.nests)
            backend += f"; on the way back, {again} steps are run again at a time"
        return f"{how}, {said}{why}{backend}"

    def why_not(self, step: Step, loop: Loop) -> str | None:
        """Why a loop cannot be one kernel, if it cannot."""
        if loop.meter.is_shown:
            return "a kernel cannot report to a progress bar"
        if _is_checked():
            return "in a `shard_map` a kernel needs `check_vma=False`"
        refuse_callbacks(
            step.jaxpr.effects, "A kernel", "Use another schedule, such as Chunked"
        )
        return _declines(forward_kernel(step, loop, self.settings), _numbers(step))

    def _why_left(self, step: Step, loop: Loop) -> str | None:
        """Why a loop is left to the engine, if it is."""
        if (why := self.why_not(step, loop)) is not None:
            return why
        if self.by_panels(step, loop):
            return None
        kernel = forward_kernel(step, loop, self.settings)
        if (work := kernel.work) > MOST_OF_A_STEP:
            why = f"a row has {work:.0f} operations, too many to compile"
            return _and(why, kernel.panels)
        return kernel.why_not_tiled(self.nests) if self._is_tiled else None

    @property
    def _is_tiled(self) -> bool:
        """Whether a TPU compiles the kernels, which has nothing for all else."""
        return self.settings.tiles and not self.settings.interpret

    def _warn_if_new(self, step: Step, loop: Loop) -> None:
        """Warns of kernels that the device is the first to run."""
        device = planning_device()
        are_new = {"tpu": True, "gpu": self.by_panels(step, loop)}
        if device.is_here and are_new.get(device.platform, False):
            warn_once(_NEW)

    def by_panels(self, step: Step, loop: Loop) -> bool:
        """Whether a step is a kernel with each row in several threads."""
        return not isinstance(forward_kernel(step, loop, self.settings).panels, str)

    def _is_of(self, layout: Layout) -> bool:
        """Whether a layout stores what this expects: another schedule may be around."""
        return layout.order == Nested(self.nests) and layout.slots == DeviceSlots()


def _declines(kernel: Forward | Backward, numbers: int) -> str | None:
    """Why so many numbers that a loop carries are too many, if they are."""
    found, panels = kernel.programs.found, kernel.panels
    if numbers <= _MOST_OF_A_ROW * found.count or not isinstance(panels, str):
        return None
    if found.roots:
        return _and(f"a row carries {numbers // found.count} numbers, too many", panels)
    return f"it has no rows, as {found.reason}" if found.reason else "it has no rows"


def _and(why: str, panels: Any) -> str:
    """Why a row is too large, and is not in several threads either."""
    return f"{why}; and in several threads, {panels}" if panels else why


def _numbers(step: Step) -> int:
    return sum(aval.size for aval in step.carry_types)


def _is_checked() -> bool:
    """Whether a `shard_map` is around that checks along which axes values differ."""
    # Pallas has no such marks on the numbers in a kernel.
    manual: Any = jax.sharding.get_abstract_mesh().manual_axes
    return any(axes_of(lax.axis_index(name)) for name in manual)
