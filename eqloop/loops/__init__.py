"""The loops that a user sees: they turn a call into a step on arrays, and back.

How a step is repeated, and what is stored of it, is decided in `checkpointing`.
"""

from ._abstract_loop import AbstractLoop, frontier
from ._associative_scan import AssociativeScan
from ._backward import ClipCotangent, Truncate
from ._for_loop import CheckpointedForLoop, ForLoop
from ._open_loop import check_one_key
from ._scan import AbstractScan, CheckpointedScan, Scan
from ._scan_while import ScanWhile
from ._sliced_scan import SlicedScan
from ._stacked_layers import StackedLayers
from ._while_loop import (
    AbstractWhileLoop,
    BoundedWhileLoop,
    CheckpointedWhileLoop,
    WhileLoop,
)

__all__ = [
    "AbstractLoop",
    "AbstractScan",
    "AbstractWhileLoop",
    "AssociativeScan",
    "BoundedWhileLoop",
    "CheckpointedForLoop",
    "CheckpointedScan",
    "CheckpointedWhileLoop",
    "ClipCotangent",
    "ForLoop",
    "Scan",
    "ScanWhile",
    "SlicedScan",
    "StackedLayers",
    "Truncate",
    "WhileLoop",
    "check_one_key",
    "frontier",
]
