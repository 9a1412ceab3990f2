"""A loop over many independent rows as one kernel each way, by Pallas.

- **Which axes are rows**: `_classes.py` has the classes of axes, `_axes.py` puts those
  of a program into them, by `_axis_rules.py`, and `_pending.py` finds those along which
  it is a map. `_windows.py` has gathers and scatters as one. `_axis_maps.py` asks the
  same of one operation, for other rooms.
- **A row**: `_one_row.py` makes the program of one row. `_lowered.py` writes it by few
  operations: each other one is a function of JAX, of arrays there, of what only moves
  them in `_by_moves.py`, of numbers in `_formulas.py`, and of complex ones in
  `_complex.py`. `_numbers.py` evaluates that program, number by number, for a block
  of rows. `_scope.py` has its arrays, and `_entries.py` the numbers that are yet to be
  read or computed. Its operations are in `_elementwise.py`, `_moves.py`,
  `_products.py`, `_indexing.py` and `_control.py`; `_tiles.py` multiplies by larger
  matrices.
- **The kernels**: `_leaves.py` reads and writes arrays as they lie. What the loop there
  (`_forward.py`) and the one back (`_backward.py`) share is in `_row_programs.py`. Both
  run in pieces (`_pieces.py`), and `_sums.py` adds up over rows. `_more_rows.py` makes
  one kernel of those of a batch, and `_pallas.py` is all that Pallas is asked.
  `_mosaic.py` writes programs by the operations that its backend Mosaic GPU has, and
  `_tpu.py` has them run on TPUs.
- **Cells**: rows with vectors of units, which are multiplied by matrices that all rows
  share. `_panels.py` has their programs, by some units of all rows of a block,
  `_panel_rooms.py` the shared memory that they take, `_panel_block.py` what a block
  runs, by tensor cores, `_panel_kernels.py` the kernels, and `_panel_loops.py` a loop
  of them and its way back.
- **In the engine**: `_runner.py` runs a loop of a layout by them. `_nests.py` says
  which carries are stored, and `_choice.py` finds the kernel that a budget takes.
"""
