"""Loop, map and differentiation transforms for JAX and Equinox.

A transform is a PyTree: `CheckpointedScan(cell, base=16)` is an `equinox.Module` that
holds the cell it loops over, and calling it runs the loop. You can differentiate
through any loop within the memory you have.
"""

# To find your way in the source, read `docs/contributing.md`: the way of a call through
# the rooms, and what lives in each of them.
import os as _os
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from jax.extend import source_info_util as _source_info_util

from ._version import __version__

if _TYPE_CHECKING:
    from . import ir
    from ._arrays import accumulating_in
    from ._device import planning_for
    from .autodiff import *
    from .branching import *
    from .checkpointing import *
    from .debug import DebugNonFinite, breakpoint_if, error_if
    from .fitting import *
    from .ir import Optimize
    from .loops import *
    from .mapping import *
    from .oom import MemoryProfile, memory_profile
    from .progress import *
    from .rescheduling import ForeignLoop, Reschedule
    from .resuming import Resumable
    from .tracing import *

# The public names of each room. A room is imported when something of it is asked for:
# importing them all takes half as long as it takes to import JAX and Equinox.
_ROOMS = {
    "_arrays": "accumulating_in",
    "_device": "planning_for",
    "autodiff": "ForwardGrad Grad Hessian JacFwd JacRev Jacobian Jvp SofoGrad SofoLoss "
    "VectorGrad Vjp losses",
    "branching": "Cond IfElse Switch",
    "checkpointing": "AbstractSchedule Binomial Budget Cast Checkpoint Chunked Fused "
    "Layout LoopSpec NotInKernelError Offload Pinned Plan Recursive Remat Reversible "
    "Spill StoreAll StoreLast measurements name plans policies",
    "debug": "DebugNonFinite breakpoint_if error_if",
    "fitting": "Fit FitFrontier FitPlan FittedPart",
    "ir": "Optimize",
    "loops": "AbstractScan AssociativeScan BoundedWhileLoop CheckpointedForLoop "
    "CheckpointedScan CheckpointedWhileLoop ClipCotangent ForLoop Scan ScanWhile "
    "SlicedScan StackedLayers Truncate WhileLoop",
    "mapping": "ChunkedVmap Map MapPlan ParallelMap ShardMap Vmap unvmap",
    "oom": "MemoryProfile memory_profile",
    "progress": "ProgressBar",
    "rescheduling": "ForeignLoop Reschedule",
    "resuming": "Resumable",
    "tracing": "EvalShape Jit Named NonFiniteError Trace Traced find_leaves",
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted(["__version__", "ir", *_ROOM_OF])  # pyright: ignore

# Where JAX says where an operation comes from, it should name the user's line.
_source_info_util.register_exclusion(_os.path.dirname(__file__) + _os.sep)


def __getattr__(name: str) -> object:
    """A public name, or a room: whatever is asked for, for the first time."""
    if name in _ROOMS:
        return _import_module(f".{name}", __name__)
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _import_module(f".{_ROOM_OF[name]}", __name__)
    document = _import_module("._calls", __name__).document_settings
    for each in _ROOMS[_ROOM_OF[name]].split():
        value = globals()[each] = getattr(room, each)
        if isinstance(value, type):
            document(value)
    return globals()[name]


def __dir__() -> list[str]:
    """All that can be asked for."""
    return sorted({*globals(), *__all__, *_ROOMS})
