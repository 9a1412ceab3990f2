"""Jaxprs as the text of Python modules.

This room decides how operations are written and how the text is laid out. It never
changes a jaxpr.

- **The module**: `_module.py` writes it, one function after the other in a `_scope.py`.
  `_reads.py` tells which equations are written.
- **Operations**: `_handlers.py` finds who writes an operation, users' handlers
  included. Most are in tables of `_operations.py`; `_control.py`, `_derivatives.py`
  and `_combine.py` have those that need more than a table.
- **The text**: `_names.py` has the names of variables, `_values.py` numbers and
  parameters, and `_lines.py` breaks lines.
"""

from ._handlers import register_handler
from ._module import jaxpr_to_python, to_python

__all__ = ["jaxpr_to_python", "register_handler", "to_python"]
