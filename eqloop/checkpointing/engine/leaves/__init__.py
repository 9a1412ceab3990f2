"""Leaves: which leaves of a carry the way back needs, and steps without the others.

`_needed_leaves.py` finds them. `_restricted_steps.py` makes steps without the other
leaves, and `_dce.py` removes from a step what nothing needs, in the loops inside it,
too. Buffers that are written row by row need not be in slots: `_rows_once.py` rebuilds
such a buffer from its first and its last state.
"""
