"""The view of a loop that a schedule gets, and how it cuts the loop into segments.

Schedules are written with this, including those of other projects. It shows a part of
a `Problem`, which has everything that the engine knows about the loop.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from ..._arrays import Flags, pick, refuse_symbolic
from ._layout import Layout
from ._loop import nbytes
from ._problem import Planner, activity, needs_of_gradient
from .orders._segmented import Segmented
from .reversals._block_reversals import ByResiduals


@dataclasses.dataclass(frozen=True)
class LoopSpec:
    """A loop to plan, as a schedule sees it.

    The library makes it, and passes it to the `layout` of a schedule.

    Args:
        problem: The loop.
        active: Which of its inputs are differentiated.

    Examples:
        >>> import dataclasses
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> @dataclasses.dataclass(frozen=True)
        ... class AtMost(el.AbstractSchedule):
        ...     nbytes: int
        ...     def layout(self, loop: el.LoopSpec) -> el.Layout:
        ...         slots = self.nbytes // loop.slot_bytes
        ...         return loop.cut([(loop.length, el.Binomial(slots))])
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> scan = el.Scan(step, schedule=AtMost(10_000))
        >>> scan.plan(jnp.zeros(100), jnp.zeros((1000, 100))).slots
        26
    """

    # Annotated with `Any`, since public types would otherwise lead into the engine.
    problem: Any = dataclasses.field(repr=False)
    active: Any = dataclasses.field(repr=False)

    @property
    def length(self) -> int:
        """How many steps the loop has."""
        refuse_symbolic(
            type(self.problem.planner).__name__,
            self.problem.loop.length,
            "planning the gradient of a loop",
            "Use `schedule=el.StoreAll()`, or export for each length by itself",
        )
        return self.problem.loop.length

    @property
    def carry_bytes(self) -> int:
        """The bytes of a carry."""
        return nbytes(self.problem.step.carry_types)

    @property
    def slot_bytes(self) -> int:
        """The bytes that a slot takes: those of the leaves that are read again."""
        return nbytes(pick(self.problem.step.carry_types, self._held))

    def cut(self, segments: Iterable[tuple[int, Planner]]) -> Layout:
        """The loop as segments, one after the other.

        The primal stores the carry at the start of each segment. On the way back, last
        segment first, each segment is run again from there, and reversed as its own
        schedule plans; a segment of one step is reversed at once. Equal segments that
        follow one another share one loop in the program. Steps are reversed together if
        all schedules have the same `batch`.

        Args:
            segments: How many steps each segment has, and the schedule for it. With
                [`StoreAll`][eqloop.StoreAll] the residuals of the segment are stored
                together; with `Chunked(1)` each of its carries.

        Returns:
            What a schedule returns from `layout`.

        Raises:
            TypeError: If a number of steps is not an int, or a schedule is none.
            ValueError: If the segments do not add up to the loop, or one has an
                [`Offload`][eqloop.Offload], which is for the whole schedule.

        Examples:
            See [`AbstractSchedule`][eqloop.AbstractSchedule].
        """
        layouts = [self._layout_of(count, schedule) for count, schedule in segments]
        orders = [layout.order.as_part() for layout in layouts]
        owner = type(self.problem.planner).__name__
        if sum(order.length for order in orders) != self.length:
            lengths = ", ".join(str(order.length) for order in orders)
            raise ValueError(
                f"{owner}: the segments that are passed to `loop.cut` must add up to "
                f"the length of the loop, {self.length}, and they are: "
                f"{lengths or 'none'}."
            )
        # Equal orders that follow one another share one loop.
        parts = [(len(list(same)), order) for order, same in itertools.groupby(orders)]
        # A sweep has one reversal for all of its blocks.
        reversals = {layout.reversal for layout in layouts}
        reversal = reversals.pop() if len(reversals) == 1 else ByResiduals()
        return Layout(Segmented(tuple(parts)), reversal=reversal)

    def _layout_of(self, count: object, schedule: Any) -> Layout:
        """The layout that a segment's schedule decides on."""
        owner = type(self.problem.planner).__name__
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise TypeError(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps, an int of at least 1, and a schedule. Its number of steps is "
                f"{count!r}."
            )
        if not hasattr(schedule, "layout"):
            raise TypeError(
                f"{owner}: a segment that is passed to `loop.cut` must be a number of "
                f"steps and a schedule, such as `el.Chunked(1)`. Its schedule is "
                f"{schedule!r}."
            )
        loop = self.problem.loop.part(count)
        problem = dataclasses.replace(self.problem, loop=loop, planner=schedule)
        layout: Layout = schedule.layout(LoopSpec(problem, self.active))
        if layout.slots != Layout(layout.order).slots:
            raise ValueError(
                f"{owner}: the slots of a segment are on the device, and cannot be "
                f"those of {schedule!r}. Pass the schedule within to `loop.cut`, and "
                f"wrap the whole one: `el.{type(schedule).__name__}({owner}(...))`."
            )
        return layout

    @property
    def has_policy(self) -> bool:
        """Whether residuals of the steps may be stored."""
        return self.problem.policy is not None

    @property
    def has_inverse(self) -> bool:
        """Whether there is an inverse of the step."""
        return self.problem.step.inverse is not None

    @property
    def has_slots(self) -> bool:
        """Whether slots hold anything: whether a leaf of the carry is read again."""
        return any(self._held)

    @property
    def _held(self) -> Flags:
        """Which leaves of the carry slots hold, if steps are reversed one by one."""
        step = self.problem.step
        # `active` is closed already; this only finds the outputs that have a tangent.
        _, y_active = activity(step, self.active)
        return needs_of_gradient(self.problem, self.active, y_active).held
