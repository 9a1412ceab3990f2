"""Leaves: which leaves of a carry the way back needs, and steps without the others.

`_needed_leaves.py` finds them. `_restricted_steps.py` makes steps without the other
leaves, and `_dce.py` removes from a step what nothing needs, in the loops inside it,
too. Buffers that are written row by row need not be in slots: `_rows_once.py` rebuilds
such a buffer from its first and its last state, if each row is written once, and
`_row_lists.py` finds its rows in a list of all that are written, if `_find_lists.py`
finds that one can stand for it: where that is follows from integers that `_counts.py`
knows before every step. `_list_reads.py` has a step read the few rows that it needs
there.
"""
