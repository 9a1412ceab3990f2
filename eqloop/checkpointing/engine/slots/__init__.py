"""Slots: where carries are stored, and in which form.

`_slots.py` says what slots are, and has those on the device; `_stored_steps.py` are
steps whose carries are there. `_host_slots.py` has those in host memory (`Offload`),
and `_file_slots.py` those in files (`Spill`), which `_spill_files.py` writes and reads.
"""
