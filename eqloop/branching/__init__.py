"""Running one of several functions, chosen while the program runs.

Repeating a function is for `loops`; choosing one while tracing is for Python's `if`.
"""

from ._cond import Cond
from ._if_else import IfElse
from ._switch import Switch

__all__ = ["Cond", "IfElse", "Switch"]
