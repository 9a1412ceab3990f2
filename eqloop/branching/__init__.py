"""Running one of several functions, chosen while the program runs.

Repeating a function is for `loops`; choosing one while tracing is for Python's `if`.

The transforms are in `_cond.py`, `_switch.py` and `_if_else.py`. `_branches.py` traces
their branches and runs one of them, and `_agreement.py` checks that all branches return
the same kind of result.
"""

from ._cond import Cond
from ._if_else import IfElse
from ._switch import Switch

__all__ = ["Cond", "IfElse", "Switch"]
