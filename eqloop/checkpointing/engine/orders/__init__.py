"""Orders: which carries are stored, and in which order the steps are reversed.

`_order.py` says what an order is. The arithmetic of each is in a file without JAX.
"""
