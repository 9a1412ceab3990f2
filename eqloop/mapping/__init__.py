"""Maps: one function over many rows, on as many at once as fit.

Rows have no order here, and nothing is carried from one to the next, unlike in
`eqloop.loops`. A row is one entry of the arguments; a chunk is the rows that are mapped
at once.

- **The transforms**: `_vmap.py`, `_map.py`, `_chunked_vmap.py`, `_parallel_map.py` and
  `_shard_map.py`, with `_unvmap.py` for what leaves a `vmap`. `_abstract_map.py` has
  what they share, and `_open_map.py` opens a call.
- **Chunks**: `_chunk_function.py` is what runs on a chunk, and `_chunk_derivatives.py`
  what becomes of it in derivatives; `_chunk_loop.py` cuts the rows into chunks and runs
  it on all of them. `_fitting.py` finds out how large chunks may be within a budget,
  and `_map_plan.py` tells the user what was found.
- **Derivatives**: `_planned_map.py` makes a primitive of a map.
- **Devices**: `_mesh.py` says which axes are split over which devices, and
  `_split_rows.py` gives each device its rows.
"""

from ._chunk_loop import equal_chunks as equal_chunks
from ._chunked_vmap import ChunkedVmap as ChunkedVmap
from ._map import Map as Map
from ._map_plan import MapPlan as MapPlan
from ._parallel_map import ParallelMap as ParallelMap
from ._planned_map import mapped_in_chunks as mapped_in_chunks
from ._shard_map import ShardMap as ShardMap
from ._unvmap import unvmap as unvmap
from ._vmap import Vmap as Vmap

__all__ = ["ChunkedVmap", "Map", "MapPlan", "ParallelMap", "ShardMap", "Vmap", "unvmap"]
