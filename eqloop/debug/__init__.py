"""Finding what went wrong: where a number stopped being finite, errors, breakpoints.

Nothing here changes what a program computes.

- **What the user calls**: `_debug_non_finite.py` and `_error_if.py`.
- **A program that is checked**: `_program.py` names its inputs and outputs,
  `_checked.py` runs it, and makes a primitive of it. `_body.py` goes through the
  equations of one body, and `_rules.py` through those that have bodies of their own.
  `_can_fail.py` tells which equations need a check.
- **What is found**: `_finding.py` carries it along as arrays, `_context.py` says in
  which loop, call and sweep an equation is, and `_sites.py` where it is in the user's
  program.
"""

from ..tracing import NonFiniteError
from ._debug_non_finite import DebugNonFinite
from ._error_if import breakpoint_if, error_if

__all__ = ["DebugNonFinite", "NonFiniteError", "breakpoint_if", "error_if"]
