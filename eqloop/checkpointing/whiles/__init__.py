"""Loops that run until their own carry says stop, and their derivatives.

The first leaf of the carry says whether the next step is run. How a step is
reversed, or a chain of steps, is the business of `engine`; this room deals with what is
not known beforehand: how many steps there are, and that under `vmap` each example stops
at its own time.
"""
