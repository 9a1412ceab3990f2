"""Progress bars: what the user sets, what the device reports, what the host shows.

Where in a loop it reports is known to the loops; nothing here knows one.
"""

from ._bar import ProgressBar, as_progress, check_progress
from ._meter import Gauge, Label, Meter, make_meter, open_back, tied
from ._mute import guarded, muted
from ._telling import hops, opened, told, told_back, told_scan, watched, watched_step

__all__ = [
    "Gauge",
    "Label",
    "Meter",
    "ProgressBar",
    "as_progress",
    "check_progress",
    "guarded",
    "hops",
    "make_meter",
    "muted",
    "open_back",
    "opened",
    "tied",
    "told",
    "told_back",
    "told_scan",
    "watched",
    "watched_step",
]
