"""Loop, map and differentiation transforms for JAX and Equinox.

A transform is a PyTree: `CheckpointedScan(cell, base=16)` is an `equinox.Module` that
holds the cell it loops over, and calling it runs the loop. You can differentiate
through any loop within the memory you have.
"""

# To find your way in the source, read `docs/contributing.md`: the way of a call through
# the rooms, and what lives in each of them.
import os as _os

from jax.extend import source_info_util as _source_info_util

from . import ir
from ._arrays import accumulating_in
from ._calls import document_settings as _document_settings
from ._device import planning_for
from ._version import __version__
from .autodiff import (
    ForwardGrad,
    Grad,
    Hessian,
    JacFwd,
    Jacobian,
    JacRev,
    Jvp,
    SofoGrad,
    SofoLoss,
    VectorGrad,
    Vjp,
    losses,
)
from .branching import Cond, IfElse, Switch
from .checkpointing import (
    AbstractSchedule,
    Binomial,
    Budget,
    Cast,
    Checkpoint,
    Chunked,
    Fused,
    Layout,
    LoopSpec,
    NotInKernelError,
    Offload,
    Pinned,
    Plan,
    Recursive,
    Remat,
    Reversible,
    Spill,
    StoreAll,
    StoreLast,
    measurements,
    name,
    plans,
    policies,
)
from .debug import DebugNonFinite, breakpoint_if, error_if
from .fitting import Fit, FitFrontier, FitPlan, FittedPart
from .ir import Optimize
from .loops import (
    AbstractScan,
    AssociativeScan,
    BoundedWhileLoop,
    CheckpointedForLoop,
    CheckpointedScan,
    CheckpointedWhileLoop,
    ClipCotangent,
    ForLoop,
    Scan,
    ScanWhile,
    SlicedScan,
    StackedLayers,
    Truncate,
    WhileLoop,
)
from .mapping import ChunkedVmap, Map, MapPlan, ParallelMap, ShardMap, Vmap, unvmap
from .oom import MemoryProfile, memory_profile
from .progress import ProgressBar
from .rescheduling import ForeignLoop, Reschedule
from .resuming import Resumable
from .tracing import EvalShape, Jit, Named, NonFiniteError, Trace, Traced, find_leaves

# Where JAX says where an operation comes from, it should name the user's line.
_source_info_util.register_exclusion(_os.path.dirname(__file__) + _os.sep)

__all__ = [
    "AbstractScan",
    "AbstractSchedule",
    "AssociativeScan",
    "Binomial",
    "BoundedWhileLoop",
    "Budget",
    "Cast",
    "Checkpoint",
    "CheckpointedForLoop",
    "CheckpointedScan",
    "CheckpointedWhileLoop",
    "Chunked",
    "ChunkedVmap",
    "ClipCotangent",
    "Cond",
    "DebugNonFinite",
    "EvalShape",
    "Fit",
    "FitFrontier",
    "FitPlan",
    "FittedPart",
    "ForLoop",
    "ForeignLoop",
    "ForwardGrad",
    "Fused",
    "Grad",
    "Hessian",
    "IfElse",
    "JacFwd",
    "JacRev",
    "Jacobian",
    "Jit",
    "Jvp",
    "Layout",
    "LoopSpec",
    "Map",
    "MapPlan",
    "MemoryProfile",
    "Named",
    "NonFiniteError",
    "NotInKernelError",
    "Offload",
    "Optimize",
    "ParallelMap",
    "Pinned",
    "Plan",
    "ProgressBar",
    "Recursive",
    "Remat",
    "Reschedule",
    "Resumable",
    "Reversible",
    "Scan",
    "ScanWhile",
    "ShardMap",
    "SlicedScan",
    "SofoGrad",
    "SofoLoss",
    "Spill",
    "StackedLayers",
    "StoreAll",
    "StoreLast",
    "Switch",
    "Trace",
    "Traced",
    "Truncate",
    "VectorGrad",
    "Vjp",
    "Vmap",
    "WhileLoop",
    "__version__",
    "accumulating_in",
    "breakpoint_if",
    "error_if",
    "find_leaves",
    "ir",
    "losses",
    "measurements",
    "memory_profile",
    "name",
    "planning_for",
    "plans",
    "policies",
    "unvmap",
]

for _name in __all__:
    if isinstance(globals()[_name], type):
        _document_settings(globals()[_name])
