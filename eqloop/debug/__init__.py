"""Finding what went wrong: where a number stopped being finite, errors, breakpoints.

Nothing here changes what a program computes.

- **What the user calls**: `_debug_non_finite.py` and `_error_if.py`.
- **A program that is checked**: `_checked.py` makes a primitive of it, and raises the
  error. `_watch.py` runs it, goes into what has programs of its own, and checks the
  rest. `_can_fail.py` tells which equations need a check.
- **What is found**: `_finding.py` carries it along as arrays, and `_sites.py` says
  where it is in the user's program.
"""

from ..tracing import NonFiniteError
from ._debug_non_finite import DebugNonFinite
from ._error_if import breakpoint_if, error_if

__all__ = ["DebugNonFinite", "NonFiniteError", "breakpoint_if", "error_if"]
