"""Jaxprs as the text of Python modules.

This room decides how operations are written and how the text is laid out. It never
changes a jaxpr.
"""

from ._handlers import register_handler
from ._module import jaxpr_to_python, to_python

__all__ = ["jaxpr_to_python", "register_handler", "to_python"]
