"""Where a program takes the most memory, by line, for users to read.

`_memory_profile.py` has the call, `_profile.py` what it returns, and `_advice.py` what
would take less. `__main__.py` runs a script that runs out of memory. What is read of
the compiled program is in `_compiled`.
"""

from .._compiled import Alive, LoopAt
from ._memory_profile import memory_profile
from ._profile import LineChange, MemoryChange, MemoryProfile

__all__ = [
    "Alive",
    "LineChange",
    "LoopAt",
    "MemoryChange",
    "MemoryProfile",
    "memory_profile",
]
