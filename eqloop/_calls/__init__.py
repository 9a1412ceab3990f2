"""The call of a transform: from a function of trees to one of arrays, and back.

In the order in which a call meets them:

- the transform, its settings, and what it is generic in (`_transform.py`),
- its arguments, whose types are checked (`_arguments.py`),
- what is remembered of calls outside of `jit` (`_eager.py`),
- the call taken apart, and the types of the user's function checked (`_opening.py`),
- whether the function has changed what it holds (`_changes.py`),
- what arguments are called, and the function that JAX is handed (`_names.py`).
"""

from ._arguments import check_takes, typed, value_in_words
from ._changes import IN_THE_CARRY
from ._eager import NEEDS_VALUES, compiled_once, compiled_when
from ._names import (
    KnownAs,
    argument_names,
    array_names,
    call_names,
    named_as,
    parameters_of,
    positional_names,
)
from ._opening import (
    OpenedCall,
    Outputs,
    call_traced,
    enforce_annotations,
    explained,
    floats_left,
    open_call,
    open_gradient,
    says_floats_left,
)
from ._transform import (
    AbstractSameCall,
    AbstractTransform,
    Carry,
    Function,
    NewCarry,
    NewP,
    NewR,
    NewX,
    NewY,
    P,
    R,
    X,
    Y,
    as_count,
    as_int_if_index,
    check_bool,
    check_least,
    document_settings,
    exact_bytes,
    format_bytes,
    format_limit,
    int_of,
    parse_bytes,
    setting,
)
