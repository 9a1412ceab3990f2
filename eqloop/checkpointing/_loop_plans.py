"""The loops of a function with their plans, as a sequence and as a table."""

import dataclasses
from collections.abc import Sequence
from typing import overload

from .._calls import format_bytes
from .._programs import Place
from ._jax_loops import JaxPlan
from ._plan import Plan, of_outputs
from ._while_plan import WhilePlan

# Below a table with loops that have no schedule.
_HINT = "rescheduled: by el.Reschedule(loss, el.Recursive(16)), inside of the gradient"


# In place of a table without loops.
_NONE = (
    "No loop is differentiated in reverse mode here, and no other has a plan. For the "
    "plans of a gradient ask the gradient: el.plans(jax.grad(f))(...). Maps have "
    "their own: el.ChunkedVmap(f, n).plan(...)."
)


@dataclasses.dataclass(frozen=True)
class LoopPlan:
    """One of the loops of a function.

    Attributes:
        name: The transform that the loop is of; `"lax.scan"`, `"lax.map"`,
            `"lax.fori_loop"` or `"lax.while_loop"` for a loop of JAX.
        place: Where it is called, if that is known.
        plan: Its plan, for the whole batch if it is batched. The plan of a while loop
            has no `relative_time`. Its `length` and `evaluations` are for the greatest
            number of steps that it may run, and `None` if there is no bound. A loop of
            JAX stores the residuals of all steps; its `plan.rescheduled` is the plan
            that it would have by `Recursive(16)`, about, or `None` if that is not
            known. If a rule says what is stored, `plan.rule` says whose.
        batch: How many examples run in it side by side. Of a loop of JAX it is not
            known, and is 1.
        depth: How many of the other loops it is inside of.
        is_second: Whether it belongs to a derivative of the gradient, as in a Hessian:
            beside each carry it has a tangent, or a cotangent.
        output_bytes: The bytes of its outputs that are used, and of their cotangents,
            on all devices together. They are no part of the plan, as no schedule
            changes them. Those of a loop of JAX are in its `plan`.
        copied_bytes: The bytes of `xs` that are transposed before it, on a CPU, and so
            are copied. They are no part of the plan, as the loop does not know it.
    """

    name: str
    place: Place | None
    plan: Plan | WhilePlan | JaxPlan
    batch: int
    depth: int
    is_second: bool = False
    output_bytes: int = 0
    copied_bytes: int = 0

    @property
    def notes(self) -> dict[str, str]:
        """What else there is to say of it, in lines."""
        plan, notes = self.plan, dict[str, str]()
        if plan.rewritten:
            notes["rewritten"] = "; ".join(plan.rewritten)
        if isinstance(plan, Plan) and plan.kernel is not None:
            notes["kernel"] = plan.kernel
        if self.is_second:
            notes["of"] = "a derivative of the gradient, with a tangent for each carry"
        notes |= of_outputs(self.output_bytes, plan.peak_bytes / 10)
        if self.copied_bytes > plan.peak_bytes / 10:
            size = format_bytes(self.copied_bytes)
            notes["transposed"] = (
                f"{size} more, as xs are transposed before the loop, which is a copy; "
                f"`vmap` of the loop, or `in_axes=1`, reads them where they are"
            )
        return plan.notes if isinstance(plan, JaxPlan) else notes


@dataclasses.dataclass(frozen=True)
class Plans(Sequence[LoopPlan]):
    """The loops of a function. An inner loop follows the loop that it is in.

    Attributes:
        loops: The loops.
        peak_bytes: The bytes that their gradients allocate at once, if each takes as
            much as its plan says from its forward pass to its backward pass. The bytes
            of a loop within another one are included in those of the outer one. Outputs
            of the loops, and their cotangents, do not count.
    """

    loops: tuple[LoopPlan, ...]
    peak_bytes: int

    def __len__(self) -> int:
        return len(self.loops)

    @overload
    def __getitem__(self, index: int) -> LoopPlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[LoopPlan, ...]: ...
    def __getitem__(self, index: int | slice) -> LoopPlan | tuple[LoopPlan, ...]:
        return self.loops[index]

    def __str__(self) -> str:
        if not self.loops:
            return _NONE
        head = ("loop", "steps", "batch", "schedule", "stored", "evaluations", "memory")
        rows = [head, *map(_row, self.loops)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        body: list[str] = []
        for line, loop in zip(lines[1:], self.loops, strict=True):
            body += [line, f"  {loop.place or 'somewhere'}"]
            body += [f"  {name}: {note}" for name, note in loop.notes.items()]
        total = f"at once: {format_bytes(self.peak_bytes)}"
        hint = [_HINT] if any("rescheduled" in loop.notes for loop in self) else []
        return "\n".join([lines[0], *body, total, *hint])


def _row(loop: LoopPlan) -> tuple[str, ...]:
    steps, *others = loop.plan.columns
    name, size = "  " * loop.depth + loop.name, format_bytes(loop.plan.peak_bytes)
    return name, steps, str(loop.batch), *others, size
