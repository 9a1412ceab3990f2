"""Runs a loop by a layout, forwards and backwards, in every mode of differentiation.

This room is given the layout; what a layout costs, and which one to choose, is known to
`planning` and to the schedules.
"""
