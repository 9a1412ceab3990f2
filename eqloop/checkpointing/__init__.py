"""How to trade memory for recomputation.

This room works with steps on lists of arrays. It does not know about the loops that a
user sees: those turn a call into a `Step`, pass it to `run_loop`, and turn the arrays
back.
"""

from . import _policies as policies
from ._budget import Budget, is_budget, refuse_second_place
from ._frontier import Frontier, frontier_of
from ._plan import Plan, plan
from ._plans import plans
from ._policies import AUTO, as_loop_policy, as_policy, name
from ._remat import Checkpoint, Remat
from ._reversible import Reversible
from ._run import run_loop, run_while
from ._schedules import (
    AbstractSchedule,
    Binomial,
    Chunked,
    Pinned,
    Recursive,
    StoreAll,
)
from ._slot_schedules import Cast, Offload, Spill
from .engine._forward import Saveable
from .engine._layout import Layout
from .engine._listing import unlisted
from .engine._loop import Loop
from .engine._loop_spec import LoopSpec
from .engine._normal_form import normal_form
from .engine._step import Step, hoist, make_step, trace_step, with_inverse
from .planning._known_times import measurements
from .whiles._bounded import Bounded
from .whiles._online import Online
from .whiles._while_layout import UNLIMITED, ForwardOnly

__all__ = [
    "AUTO",
    "UNLIMITED",
    "AbstractSchedule",
    "Binomial",
    "Bounded",
    "Budget",
    "Cast",
    "Checkpoint",
    "Chunked",
    "ForwardOnly",
    "Frontier",
    "Layout",
    "Loop",
    "LoopSpec",
    "Offload",
    "Online",
    "Pinned",
    "Plan",
    "Recursive",
    "Remat",
    "Reversible",
    "Saveable",
    "Spill",
    "Step",
    "StoreAll",
    "as_loop_policy",
    "as_policy",
    "frontier_of",
    "hoist",
    "is_budget",
    "make_step",
    "measurements",
    "name",
    "normal_form",
    "plan",
    "plans",
    "policies",
    "refuse_second_place",
    "run_loop",
    "run_while",
    "trace_step",
    "unlisted",
    "with_inverse",
]
