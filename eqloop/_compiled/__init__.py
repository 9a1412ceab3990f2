"""What is alive in the memory of a compiled program, and which lines made it.

XLA writes down what it has compiled (`_dump.py`): the scheduled program, with the lines
of Python, and the memory that it assigned. `_wire.py` reads the encoding and
`_program.py` what it says. `_lives.py` finds what is alive at once, and `_origins.py`
where that comes from. `_peak.py` puts it together, and `_alive.py` is what users see.
"""

from ._alive import Alive, Kind, LoopAt
from ._dump import compiled, programs_in, with_all_frames
from ._lives import Heap, Life, heaps_of
from ._origins import Origins
from ._peak import arrays_at_peak, largest_array
from ._program import CompiledProgram
