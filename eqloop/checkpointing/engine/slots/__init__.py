"""Slots: where carries are stored, and in which form.

`_slots.py` says what slots are, and has those on the device.
"""
