"""Compiling functions, and looking at them once they are traced.

Nothing here changes what a function computes. Passes that rewrite a jaxpr are in
`eqloop.ir`.

`_jit.py` compiles a function, `_named.py` names it, `_eval_shape.py` tells what it
would return, and `_trace.py` shows its jaxpr, with `_usage.py` for what becomes of its
inputs. `_find_leaves.py` finds leaves of a tree. `_nonfinite.py` has the error of
numbers that are not finite.
"""

from ._eval_shape import EvalShape
from ._find_leaves import find_leaves
from ._jit import Jit
from ._named import Named
from ._nonfinite import NonFiniteError, raise_inside
from ._trace import RememberedCall, Trace, Traced

__all__ = [
    "EvalShape",
    "Jit",
    "Named",
    "NonFiniteError",
    "Trace",
    "Traced",
    "find_leaves",
]
