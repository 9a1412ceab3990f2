"""What XLA has broken before, in the form in which the library depends on it.

A canary compiles a small program, and says what is wrong with what XLA made of it: by
bytes, by counts of operations in the optimised program, or by values. Its docstring
says who depends on it, and which report it is from. `python -m tests.canaries` prints
a table for the versions that are installed.

A version that fails one gets a way around it in `eqloop/_compat.py`, beside its number;
what that file says of a version is tried here as well. Where there is no way around,
the version is refused (`_REFUSED` there, and in `pyproject.toml`).
"""

from . import buffers, keys, merging, values
from .registry import CANARIES

__all__ = ["CANARIES", "buffers", "keys", "merging", "values"]
