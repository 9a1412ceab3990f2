"""Jaxprs that a person can read: rewriting them, writing them as Python, drawing them.

This room takes programs that JAX has traced. Transforms that work while tracing are in
the other rooms, and none of them uses this one.

- **Passes**, one in a file: `_fold.py`, `_algebra.py`, `_copies.py`, `_common.py`,
  `_dead_code.py` and `_inline.py`. `_optimize.py` runs them until nothing changes, and
  `_optimized.py` is the function that runs the result.
- **What passes work with**: `_atoms.py` looks at jaxprs, `_build.py` makes one of
  equations, `_parts.py` finds the jaxprs inside an equation, and `_primitives.py` knows
  the properties of JAX's primitives. Jaxprs are rewritten by the room `_programs`.
- **Pictures**: `_dot.py` writes the graph of a jaxpr for Graphviz, `_draw.py` draws it,
  and writes jaxprs as trees of text.
- **Python**: `codegen/` writes jaxprs as modules.
"""

from ._algebra import simplify_algebra
from ._build import eqns_to_closed_jaxpr, eqns_to_jaxpr
from ._common import eliminate_common_subexpressions
from ._copies import propagate_copies
from ._dead_code import eliminate_dead_code
from ._dot import to_dot, to_pydot
from ._draw import Drawing, draw
from ._fold import constant_fold
from ._inline import inline_jit
from ._optimize import PASSES, Report, optimize
from ._optimized import Optimize
from .codegen import jaxpr_to_python, register_handler, to_python

__all__ = [
    "PASSES",
    "Drawing",
    "Optimize",
    "Report",
    "constant_fold",
    "draw",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "eqns_to_closed_jaxpr",
    "eqns_to_jaxpr",
    "inline_jit",
    "jaxpr_to_python",
    "optimize",
    "propagate_copies",
    "register_handler",
    "simplify_algebra",
    "to_dot",
    "to_pydot",
    "to_python",
]
