"""Rewritings: the same step, with less to do.

Each is a function of a step, or of the program of one, that is pure and remembered. A
plan says which of them took place (`Plan.rewritten`), by the `NOTE` in the file. What
each gains is what steps that do little else take without it, on a CPU.

As a loop is traced (`checkpointing/_run.py`), in any mode:

- `_views.py`: outputs that are `x` are taken from `xs`, outside of the loop. It gains a
  copy of these rows.
- `_normal_form.py`: what never changes is a const, and references are leaves of the
  carry. It gains a row in each slot. It also applies the next two:
- `_one_hot_writes.py`: a row that a mask selects is written alone: 40 x the time.
- `_delay_lines.py`: a line that moves by a row becomes a ring, of which one row is
  written: 40 x the time, 4 x the memory.

In a batch:

- `_short_sums.py`: a short product becomes a sum, for which XLA transposes nothing: 1.4
  to 2.2 x the time.
- `_masked_writes.py`: examples of a loop that stops write no rows once they have
  stopped, and no buffer is selected: 14 x the time, 1.5 x the memory.

Where a loop that stops is run, there and back (`whiles/`):

- `_later_steps.py`: steps after the first run without the branches that it decides: 1.2
  to 2.1 x the time.
- `_short_loops.py`: loops of a few iterations in a step are written out, on the way
  there only if that decides a branch: 1.5 to 2.4 x the time.

On the way back of any loop (`Sweep.take`):

- `_in_place.py`: rows of cotangents are read before they are written, so that XLA
  copies no buffer: 3 to 8 x the time.

Where any of this library's primitives is run on a CPU (`_programs/_layouts.py`),
convolutions and products are laid out for XLA's library: 10 to 60 x the time.

What changes the carry for a gradient alone is another loop in place of this one: leaves
that are computed alike are packed into one array (`engine/_packing.py`).
"""
