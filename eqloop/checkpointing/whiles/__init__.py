"""Loops that run until their own carry says stop, and their derivatives.

The first leaf of the carry says whether the next step is run. `engine` reverses steps
and chains of steps. This room deals with the unknown number of steps, and with examples
that stop at their own time under `vmap`.

- **The kinds of loops**: `_stopping.py` is a while loop, `_ending.py` a scan that may
  end before its length.
- **Where carries are stored**: in a scan, as its schedule says. `_online.py` stores a
  given number of carries of a loop of any length, or none: `_spread.py` decides which
  slot gives way as the loop goes on. `_until_stop.py` runs the steps in between.
- **Batches**: `_batch.py` runs all examples as one loop, in which those that have
  stopped write nothing. `_lockstep.py` is for steps that can see their batch.
"""
