"""Runs a loop as a layout says, in every mode of differentiation.

This room gets the layout. `planning` and the schedules know what a layout costs, and
which one to choose. In the order in which to read it:

- **What is run**: a step and the loop around it (`checkpointing/steps/`), which
  `checkpointing/rewrites/` has made ready. With its schedule and its policy a loop is a
  problem (`_problem.py`), and so are its derivatives (`_transformed.py`).
- **What JAX differentiates**: a primitive for the loop, `_planned_loop.py`, and one for
  its way back, `_reverse.py`.
- **What a schedule decides**: a layout (`_layout.py`), of an order (`orders/`), slots
  (`slots/`) and a reversal (`reversals/`). `_loop_spec.py` is what it is told of the
  loop, `_costs.py` and `_pace.py` what layouts are compared by, `_listing.py` a note of
  what was decided, and `_kept_names.py` the policy that a layout may choose.
- **The way there**: `_row_order.py` has `xs` in the order of their rows, `_forward.py`
  runs a loop, and `_kept_rows.py` stacks only those outputs that are kept.
  `_primal.py` is the forward sweep of a gradient, which may store more than carries:
  residuals of the last steps (`_step_parts.py`).
- **The way back**: a sweep through the loop, which is what an order is given to go back
  by (`_sweep.py`), what it does to a step (`_backward_step.py`), the same in two
  programs with the residuals in between (`_step_parts.py`), and the derivatives of that
  (`_derived.py`).
- **What is left out**: leaves of the carry that are not needed on the way back
  (`_leaves.py`).
- **Other loops in its place** run for a gradient. Many leaves that a step computes
  alike are packed into one array there (`_packing.py`). What is alike is found and run
  in `_alike_equations.py`.
"""
