"""Progress bars: what the user sets, what the device reports, what the host shows.

Loops pass the function that they run, and get it back with reports in it. This room
does not know how a loop is stored or reversed.

- **The user**: `_bar.py` has the settings of a bar.
- **The device**: a meter (`_meter.py`) reports, from loops of known length
  (`_reporting.py`) and from while loops, whose steps are counted (`_counted.py`).
  `_changes.py` says what becomes of bars in programs that are run again.
- **The host**: `_display.py` shows bars, and `_host_bar.py` moves one from Python.
"""

from ._bar import ProgressBar, as_progress, check_progress
from ._changes import Again, BarChange, Guarded
from ._counted import counted, while_with_bar, with_count
from ._host_bar import host_bar
from ._meter import NO_BAR, NO_BARS, Gauge, Label, Meter, make_meter, tied
from ._reporting import run_with_bar, scan_with_bar, step_with_bar

__all__ = [
    "NO_BAR",
    "NO_BARS",
    "Again",
    "BarChange",
    "Gauge",
    "Guarded",
    "Label",
    "Meter",
    "ProgressBar",
    "as_progress",
    "check_progress",
    "counted",
    "host_bar",
    "make_meter",
    "run_with_bar",
    "scan_with_bar",
    "step_with_bar",
    "tied",
    "while_with_bar",
    "with_count",
]
