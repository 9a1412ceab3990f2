"""Maps: one function over many rows, on however many of them fit at once.

What is here has no order among the rows and carries nothing from one to the next; loops
that do are in `eqloop.loops`.
"""

from ._chunked_vmap import ChunkedVmap as ChunkedVmap

__all__ = ["ChunkedVmap"]
