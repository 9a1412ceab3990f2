"""Runs a loop as a layout says, in every mode of differentiation.

This room gets the layout. `planning` and the schedules know what a layout costs, and
which one to choose.
"""
