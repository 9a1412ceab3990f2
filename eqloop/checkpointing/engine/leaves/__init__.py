"""Leaves: which leaves of a carry the way back needs, and steps without the others.

`_needed_leaves.py` finds them. `_restricted_steps.py` makes steps without the other
leaves. Buffers that are written row by row need not be in slots, if they can be known
before every step without that (`steps/`).
"""
