"""How to trade memory for recomputation.

This room knows steps on lists of arrays, and nothing of the loops above it that a user
sees: those turn a call into a `Step`, hand it to `run` and turn the arrays back.
"""

from . import _policies as policies
from ._loop import Loop as Loop
from ._policies import as_policy as as_policy, name as name
from ._remat import Checkpoint as Checkpoint, Remat as Remat
from ._run import run as run
from ._schedule import (
    AbstractSchedule as AbstractSchedule,
    Binomial as Binomial,
    Chunked as Chunked,
    Recursive as Recursive,
    StoreAll as StoreAll,
)
from ._step import Step as Step, trace_step as trace_step

__all__ = [
    "AbstractSchedule",
    "Binomial",
    "Checkpoint",
    "Chunked",
    "Loop",
    "Recursive",
    "Remat",
    "Step",
    "StoreAll",
    "as_policy",
    "name",
    "policies",
    "run",
    "trace_step",
]
