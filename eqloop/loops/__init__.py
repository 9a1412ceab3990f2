"""The loops that a user sees: they turn a call into a step on arrays, and back.

How a step is repeated, and what is stored of it, is decided in `checkpointing`.

- **Loops of known length**: `_loop.py` has what all of them share. `_open_loop.py`
  opens a call, of which `_step_checks.py` refuses what is wrong, and `_opened_loop.py`
  runs it. The scans are in `_scan.py`, others in `_for_loop.py`, `_sliced_scan.py`, and
  `_scan_while.py` for a scan that may end early.
- **While loops**: `_while_loop.py`, which opens their calls as well.
- **What both share**: `_carry.py` finds the dynamic leaves of a carry and checks its
  types, and `_backward.py` has what `backward=` does to a cotangent, such as
  to clip it (`_clip.py`).
- **Layers**: `_stacked_layers.py` scans over equal layers, each of which is a step
  (`_layer_step.py`). `_stack.py` stacks them and their `eqx.nn.State`.
- **Prefixes**: `_associative_scan.py`.
"""

from ._associative_scan import AssociativeScan
from ._backward import Truncate, cut_before, cuts_of, refuse_cuts
from ._clip import ClipCotangent
from ._for_loop import CheckpointedForLoop, ForLoop
from ._loop import AbstractLoop, check_schedule, planned_by
from ._scan import AbstractScan, CheckpointedScan, Scan
from ._scan_while import ScanWhile
from ._sliced_scan import SlicedScan
from ._stacked_layers import StackedLayers
from ._step_checks import check_one_key
from ._while_loop import (
    AbstractWhileLoop,
    BoundedWhileLoop,
    CheckpointedWhileLoop,
    WhileLoop,
)

__all__ = [
    "AbstractScan",
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
]
