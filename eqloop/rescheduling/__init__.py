"""Loops that are written with JAX alone, run as loops of this library.

A function is traced, and in its program each `lax.scan` and each `lax.while_loop`
becomes a planned loop. Users find nothing here but the transform: how a loop is planned
and run is decided in `checkpointing`.

- **The transform**: `_reschedule.py`.
- **The program**: `_rewriting.py` finds the loops in it, decides which are taken, and
  writes others in their places, whose steps tell something to the host once, however
  often they are run. `_in_place.py` runs one loop in the place of JAX's own.
- **What is said of loops**: `_foreign_loop.py`.
"""

from ._foreign_loop import ForeignLoop
from ._reschedule import Reschedule, RescheduledLoops
from ._rewriting import with_open_loops

__all__ = ["ForeignLoop", "Reschedule", "RescheduledLoops", "with_open_loops"]
