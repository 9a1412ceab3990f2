"""What is run: steps, the loops around them, and what a step does with its carry.

A step has everything explicit (`_step.py`), and so has the loop around it (`_loop.py`).
`_dce.py` removes from a step what nothing needs, in the loops inside it, too.

What a step does with buffers in its carry is found in `_buffers.py`, where
`_known_values.py` stand for values. A buffer that is written row by row can be known
before every step without being stored: `_rows_once.py` rebuilds it from its first and
its last state, if each row is written once, and `_row_lists.py` finds its rows in a
list of all that are written, if `_find_lists.py` finds that one can stand for it. Where
that is follows from integers that `_counts.py` knows before every step. A step reads
the few rows that it needs there by `_list_reads.py`.
"""
