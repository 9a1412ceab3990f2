"""Plans of while loops: what is stored, and what a gradient will cost."""

import dataclasses
import math
from typing import ClassVar

from .._calls import format_bytes
from .._programs import notes_of_layouts
from ._plan import as_table
from .engine._forward import Active
from .planning._cost import step_cost
from .planning._memory import Maps, bytes_of_guards, loop_bytes, with_a_little_more
from .planning._memory_guess import working_set
from .rewrites import _in_place
from .steps._find_lists import leaves_written
from .whiles._online import Online
from .whiles._stopping import UntilStopped


@dataclasses.dataclass(frozen=True)
class WhilePlan:
    """How a while loop is stored and reversed, and what a gradient will cost.

    How many steps the loop runs is not known beforehand. Printed, it is a table.

    Attributes:
        peak_bytes: Bytes that a gradient allocates at once, besides its inputs and
            outputs, however many steps are run.
        rewritten: What was done to the step for this loop, in sentences.
        length: The most steps that the loop runs, if there is a bound.
        slots: How many carries are stored at once, at the most.
        evaluations: How often a gradient evaluates the step if all `length` steps are
            run. The primal is included. A loop with `checkpoints` takes no more than
            the fewest evaluations that are possible as long as no step is evaluated
            more than 3 times: that is, for `slots * (slots + 3) / 2` steps. For more
            steps this is the least, and it may take a few per cent more. `None` if
            there is no bound on the steps.
        levels: As for a [`Scan`][eqloop.Scan]: none, as nothing is nested.
        block: How many consecutive steps have their residuals stored together.
    """

    peak_bytes: int
    rewritten: tuple[str, ...] = dataclasses.field(repr=False)
    length: int | None = dataclasses.field(repr=False)
    slots: int = dataclasses.field(repr=False)
    evaluations: int | None = dataclasses.field(repr=False)
    _layout: Online = dataclasses.field(repr=False)
    levels: ClassVar[tuple[tuple[int, ...], ...]] = ()
    block: ClassVar[int] = 1

    @property
    def columns(self) -> tuple[str, str, str, str]:
        """Steps, schedule, what is stored, and evaluations, in a few words each."""
        layout, most = self._layout, self._layout.spreading.most_thrice
        steps, count = "any", f"3 a step up to {most} steps"
        if self.length is not None:
            about = "about" if self.length > most else "<="
            steps, count = f"<= {self.length}", f"{about} {self.evaluations}"
        if layout.strides is not None:
            count = "2 a step"
        setting = f"checkpoints={layout.checkpoints}"
        return steps, setting, f"{self.slots} carries", count

    def __str__(self) -> str:
        steps, setting, _, evaluations = self.columns
        rows = [
            ("steps", steps),
            ("stored carries", str(self.slots)),
            ("rewritten", "; ".join(self.rewritten)),
            ("evaluations", evaluations),
            ("peak memory", format_bytes(self.peak_bytes)),
        ]
        return as_table(setting, rows)


def while_plan_of(
    problem: UntilStopped, active: Active, layout: Online, maps: Maps
) -> WhilePlan:
    """The plan of a while loop.

    By `maps`, `vmap`s around its gradient, every example is reversed by itself.
    """
    batch = math.prod(axis_data.size for axis_data, _ in maps)
    size = loop_bytes(problem, active, layout, maps)
    if size is None:
        of_carry = active.carry[problem.lead :]
        cost = step_cost(problem.counted, active._replace(carry=of_carry))
        size = batch * (layout.carries * cost.held + working_set(cost))
    size += batch * bytes_of_guards(problem)
    loop, step = problem.loop, problem.reversed_step(problem.step)
    for note in [*layout.notes(step), *notes_of_layouts(step.jaxpr)]:
        loop = loop.noting(note)
    written = zip(leaves_written(step), active.carry[problem.lead :], strict=True)
    loop = loop.noting(_in_place.NOTE, [*[False] * problem.lead, *map(all, written)])
    counts = layout.length, layout.stored, layout.evaluations
    return WhilePlan(with_a_little_more(size), loop.rewritten, *counts, layout)
