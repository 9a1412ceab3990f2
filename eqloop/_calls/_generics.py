"""What transforms are generic in: the parameters and the results of their functions.

A type checker that cannot follow how a transform is made, as mypy cannot where there
are settings alone, takes `Any` for each of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R = TypeVar("R", default=Any)
    Carry = TypeVar("Carry", default=Any)
    Y = TypeVar("Y", default=Any)
    X = TypeVar("X", default=Any)
    Function = TypeVar("Function", default=Any)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R = TypeVar("R")
    Carry = TypeVar("Carry")
    Y = TypeVar("Y")
    X = TypeVar("X")
    Function = TypeVar("Function")

# The same, of the function that is given to an `_of`: see `_transform.py`.
NewP = ParamSpec("NewP")
NewR = TypeVar("NewR")
NewCarry = TypeVar("NewCarry")
NewY = TypeVar("NewY")
NewX = TypeVar("NewX")
