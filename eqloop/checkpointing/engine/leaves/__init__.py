"""Leaves: which leaves of a carry the way back needs, and steps without the others.

`_needed_leaves.py` finds them. `_slim_steps.py` makes steps without the other leaves,
and `_lean_loops.py` cuts down the loops inside a step. Buffers that are written row by
row need not be in slots: `_rows_once.py` rebuilds such a buffer from its first and its
last state.
"""
