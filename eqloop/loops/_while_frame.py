"""The frame of every while loop: from `(cond, body, init)` to a step on arrays.

The step of such a loop has one more leaf in its carry, the first: whether `cond` holds
for what follows it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._effects import refuse_refs
from .._lists import split
from .._partition import describe, is_dynamic
from .._typecheck import enforce_annotations, explained
from ..checkpointing import Step
from ..checkpointing.engine._step import make_step
from ..checkpointing.whiles._varying import axes_of, vary
from ..progress import Label
from ._carry import Carry, types_of
from ._settle import trace_settled
from ._words import Words


def _call(function: str, carry: Any) -> str:
    return f"`{function}(carry)` with\n  carry = {eqx.tree_pformat(carry)}"


_WORDS = Words(
    carry="the carry",
    path="carry",
    f="body",
    step="step",
    call=lambda carry, x, keywords: _call("body", carry),
)


@dataclasses.dataclass(frozen=True)
class OpenedWhile:
    """A call of a while loop, taken apart.

    Attributes:
        step: `body`, with `cond` of what it returns.
        consts: The arrays that are the same for every step.
        init: Whether `cond` holds for the carry, and the leaves of it that vary.
        close: Turns the final carry, a list of arrays, into what the user gets.
        label: Makes what is written before a progress bar of the user's function.
    """

    step: Step
    consts: list[Any]
    init: list[Any]
    close: Callable[[list[Any]], Any]
    label: Callable[[Callable[[int, Any, Any], str]], Label]


def open_while(
    owner: str,
    cond: Callable[..., Any],
    body: Callable[..., Any],
    init: Any,
    *,
    is_bounded: bool,
) -> OpenedWhile:
    """Takes a call apart.

    Args:
        owner: The name of the transform, for error messages.
        cond: From the carry to whether there is another step.
        body: From the carry to the next one.
        init: The initial carry.
        is_bounded: Whether the loop stops even if `cond` always holds.
    """
    refuse_refs(owner, init, _WORDS.path)
    traced, step, consts = trace_settled(
        lambda carry: _Body(owner, body, carry), Carry.of(owner, init, _WORDS), []
    )
    carry = traced.carry
    condition = _Condition.of(owner, cond, carry, is_bounded)
    holds = condition(condition.consts, carry.arrays)
    parts = (cond, body, carry.tree)
    if not all(axes_of(holds) <= axes_of(leaf) for leaf in _arrays(parts)):
        # Devices stop at different times, so whatever the steps compute is different.
        varied = jax.tree.map(lambda x: _vary(x, axes_of(holds)), parts)
        return open_while(owner, *varied, is_bounded=is_bounded)
    num_consts = len(consts)

    def joint(
        consts: list[Any], carry: list[Any], x: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        of_body, of_cond = split(consts, num_consts)
        carry, _ = step(of_body, carry[1:], x)
        return [condition(of_cond, carry), *carry], []

    consts, init = [*consts, *condition.consts], [holds, *carry.arrays]
    const_types, carry_types = (list(map(jax.typeof, x)) for x in (consts, init))
    return OpenedWhile(
        step=make_step(joint, const_types, carry_types, []),
        consts=consts,
        init=init,
        close=lambda final: carry.final(final[1:], traced.new_carry),
        label=lambda desc: Label.of(desc, step.carry_types, [], carry.join, _no_y),
    )


def _no_y(arrays: list[Any]) -> None:
    """What a step returns beside the carry."""


def _arrays(tree: Any) -> list[Any]:
    return list(filter(is_dynamic, jax.tree.leaves(tree)))


def _vary(leaf: Any, axes: frozenset[str]) -> Any:
    return vary(jnp.asarray(leaf), axes) if is_dynamic(leaf) else leaf


class _Body:
    """`body` on a flat list of arrays; remembers what it returned."""

    new_carry: Any

    def __init__(self, owner: str, body: Callable[..., Any], carry: Carry) -> None:
        self.owner = owner
        self.body = body
        self.carry = carry
        self.has_returned = False

    def __call__(self, arrays: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        carry = self.carry.join(arrays)
        with explained(_note(self.owner, "body", carry)):
            out = enforce_annotations(self.body)(carry)
        self.has_returned = True
        self.new_carry = types_of(out)
        return self.carry.take(out), []


@dataclasses.dataclass(frozen=True)
class _Condition:
    """`cond` on a flat list of arrays. No derivative is taken of it.

    Attributes:
        jaxpr: The traced function, of `[*consts, *carry]`.
        consts: The arrays that it closed over.
    """

    jaxpr: Any
    consts: list[Any]

    @classmethod
    def of(
        cls, owner: str, cond: Callable[..., Any], carry: Carry, is_bounded: bool
    ) -> "_Condition":
        def flat(*arrays: Any) -> Any:
            tree = carry.join(list(arrays))
            with explained(_note(owner, "cond", tree)):
                out = enforce_annotations(cond)(tree)
            return _as_condition(owner, out, is_bounded)

        closed = jax.make_jaxpr(flat)(*(jax.typeof(x) for x in carry.arrays))
        return cls(closed.jaxpr, list(closed.consts))

    def __call__(self, consts: list[Any], carry: list[Any]) -> Any:
        # What is not differentiated need not be differentiable.
        consts, carry = jax.tree.map(lax.stop_gradient, (consts, carry))
        (holds,) = jax.core.eval_jaxpr(self.jaxpr, consts, *carry)
        return holds


def _as_condition(owner: str, out: Any, is_bounded: bool) -> Any:
    if isinstance(out, bool | np.bool_):
        if out and not is_bounded:
            raise ValueError(
                f"{owner}: `cond` returned the constant True, so the loop would never "
                f"stop. Return an array that depends on the carry, as in `x > 0`, or "
                f"bound the number of steps, as `el.BoundedWhileLoop` does."
            )
        return jnp.asarray(out)
    is_array = isinstance(out, jax.Array | np.ndarray)
    if not is_array or out.shape or out.dtype != bool:
        raise TypeError(
            f"{owner}: `cond` must return a scalar boolean, but it returned "
            f"{describe(out)}. Compare it (`x > 0`), reduce it (`jnp.any`), or map "
            f"over the loop (`jax.vmap`)."
        )
    return jnp.asarray(out)


def _note(owner: str, function: str, carry: Any) -> str:
    return f"This was raised while {owner} traced {_call(function, carry)}"
