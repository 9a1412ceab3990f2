"""What one step of a loop costs, in bytes and in work: by abstract evaluation."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ..._partition import Arrays, Flags, pick, put
from ..._tangents import is_inexact
from ..engine import _forward
from ..engine._costs import Rates, StepCost
from ..engine._forward import Active, Saveable
from ..engine._loop import Loop
from ..engine._problem import Problem
from ..engine._step import Step
from ._work import outer_products, rates, work


@functools.lru_cache(maxsize=128)
def step_cost(problem: Problem, active: Active) -> StepCost:
    """What one step costs, given which inputs are differentiated."""
    settings = problem.loop, problem.policy, active
    return _cost_of(_PrintedStep(str(problem.step.jaxpr), rates(), settings, problem))


@dataclasses.dataclass(frozen=True)
class _PrintedStep:
    """A step in a loop. Steps that print alike cost the same."""

    text: str
    rates: Rates
    settings: tuple[Loop, Saveable, Active]
    problem: Problem = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=128)
def _cost_of(printed: _PrintedStep) -> StepCost:
    problem, rate, (*_, active) = printed.problem, printed.rates, printed.settings
    step = problem.step
    pull, stored, read = _Block(problem, active, 1).pull()
    sizes = dict(
        x=nbytes(step.x_types),
        ct_x=nbytes(pick(step.x_types, active.xs)),
        ct_y=nbytes([y for y in step.y_types if problem.loop.rows and is_inexact(y)]),
    )
    residuals = _residuals(problem, active)
    quiet = residuals
    if problem.loop.kept is not None:
        quiet = _residuals(problem, active, with_outputs=False)
    return StepCost(
        carry=nbytes(step.carry_types),
        read=nbytes(pick(step.carry_types, read)),
        walked=nbytes(pick(step.carry_types, _walked(step, read))),
        ct_consts=nbytes(pick(step.const_types, active.consts)),
        residuals=residuals,
        everything=_everything(problem.loop, residuals, quiet, **sizes),
        evaluation=work(step.jaxpr.jaxpr, rate),
        reversal=work(pull, rate),
        reads=outer_products(pull, stored),
        **sizes,
    )


def _residuals(problem: Problem, active: Active, *, with_outputs: bool = True) -> int:
    """Bytes that one step adds to the residuals of a block."""
    two, three = (_Block(problem, active, count, with_outputs) for count in (2, 3))
    return max(three.residuals() - two.residuals(), 0)


def _everything(
    loop: Loop, residuals: int, quiet: int, *, x: int, ct_x: int, ct_y: int
) -> int:
    """Bytes of the residuals of a loop, `quiet` ones where outputs are not kept."""
    total = loop.rows * residuals + (loop.length - loop.rows) * quiet
    if loop.kept is None:
        return total
    before, between, after = loop.gaps
    # A kept step and those up to the next are a loop of their own, which holds its
    # residuals separately until they are added to the others.
    total += residuals + between * (quiet + x + ct_x)
    if loop.rows and (before or after != between):
        total += loop.length * x  # `xs` are cut into parts
    copies = (after < between) + (loop.kept.step < 0)
    return total + 2 * copies * loop.rows * ct_y


def _walked(step: Step, read: Flags) -> Flags:
    """The leaves of a carry that leaves of later ones depend on, those included."""
    jaxpr, carry = step.jaxpr.jaxpr, slice(step.num_consts, None)
    while True:
        wanted = [*read, *([False] * len(step.y_types))]
        _, used = partial_eval.dce_jaxpr(jaxpr, wanted)
        merged = tuple(a or b for a, b in zip(read, used[carry], strict=False))
        if merged == read:
            return read
        read = merged


def nbytes(types: Sequence[Any]) -> int:
    """The bytes of arrays of these types."""
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in types)


def xs_types(problem: Problem, count: int) -> list[Any]:
    """The types of `xs` for a loop of so many steps."""
    axes = problem.loop.x_axes
    return [
        jex.unmapped_aval(count, axis, t)
        for t, axis in zip(problem.step.x_types, axes, strict=True)
    ]


class _Block:
    """A block of steps as JAX differentiates it, traced."""

    def __init__(
        self, problem: Problem, active: Active, count: int, with_outputs: bool = True
    ):
        self.problem = problem
        self.with_outputs = with_outputs
        self.active = active
        self.loop = problem.loop.part(count)
        step = problem.step
        xs = xs_types(problem, count)
        self.types = (step.const_types, step.carry_types, xs)

    def residuals(self) -> int:
        """Bytes of all that is kept and is not an input of the loop anyway."""

        def residuals(*inputs: Arrays) -> list[Any]:
            return jax.tree.leaves(self._vjp(inputs)[1])

        jaxpr = jax.make_jaxpr(residuals)(*self.types).jaxpr
        kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        return nbytes([var.aval for var in kept - set(jaxpr.invars)])

    def pull(self) -> tuple[Any, list[Any], Flags]:
        """Taking cotangents back, given the residuals: its jaxpr.

        Returns:
            The jaxpr, those of its inputs that are residuals and no consts, and the
            leaves of a carry without which the block is not reversed.
        """
        trees: list[Any] = []
        stored: list[bool] = []

        def residuals(*inputs: Arrays) -> Any:
            out, pull = self._vjp(inputs)
            leaves, tree = jax.tree.flatten(pull)
            consts = {id(const) for const in inputs[0]}
            trees[:], stored[:] = [tree], [id(leaf) not in consts for leaf in leaves]
            return leaves, out

        def back(leaves: Arrays, cts: Any) -> Any:
            return jax.tree.leaves(trees[0].unflatten(leaves)(cts))

        forward, (leaves, cts) = jax.make_jaxpr(residuals, return_shape=True)(
            *self.types
        )
        jaxpr = jax.make_jaxpr(back)(leaves, cts).jaxpr
        _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        wanted = [*used[: len(leaves)], *[False] * len(jax.tree.leaves(cts))]
        _, read = partial_eval.dce_jaxpr(forward.jaxpr, wanted)
        consts, carry, _ = self.types
        read = tuple(read[len(consts) :][: len(carry)])
        return jaxpr, pick(jaxpr.invars[: len(leaves)], stored), read

    def _vjp(self, inputs: Any) -> tuple[Any, Any]:
        step, policy, active = self.problem.step, self.problem.policy, self.active
        run = _forward.stored if self.loop.length > 1 else _forward.single

        def block(*marked: Arrays) -> Any:
            merged = [put(*g) for g in zip(inputs, active, marked, strict=True)]
            carry, ys = run(step, self.loop, policy, *merged)
            ys = [y for y in ys if is_inexact(y)] if self.with_outputs else []
            return pick(carry, active.carry), ys

        return jax.vjp(block, *map(pick, inputs, active))
