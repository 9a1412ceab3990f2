"""How to trade memory for recomputation.

This room knows steps on lists of arrays, and nothing of the loops above it that a user
sees: those turn a call into a `Step`, hand it to `run` and turn the arrays back.
"""

from . import _policies as policies
from ._frontier import Frontier, frontier
from ._plan import Plan, plan
from ._policies import as_policy, name
from ._remat import Checkpoint, Remat
from ._run import run
from ._schedule import (
    AbstractSchedule,
    Binomial,
    Budget,
    Chunked,
    Offload,
    Recursive,
    StoreAll,
)
from .engine._layout import Layout
from .engine._loop import Loop
from .engine._problem import LoopSpec
from .engine._step import Step, trace_step

__all__ = [
    "AbstractSchedule",
    "Binomial",
    "Budget",
    "Checkpoint",
    "Chunked",
    "Frontier",
    "Layout",
    "Loop",
    "LoopSpec",
    "Offload",
    "Plan",
    "Recursive",
    "Remat",
    "Step",
    "StoreAll",
    "as_policy",
    "frontier",
    "name",
    "plan",
    "policies",
    "run",
    "trace_step",
]
