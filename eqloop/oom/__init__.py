"""What is alive where a program takes the most memory, and which lines made it.

XLA writes down what it has compiled (`_dump.py`): the scheduled program, with the lines
of Python, and the memory that it assigned. `_wire.py` reads the encoding and
`_program.py` what it says. `_lives.py` finds what is alive at once, and `_origins.py`
where that comes from. `_alive.py` and `_profile.py` have what users see,
`_memory_profile.py` the call, and `_advice.py` what would take less. `__main__.py` runs
a script that runs out of memory.
"""

from ._alive import Alive, LoopAt
from ._memory_profile import memory_profile, profiled
from ._profile import LineChange, MemoryChange, MemoryProfile

__all__ = [
    "Alive",
    "LineChange",
    "LoopAt",
    "MemoryChange",
    "MemoryProfile",
    "memory_profile",
    "profiled",
]
