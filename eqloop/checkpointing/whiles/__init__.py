"""Loops that run until their own carry says stop, and their derivatives.

The first leaf of the carry says whether the next step is run. How a step is reversed,
and a chain of them, is known to `engine`; here is what is not known beforehand: how
many steps there are, and that under `vmap` each example stops at its own time.
"""
