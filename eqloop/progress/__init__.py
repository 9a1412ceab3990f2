"""Progress bars: what the user sets, what the device reports, what the host shows.

Loops pass the function that they run, and get it back with reports in it. This room
does not know how a loop is stored or reversed.

- **The user**: `_bar.py` has the settings of a bar.
- **The device**: `_meter.py` has what reports, and `_reporting.py` the loops of each
  kind that do.
- **The host**: `_display.py` shows bars.
"""

from ._bar import ProgressBar, as_progress, check_progress, host_bar
from ._meter import (
    NO_BAR,
    NO_BARS,
    Again,
    BarChange,
    Gauge,
    Guarded,
    Label,
    Meter,
    make_meter,
    tied,
)
from ._reporting import (
    counted,
    run_with_bar,
    scan_with_bar,
    step_with_bar,
    while_with_bar,
    with_count,
)

__all__ = ["ProgressBar"]
