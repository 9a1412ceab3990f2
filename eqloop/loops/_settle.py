"""Traces the body of a loop until the carry that it hands back fits the one it got."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax

from ..checkpointing import Step, trace_step
from ._carry import Carry


class TracedBody(Protocol):
    """The function of a user on flat lists of arrays, for one carry.

    Attributes:
        carry: The carry.
        has_returned: Whether the function has been called, and has returned.
        new_carry: The types of the carry that it returned.
    """

    carry: Carry
    has_returned: bool
    new_carry: Any

    def __call__(
        self, carry: list[Any], x: list[Any], /
    ) -> tuple[list[Any], list[Any]]: ...


_Body = TypeVar("_Body", bound=TracedBody)


def trace_settled(
    make_body: Callable[[Carry], _Body], carry: Carry, x_types: Sequence[Any]
) -> tuple[_Body, Step, list[Any]]:
    """Traces a body for this carry, or for what the carry has to be instead.

    Args:
        make_body: From a carry to the body for it.
        carry: The carry to try first.
        x_types: What else the body gets, as `trace_step` takes it.

    Returns:
        The body, its step, and the arrays that it closes over.
    """
    while True:
        body = make_body(carry)
        carry_types = [jax.typeof(x) for x in carry.arrays]
        try:
            step, consts = trace_step(body, carry_types, x_types)
        except Exception:
            # What is right for an array may be wrong for a Python number, which has no
            # `.astype`: if there are any, they may have to be arrays.
            if body.has_returned or not carry.has_scalars:
                raise
            carry = carry.varying()
            continue
        settled = carry.settle(body.new_carry)
        if settled is carry:
            return body, step, consts
        carry = settled
