"""Loop, map and differentiation transforms for JAX and Equinox.

A transform is a PyTree: `CheckpointedScan(cell, base=16)` is an `equinox.Module` that
holds the cell it loops over, and calling it runs the loop. You can differentiate
through any loop within the memory that you have.
"""

from ._version import __version__
from .checkpointing import (
    Binomial,
    Budget,
    Checkpoint,
    Chunked,
    Offload,
    Plan,
    Recursive,
    Remat,
    StoreAll,
    name,
    policies,
)
from .loops import CheckpointedScan, Scan, frontier
from .mapping import ChunkedVmap

__all__ = [
    "Binomial",
    "Budget",
    "Checkpoint",
    "CheckpointedScan",
    "Chunked",
    "ChunkedVmap",
    "Offload",
    "Plan",
    "Recursive",
    "Remat",
    "Scan",
    "StoreAll",
    "__version__",
    "frontier",
    "name",
    "policies",
]
