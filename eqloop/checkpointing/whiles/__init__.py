"""Loops that run until their own carry says stop, and their derivatives.

The first leaf of the carry says whether the next step is run. `engine` reverses steps
and chains of steps. This room deals with the unknown number of steps, and with examples
that stop at their own time under `vmap`.
"""
