"""What a layout costs in memory and in time, and which one costs least.

This room does not run loops. It reads traced steps, compiles loops of them, and draws
what the engine would do.
"""
