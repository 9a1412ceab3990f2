"""Loops that run until their own carry says stop, and their derivatives.

The first leaf of the carry says whether the next step is run. `engine` reverses steps
and chains of steps. This room deals with the unknown number of steps, and with examples
that stop at their own time under `vmap`:

- how such loops go on (`_stopping.py`), and scans that may end early (`_ending.py`),
- a loop of a batch whose examples stop at their own time (`_batch.py`), and its writes
  to buffers (`_masked_writes.py`),
- layouts of while loops (`_while_layout.py`): with a bound on the number of steps
  (`_bounded.py`), and without one (`_online.py`, `_spread.py`),
- scans within a step that end early (`_early_ends.py`).
"""
