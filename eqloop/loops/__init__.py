"""The loops that a user sees: they turn a call into a step on arrays, and back.

How a step is repeated, and what is stored of it, is decided in `checkpointing`.

- **Loops of known length**: `_scan.py` has what all of them share, and the scans;
  `_open_loop.py` opens a call. Others are in `_for_loop.py`, `_sliced_scan.py`, and
  `_scan_while.py` for a scan that may end early.
- **While loops**: `_while_loop.py`, which opens their calls as well.
- **What both share**: `_carry.py` finds the dynamic leaves of a carry and checks its
  types, and `_backward.py` has what `backward=` does to a cotangent.
- **Layers**: `_stacked_layers.py` scans over equal layers, which `_stack.py` stacks,
  and their `eqx.nn.State`. `_layer_edits.py` lets `eqx.tree_at` edit one of them.
- **Prefixes**: `_associative_scan.py`, in chunks by `_prefix_sweep.py`.
"""

from ._associative_scan import AssociativeScan
from ._backward import ClipCotangent, Truncate, cut_before, cuts_of, refuse_cuts
from ._for_loop import CheckpointedForLoop, ForLoop
from ._open_loop import check_one_key
from ._scan import (
    AbstractLoop,
    AbstractScan,
    CheckpointedScan,
    Scan,
    check_schedule,
    planned_by,
)
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
    "check_schedule",
    "cut_before",
    "cuts_of",
    "planned_by",
    "refuse_cuts",
]
