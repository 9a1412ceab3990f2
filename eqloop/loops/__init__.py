"""The loops that a user sees: they turn a call into a step on arrays, and back.

How a step is repeated, and what is stored of it, is decided in `checkpointing`.
"""

from ._frontier import frontier
from ._scan import AbstractScan, CheckpointedScan, Scan

__all__ = ["AbstractScan", "CheckpointedScan", "Scan", "frontier"]
