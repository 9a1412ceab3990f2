"""Rewritings: the same step, or the same loop, with less to do.

Each is a function of a step, or of the program of one, that is pure and remembered. A
plan says which of them took place (`Plan.rewritten`). What each gains is written at the
top of its file.

As a loop is traced (`checkpointing/_run.py`):

- views (`_views.py`): outputs that are `x` are taken from `xs`, outside of the loop.
- the normal form (`_normal_form.py`): what never changes is a const, references are
  leaves of the carry. It also applies the next two.
- one-hot writes (`_one_hot_writes.py`): a row that a mask selects is written, which
  takes no time in proportion to the buffer.
- delay lines (`_delay_lines.py`): a line that moves by a row is a ring, of which one
  row is written.

In a batch:

- short sums (`_short_sums.py`): a short product is a sum, before which XLA transposes
  nothing.
- masked writes (`_masked_writes.py`): examples of a loop that stops write no rows once
  they have stopped, and no buffer is selected.

Where a loop that stops is run, there and back:

- later steps (`_later_steps.py`): the first step runs by itself, and the others without
  the branches that are decided after it.
- short loops (`_short_loops.py`): loops of a few iterations in a step are written out.
  There only if that decides a branch.

On the way back of any loop:

- in place (`_in_place.py`): rows of cotangents are read before they are written, so XLA
  copies no buffer.

Where the carry has other leaves on the way back alone, another loop runs in place of
this one (`engine/_substitute.py`): equal operations on many leaves are one on an array
of them (`engine/_packing.py`).
"""
