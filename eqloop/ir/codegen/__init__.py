"""Jaxprs as the text of Python modules.

This is where it is decided how operations are written and how the text is laid out;
nothing here changes a jaxpr.
"""

from ._handlers import register_handler
from ._module import jaxpr_to_python, to_python

__all__ = ["jaxpr_to_python", "register_handler", "to_python"]
