"""Jaxprs as the text of Python modules.

What decides what an operation is written as stands here, and how the text is laid out;
nothing here changes a jaxpr.
"""

from ._handlers import register_handler as register_handler
from ._module import jaxpr_to_python as jaxpr_to_python
from ._module import to_python as to_python
