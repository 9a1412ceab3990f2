"""A loop over many independent rows as one kernel each way, by Pallas.

- **Which axes are rows**: `_axes.py` puts the axes of a program into classes,
  `_pending.py` finds those along which it is a map. `_windows.py` has gathers and
  scatters as one. `_axis_maps.py` asks the same of one operation, for other rooms.
- **A row**: `_one_row.py` makes the program of one row, and `_numbers.py` evaluates it,
  number by number, for a block of rows. `_entries.py` has numbers that are yet to be
  read or computed, `_tiles.py` multiplies by larger matrices, and `_formulas.py` has
  the functions that backends lack.
- **The kernels**: `_leaves.py` reads and writes arrays as they lie, `_kernels.py` has
  the loop there and the one back, and `_pallas.py` is all that Pallas is asked.
- **In the engine**: `_runner.py` runs a loop of a layout by them.
"""
