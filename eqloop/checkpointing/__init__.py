"""How to trade memory for recomputation.

This room works with steps on lists of arrays. It does not know about the loops that a
user sees: those turn a call into a `Step`, pass it to `run_loop` of `_run.py`, and turn
the arrays back.

- **Schedules**: `_schedules.py` has those that a user sets, `_budget.py` the one that
  chooses, `_reversible.py` the one for steps that can be undone, `_fused.py` the one
  that makes a loop one kernel, and `_slot_schedules.py` those around another one, which
  say where its slots are.
- **Policies**: `_policies.py`, and a function under a policy without a loop
  (`_remat.py`).
- **Plans**, which say what will be stored and what that costs: of a loop (`_plan.py`,
  `_while_plan.py`), of all loops in a function (`_plans.py`, as `_loop_plans.py` prints
  them), which `_loop_finder.py` finds, those of JAX among them (`_jax_loops.py`,
  `_rule_loops.py`), and of one loop under all schedules (`_frontier.py`). `_plot.py`
  draws them. `_loop_options.py` has the ways to run a loop that a `Fit` decides for.
- **Rooms**: `engine/` runs a loop as its plan says, `fused/` as one kernel, `whiles/`
  does so for loops of unknown length, and `planning/` finds the fastest plan.
"""

from . import _policies as policies
from ._budget import Budget, InnerBudget, is_budget, refuse_second_place
from ._frontier import AbstractFrontier, Frontier, frontier_of
from ._fused import Fused
from ._jax_loops import JaxLoop, JaxPlan, gradient_loops
from ._loop_options import (
    LoopOption,
    LoopSchedule,
    OpenStep,
    is_left_open,
    options_of,
    with_schedule,
)
from ._loop_plans import LoopPlan, Plans
from ._plan import Plan, as_table, plan
from ._plans import own_plans, plans, stored_by_rules
from ._plot import axes_to_draw_on, format_axis, plot_frontier
from ._policies import AUTO, as_jax_policy, as_policy_or_wrong, name
from ._remat import Checkpoint, Remat
from ._reversible import Reversible, layout_by_inverse
from ._rule_loops import RuleLoop
from ._run import AsScan, form_to_plan, run_loop, run_while, usually_stored
from ._schedules import (
    AbstractSchedule,
    Binomial,
    Chunked,
    Fitted,
    LoopPolicy,
    Pinned,
    Recursive,
    StoreAll,
    StoreLast,
    as_loop_policy,
    fitting,
    is_fitting,
    left_open,
)
from ._slot_schedules import Cast, Offload, Spill
from .engine._forward import Saveable
from .engine._layout import Layout
from .engine._listing import unlisted
from .engine._loop_spec import LoopSpec, Undo
from .engine._problem import Placements
from .fused._axis_maps import AxisMap, axis_maps, has_steps
from .fused._classes import NotInKernelError
from .planning._facts import key_of, measurements, recall, remember
from .planning._notice import says_if_long, says_what_is_found
from .planning._trials import can_be_run, run_times
from .planning._work import work_of
from .rewrites._views import Viewing
from .steps._loop import Loop
from .steps._step import Step, hoist, make_step, trace_step, with_inverse
from .whiles._lockstep import trusting
from .whiles._online import Online
from .whiles._until_stop import UNLIMITED, ForwardOnly

__all__ = [
    "AbstractSchedule",
    "Binomial",
    "Budget",
    "Cast",
    "Checkpoint",
    "Chunked",
    "Frontier",
    "Fused",
    "Layout",
    "LoopSpec",
    "NotInKernelError",
    "Offload",
    "Pinned",
    "Plan",
    "Recursive",
    "Remat",
    "Reversible",
    "Spill",
    "StoreAll",
    "StoreLast",
    "measurements",
    "name",
    "plans",
    "policies",
]
