"""One budget for a whole function: what is stored of each of its parts.

- **The transform**: `_fit.py`, which makes a primitive of the function
  (`_fitted_call.py`), so that it is planned where it is differentiated.
- **Parts**: `_cut.py` holds the program of the function, cut by `_parts.py` into loops
  and what lies between them. `_options.py` finds what each part may store, and what
  that takes. `_rules.py` puts decided loops into the rule of a `jax.custom_jvp`.
- **Rows**: `_ranges.py` finds what can run some of its rows at a time: all that is
  along one dimension, or what is around large values, by who computes and reads each
  value (`_dataflow.py`) and how rows lie in each operation (`_row_axes.py`).
  `_by_rows.py` runs it so, in parts for which is decided again. `_maxima.py` leaves
  maxima over rows for later.
- **Decisions**: `_choice.py` chooses among these by one price of a byte, in integers
  and without JAX. `_whole.py` compiles the whole gradient, and `_decision.py` corrects
  the price. `_remembered.py` writes what was decided for other processes.
- **On the way back**: `_again.py` runs parts again, and keeps XLA from merging the two
  runs. `_written.py` finds which values it writes to memory.
- **Plans** for the user: `_fit_plan.py`; several of them: `_fit_frontier.py`.
"""

from ._fit import Fit
from ._fit_frontier import FitFrontier
from ._fit_plan import FitPlan, FittedPart

__all__ = ["Fit", "FitFrontier", "FitPlan", "FittedPart"]
