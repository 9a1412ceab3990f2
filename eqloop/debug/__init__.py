"""Finding what went wrong: where a number stopped being finite, errors, breakpoints.

Nothing here changes what a program computes.
"""

from ..tracing import NonFiniteError
from ._debug_non_finite import DebugNonFinite
from ._error_if import breakpoint_if, error_if

__all__ = ["DebugNonFinite", "NonFiniteError", "breakpoint_if", "error_if"]
