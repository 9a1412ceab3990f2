"""What a layout costs in memory and in time, and which one costs least.

This room runs no loop: it reads traced steps, compiles loops of them at most, and
draws what the engine would do.
"""
