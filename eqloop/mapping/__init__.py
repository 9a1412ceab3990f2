"""Maps: one function over many rows, on as many at once as fit.

Rows have no order here, and nothing is carried from one to the next, unlike in
`eqloop.loops`. A row is one entry of the arguments; a chunk is the rows that are mapped
at once.
"""

from ._chunked_vmap import ChunkedVmap as ChunkedVmap
from ._map import Map as Map
from ._parallel_map import ParallelMap as ParallelMap
from ._shard_map import ShardMap as ShardMap
from ._unvmap import unvmap as unvmap
from ._vmap import Vmap as Vmap

__all__ = ["ChunkedVmap", "Map", "ParallelMap", "ShardMap", "Vmap", "unvmap"]
