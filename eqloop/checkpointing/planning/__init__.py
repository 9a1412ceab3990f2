"""What a layout costs in memory and in time, and which one costs least.

This room does not run loops for the user. It reads traced steps, compiles and times
short loops of them, and draws what the engine would do. In the order in which to read
it:

- **Work and bytes of a step**, estimated: `_work.py`, `_cost.py`, and what a policy
  changes about them (`_kept_values.py`, `_computed_again.py`).
- **Time**: `_measured_pace.py` runs short loops by `_stopwatch.py`. `_known_times.py`
  remembers the results, and `_alike.py` tells which loops share them. `_paces.py` and
  `_pace_of_known.py` do this for every set of values that a step may keep.
- **Memory**: `_memory.py` compiles the program of a layout (`_gradient_program.py`),
  and `_memory_guess.py` tells from it what similar layouts take.
- **The choice**: `_search.py` lists layouts, and `_choice.py` picks the fastest that
  fits. `_two_places.py`
  chooses for a device and a second place, and `_default_batches.py` for a schedule that
  was given no budget.
"""
