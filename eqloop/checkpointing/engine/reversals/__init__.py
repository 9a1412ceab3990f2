"""Reversals: how a block of steps is taken back.

`_block_reversals.py` says what a reversal is, and has the one by stored residuals. It
also runs steps again. `_together.py` reverses steps in batches, `_known_products.py`
spares it the products that are known, and `_products_in_parts.py` the memory of those
that it adds.
"""
