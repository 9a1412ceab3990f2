"""Reversals: how a block of steps is taken back.

`_block_reversals.py` says what a reversal is, and has the one by stored residuals.
"""
