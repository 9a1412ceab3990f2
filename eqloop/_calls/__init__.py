"""The call of a transform: from a function of trees to one of arrays, and back.

In the order in which a call meets them:

- the transform (`_transform.py`) with its settings (`_settings.py`), the parameters in
  which it is generic (`_generics.py`), and the docstrings that it inherits
  (`_docstrings.py`),
- the check of its arguments (`_typecheck.py`),
- what is remembered of calls outside of `jit` (`_eager.py`, `_captures.py`),
- the call taken apart (`_opening.py`).
"""

from ._docstrings import document_settings
from ._eager import compiled_once
from ._generics import Carry, Function, NewCarry, NewP, NewR, NewX, NewY, P, R, X, Y
from ._opening import (
    OpenedCall,
    Outputs,
    argument_names,
    open_call,
    parameters_of,
    positional_names,
)
from ._settings import (
    as_count,
    as_int_if_index,
    check_bool,
    check_least,
    format_bytes,
    int_of,
    parse_bytes,
)
from ._transform import AbstractTransform, setting
from ._typecheck import enforce_annotations, explained, typed, without_annotations

__all__ = [
    "AbstractTransform",
    "Carry",
    "Function",
    "NewCarry",
    "NewP",
    "NewR",
    "NewX",
    "NewY",
    "OpenedCall",
    "Outputs",
    "P",
    "R",
    "X",
    "Y",
    "argument_names",
    "as_count",
    "as_int_if_index",
    "check_bool",
    "check_least",
    "compiled_once",
    "document_settings",
    "enforce_annotations",
    "explained",
    "format_bytes",
    "int_of",
    "open_call",
    "parameters_of",
    "parse_bytes",
    "positional_names",
    "setting",
    "typed",
    "without_annotations",
]
