"""Loops that outlive the process: segments of a scan, with what is needed on disk.

The scan is the one of `loops`, called from Python for one segment after the other.
Nothing here knows how a step is repeated or reversed.

- **The call**: `_resumable.py` is the transform, `_open_run.py` opens a call, and
  `_gradient_call.py` that of a gradient, and of its loss, which it takes back through
  the segments.
- **The run**: `_sweep.py` goes through segments, there or back. Each is a compiled
  function (`_segment_call.py`) of its inputs (`_segment_inputs.py`, which also cuts the
  loop), and `_sources.py` reads these.
- **The directory**: `_run_record.py` says which run is in it, and compares it with the
  one at hand by their descriptions (`_in_words.py`). `_state_folder.py` has the arrays
  of one place in the loop, `_row_file.py` those that grow by segments, and
  `_tree_form.py` trees without arrays. `_disk.py` writes all of it such that a crash
  leaves nothing half done, and lets in one process, `_processes.py` several that run
  one loop together, and `_status.py` reads how far a run has come.
"""

from ._resumable import Resumable
from ._status import RunStatus

__all__ = ["Resumable", "RunStatus"]
