"""The problem of the front page, whose gradient takes gigabytes by `lax.scan`."""

from collections.abc import Sequence

import jax

import eqloop as el

from .. import _loops as loops
from .._claims import memory, time_ratio
from .._comparison import Comparison
from .._problems import loss, sequences

BUDGET = el.Budget("256MiB")


def gradient(run):
    """The gradient of the weights, for the mean loss of a batch of sequences."""

    def mean_loss(cell, init, xs):
        return jax.vmap(loss(run), in_axes=(None, None, 0))(cell, init, xs).mean()

    return jax.grad(mean_loss)


def gigabytes() -> Sequence[Comparison]:
    """Ten thousand steps, of which every gradient fits a common machine."""
    args = sequences(10_000)
    plain, within = loops.lax_scan(), loops.ours(BUDGET)
    rows = [
        plain,
        loops.lax_scan_of_remat(),
        loops.nested(100, 100),
        loops.equinox(),
        within,
        loops.ours(el.Recursive(16)),
    ]
    return [
        Comparison(
            "Gradient of the weights: 32 sequences of 10,000 steps, GRU of width 256",
            [loop.case(gradient, args) for loop in rows],
            [memory(within.name, 2**28), time_ratio(within.name, plain.name, 1.25)],
            tolerance=1e-3,
            rounds=5,
        )
    ]
