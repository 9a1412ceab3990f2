"""Progress bars: what the user sets, what the device reports, what the host shows.

Loops pass the function that they run, and get it back with reports in it. This room
does not know how a loop is stored or reversed.
"""

from ._bar import ProgressBar, as_progress, check_progress
from ._changes import Again, BarChange, Guarded
from ._counted import counted, told_while, with_count
from ._host_bar import host_bar
from ._meter import NO_BARS, Gauge, Label, Meter, make_meter, tied
from ._telling import hops, told_back, told_scan, watched_step

__all__ = [
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
    "hops",
    "host_bar",
    "make_meter",
    "tied",
    "told_back",
    "told_scan",
    "told_while",
    "watched_step",
    "with_count",
]
