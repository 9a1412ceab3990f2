"""Loops that outlive the process: segments of a scan, with what is needed on disk.

The scan is the one of `loops`, called from Python for one segment after the other.
Nothing here knows how a step is repeated or reversed.
"""

from ._resumable import Resumable
from ._status import RunStatus

__all__ = ["Resumable", "RunStatus"]
