"""Maps: one function over many rows, on however many of them fit at once.

What is here has no order among the rows and carries nothing from one to the next; loops
that do are in `eqloop.loops`.
"""

from ._chunked_vmap import ChunkedVmap as ChunkedVmap
from ._map import Map as Map
from ._parallel_map import ParallelMap as ParallelMap
from ._shard_map import ShardMap as ShardMap
from ._unvmap import unvmap as unvmap
from ._vmap import Vmap as Vmap

__all__ = ["ChunkedVmap", "Map", "ParallelMap", "ShardMap", "Vmap", "unvmap"]
