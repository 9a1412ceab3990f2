"""Opens the call of a while loop: from `(cond, body, init)` to a step on arrays.

The step of such a loop has one more leaf in its carry, the first: whether `cond` holds
for what follows it.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._arrays import axes_of, describe, is_dynamic, partition, split, vary
from .._calls import enforce_annotations, explained
from .._programs import refuse_refs, without_derivatives
from .._types import PyTree, Value
from ..checkpointing import Step, make_step, trace_step
from ..progress import Label
from ._carry import Carry, Words, trace_settled


def _call_on_carry(function: str, carry: PyTree) -> str:
    return f"`{function}(carry)` with\n  carry = {eqx.tree_pformat(carry)}"


_WORDS = Words(
    carry="the carry",
    path="carry",
    f="body",
    step="step",
    call=lambda carry, x, keywords: _call_on_carry("body", carry),
)


@dataclasses.dataclass(frozen=True)
class OpenedWhile:
    """A call of a while loop as a step on arrays.

    Attributes:
        step: `body`, with `cond` of what it returns.
        consts: The arrays that are the same for every step.
        init: Whether `cond` holds for the carry, and the leaves of it that vary.
        starts: The numbers of Python that these were at first.
        close: Turns the final carry, a list of arrays, into what the user gets.
        label: Makes what is written before a progress bar of the user's function.
    """

    step: Step
    consts: list[Value]
    init: list[Value]
    starts: tuple[int | None, ...]
    close: Callable[[list[Value]], PyTree]
    label: Callable[[Callable[[int, PyTree, PyTree], str]], Label]


def open_while(
    owner: str,
    cond: Callable[..., PyTree],
    body: Callable[..., PyTree],
    init: PyTree,
    *,
    is_bounded: bool,
) -> OpenedWhile:
    """Opens a call.

    Args:
        owner: The name of the transform, for error messages.
        cond: From the carry to whether there is another step.
        body: From the carry to the next one.
        init: The initial carry.
        is_bounded: Whether the loop stops even if `cond` always holds.
    """
    refuse_refs(owner, init, _WORDS.path)
    settled = trace_settled(
        lambda carry, _: _explained(owner, "body", body, carry),
        lambda out: (out, [], None),
        Carry.of(owner, init, _WORDS),
        x_types=[],
    )
    step, carry = settled.step, settled.carry
    condition = Condition.of(owner, cond, carry, is_bounded)
    holds = condition(condition.consts, carry.arrays)
    parts = (cond, body, carry.tree)
    if not varies_with(parts, holds):
        # Devices stop at different times, so whatever the steps compute differs.
        varied = varied_with(parts, holds)
        return open_while(owner, *varied, is_bounded=is_bounded)

    def joint(
        consts: list[Value], carry: list[Value], x: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        of_body, of_cond = split(consts, len(settled.consts))
        carry, _ = step(of_body, carry[1:], x)
        return [condition(of_cond, carry), *carry], []

    starts = None, *carry.starts(init)
    consts, init = [*settled.consts, *condition.consts], [holds, *carry.arrays]
    const_types, carry_types = (list(map(jax.typeof, x)) for x in (consts, init))
    return OpenedWhile(
        step=make_step(joint, const_types, carry_types, []),
        consts=consts,
        init=init,
        starts=starts,
        close=lambda final: settled.final(final[1:]),
        label=lambda desc: Label.of(desc, step.carry_types, [], carry.join, _no_y),
    )


def _no_y(arrays: list[Value]) -> None:
    """What a step returns besides the carry."""


def varies_with(tree: PyTree, like: PyTree) -> bool:
    """Whether all arrays of a tree may differ between devices where another does."""
    return all(axes_of(like) <= axes_of(leaf) for leaf in partition(tree)[0])


def varied_with(tree: PyTree, like: PyTree) -> PyTree:
    """A tree whose arrays may differ between devices where another array does."""
    move = lambda x: vary(jnp.asarray(x), axes_of(like)) if is_dynamic(x) else x
    return jax.tree.map(move, tree)


@dataclasses.dataclass(frozen=True)
class Condition:
    """`cond` as a function of arrays.

    Attributes:
        step: It as a step that has no carry: its `x` is that of the loop.
        consts: What it closes over.
    """

    step: Step
    consts: list[Value]

    @classmethod
    def of(
        cls, owner: str, cond: Callable[..., PyTree], carry: Carry, is_bounded: bool
    ) -> Self:
        """Traces it for a carry."""

        def on_arrays(
            _: list[Value], arrays: list[Value]
        ) -> tuple[list[Value], list[Value]]:
            out = _explained(owner, "cond", cond, carry.join(arrays))
            return [], [_as_condition(owner, out, is_bounded)]

        return cls(*trace_step(on_arrays, [], [jax.typeof(x) for x in carry.arrays]))

    def __call__(self, consts: list[Value], carry: list[Value]) -> PyTree:
        """Whether it holds."""
        # What is not differentiated need not be differentiable.
        consts, carry = without_derivatives((consts, carry))
        _, (holds,) = self.step(consts, [], carry)
        return holds


def _as_condition(owner: str, out: PyTree, is_bounded: bool) -> PyTree:
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


def _explained(
    owner: str, name: str, f: Callable[..., PyTree], carry: PyTree
) -> PyTree:
    with explained(owner, _call_on_carry(name, carry)):
        return enforce_annotations(f)(carry)
