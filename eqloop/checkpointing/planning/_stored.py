"""What a layout stores, counted: exact enough to know which layouts to look at."""

import jax

from ..engine._layout import Layout, Nested, Revolved, Stored
from ._cost import StepCost


def stored_bytes(cost: StepCost, layout: Layout) -> int:
    """The bytes of the slots and of the residuals of a block."""
    match layout:
        case Stored():
            return cost.everything
        case Revolved():
            blocks = [layout.block] + [layout.block - layout.missing] * (
                layout.missing > 0
            )
            # Each slot has a start and a rank, of four bytes each.
            slots = layout.primal_slots * 8
            if not _is_elsewhere(layout):
                slots += (layout.primal_slots + 1) * cost.walked
        case Nested():
            blocks = [nest.block for nest in layout.nests]
            slots = _nested_slots(cost, layout)
    # A block has its own cotangents of what all steps share, and its own part of `xs`
    # and of the cotangents of `ys`.
    per_step = cost.residuals + cost.x + cost.ct_x + cost.ct_y
    return slots + sum(cost.ct_consts + n * per_step for n in blocks if n > 1)


def working_set(cost: StepCost) -> int:
    """The bytes that are allocated besides, as a guess."""
    return 4 * cost.carry + 2 * cost.ct_consts + 3 * cost.residuals


def _nested_slots(cost: StepCost, layout: Nested) -> int:
    # XLA does away with what is never read: where no step is run again but to be
    # reversed, that is what the reversal of a step does not need of its carry.
    last = cost.read if layout.block == 1 else cost.walked
    inner = (
        sum(nest.levels[1:-1]) * cost.walked + nest.levels[-1] * last
        for nest in layout.nests
        if len(nest.levels) > 1
    )
    first = 0 if _is_elsewhere(layout) else layout.primal_slots + 1
    # Nests are reversed one after the other, in the same memory.
    each = last if layout.is_flat else cost.walked
    return first * each + max(inner, default=0)


def _is_elsewhere(layout: Nested | Revolved) -> bool:
    """Whether the slots are in another memory; that of a CPU is that of its host."""
    return layout.on_host and jax.default_backend() != "cpu"
