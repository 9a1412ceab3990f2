"""What a layout costs in memory and in time, and which one costs least.

This room does not run loops for the user. It reads traced steps, compiles and times
short loops of them, and draws what the engine would do. In the order in which to read
it:

- **Work and bytes of a step**, estimated: `_work.py`, `_cost.py`, and what a policy
  changes about them (`_kept_values.py`).
- **What pieces take**: `_trials.py` compiles short loops, each of one kind of piece,
  for the device, and runs them, or tells their time from the program (`_roofline.py`).
  `_paces.py` corrects the estimates by it. `_compile_times.py` says where that would
  take too long. `_facts.py` remembers what was found, and `_alike.py` tells which loops
  share it.
- **Memory**: `_memory.py` compiles the program of a layout (`_gradient_program.py`),
  and `_memory_guess.py` tells what layouts take from others that are alike.
- **The choice**: `_search.py` lists layouts, also those whose carries are in a second
  place, and `_choice.py` picks the fastest that fits, or all that no other one beats.
  `_default_batches.py` chooses for a schedule that was given no budget.
- `_notice.py` says so if it takes long.
"""
