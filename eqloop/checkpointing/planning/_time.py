"""How long the gradient of a loop takes under a layout, as far as can be told."""

from ..engine._layout import Layout, Revolved, Stored
from ..engine._levels import Nest
from ._cost import StepCost
from ._work import Rates


def duration(cost: StepCost, layout: Layout, rate: Rates) -> float:
    """Nanoseconds, roughly; good for comparing layouts with one another."""
    sweep = cost.evaluation + cost.reversal + 2 * rate.iteration
    if isinstance(layout, Stored):
        return layout.length * (sweep + _residuals(cost, rate))
    # Every step but those of blocks is evaluated once more where it is reversed.
    total = layout.length * (sweep + cost.evaluation)
    total += layout.advances * (cost.evaluation + rate.iteration)
    if isinstance(layout, Revolved):
        total += layout.blocks * _block(cost, layout.block, rate)
        dynamic = layout.blocks + layout.advances
        return total + dynamic * rate.dynamic_iteration + _runs(layout) * rate.run
    total += sum(_nest(cost, nest, rate) for nest in layout.nests)
    # XLA has been seen to make half as good a program of a step that is in it twice.
    return total * (1 + 0.1 * (len(layout.nests) - 1))


def _runs(layout: Revolved) -> float:
    """About how many runs of consecutive blocks a binomial sweep reverses.

    Every segment of the primal is one at least, and none is longer than the free slots,
    which are half of them on average.
    """
    return max(layout.primal_slots, layout.blocks / (layout.primal_slots / 2 + 1))


def _nest(cost: StepCost, nest: Nest, rate: Rates) -> float:
    """What the loops of a nest take by themselves."""
    total, segments = 0.0, 1
    for count in nest.levels:
        # A loop is entered, its slots are made, and every segment starts with one.
        slot = 2 * cost.carry * rate.byte + 2 * rate.iteration
        total += segments * (3 * rate.iteration + count * slot)
        segments *= count
    return total + segments * _block(cost, nest.block, rate)


def _block(cost: StepCost, block: int, rate: Rates) -> float:
    """What it takes to store the residuals of a block and to read them."""
    if block == 1:
        return 0.0
    # The cotangents of what steps share are first summed up within the block.
    entry = (6 * cost.ct_consts + 4 * cost.carry) * rate.byte + 100 * rate.iteration
    return entry + block * (_residuals(cost, rate) + 2 * rate.iteration)


def _residuals(cost: StepCost, rate: Rates) -> float:
    return 2 * cost.residuals * rate.byte + cost.reads * rate.entry_of_reads
