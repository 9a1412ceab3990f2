"""How a loop calls its parts when it has to speak of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx


def step_call(carry: Any, x: Any, keywords: dict[str, Any]) -> str:
    """The call of a step, and its arguments."""
    call = ", ".join(["carry", "x", *(f"{name}={name}" for name in keywords)])
    return (
        f"`f({call})` with\n"
        f"  carry = {eqx.tree_pformat(carry)}\n  x = {eqx.tree_pformat(x)}"
    )


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a loop for error messages.

    Attributes:
        carry: What its carry is called.
        path: The same where paths of its leaves start.
        f: What is called at each step.
        step: What comes one after the other.
        call: From the arguments of a call of `f`, `(carry, x, keywords)`, to a text
            that shows them.
    """

    carry: str
    path: str
    f: str
    step: str
    call: Callable[[Any, Any, dict[str, Any]], str]


OF_A_SCAN = Words("the carry", "carry", "f", "step", step_call)
