"""A schedule that notes what it is asked for."""

import dataclasses

from eqloop.checkpointing import AbstractSchedule
from eqloop.checkpointing.engine._forward import Active
from eqloop.checkpointing.engine._layout import Layout
from eqloop.checkpointing.engine._problem import Problem


@dataclasses.dataclass(frozen=True)
class Noted(AbstractSchedule):
    """A schedule that notes which loops it is asked for, and as what."""

    schedule: AbstractSchedule
    asked: list[tuple[Problem, Active, Layout]] = dataclasses.field(compare=False)

    def layout(self, loop):
        layout = self.schedule.layout(loop)
        self.asked.append((loop._problem, loop._active, layout))
        return layout
