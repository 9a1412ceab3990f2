"""Progress bars: what the user sets, what the device reports, what the host shows.

Where in a loop it reports is known to the loops; nothing here knows one.
"""

from ._bar import ProgressBar, as_progress
from ._meter import Gauge, Label, Meter, along, divisor, make_meter
from ._mute import guarded, muted

__all__ = [
    "Gauge",
    "Label",
    "Meter",
    "ProgressBar",
    "along",
    "as_progress",
    "divisor",
    "guarded",
    "make_meter",
    "muted",
]
