"""What one step of a loop costs, in bytes and in work: by abstract evaluation."""

import dataclasses
import functools

import jax
import jax.extend.core as jex

from ..._partition import Arrays, pick, put, union
from ..._tangents import is_inexact
from ..._typecheck import PyTree
from ..._types import AnyJaxpr, Aval, Value
from ..engine import _forward
from ..engine._costs import Rates, StepCost
from ..engine._forward import Active, Saveable
from ..engine._held import leaves_read
from ..engine._kept_steps import parts_of, rows_per_step
from ..engine._loop import Loop, nbytes
from ..engine._problem import (
    Problem,
    again,
    gradient_back,
    needs_of_gradient,
    settled_problem,
)
from ..engine._products_in_parts import product_bytes
from ..engine._slim import Known, slim
from ..engine._slots import DeviceSlots
from ._work import outer_products, rates, work

_VERY_LONG = 2**40


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
    wanted = tuple(problem.loop.rows > 0 and is_inexact(y) for y in step.y_types)
    back = gradient_back(problem, active, wanted)
    parts = parts_of(back, problem.loop.part(1))
    pull = parts.rest.jaxpr
    is_const = [at is not None and at < step.num_consts for at in parts.source]
    stored = pick(pull.invars[: len(is_const)], [not c for c in is_const])
    needs = needs_of_gradient(problem, active, wanted)
    forward = again(settled_problem(problem, active, reverse=True))
    known = Known.of(needs, forward, problem.loop_back)
    read = union(leaves_read(back, problem.loop), known.firsts)
    read = [r and h for r, h in zip(read, needs.held, strict=True)]
    held_types = tuple(pick(step.carry_types, needs.held))
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
        held=nbytes(held_types),
        held_types=held_types,
        ct_consts=nbytes(pick(step.const_types, active.consts)),
        products=product_bytes(pull, sum(active.consts)),
        residuals=residuals,
        rows=rows_per_step(slim(back, known), problem.loop, DeviceSlots()),
        everything=_everything(problem.loop, residuals, quiet, **sizes),
        evaluation=work(step.jaxpr.jaxpr, rate),
        reversal=work(pull, rate),
        reads=outer_products(pull, stored),
        **sizes,
    )


def _residuals(problem: Problem, active: Active, *, with_outputs: bool = True) -> int:
    """Bytes that one step adds to the residuals of a block."""
    # It takes as long to trace a long block as a short one. In this one, the steps have
    # so many residuals that what they share is less than a byte for each of them.
    return _Block(problem, active, _VERY_LONG, with_outputs).residuals() // _VERY_LONG


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


def residual_program(problem: Problem, active: Active) -> AnyJaxpr:
    """A step that is differentiated, up to what its reversal reads: a jaxpr."""
    return _Block(problem, active, 1).forward()


def xs_types(problem: Problem, count: int) -> list[Aval]:
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
        jaxpr = self.forward()
        kept = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}
        return nbytes([var.aval for var in kept - set(jaxpr.invars)])

    def forward(self) -> AnyJaxpr:
        """Computing the residuals: its jaxpr."""

        def residuals(*inputs: Arrays) -> list[Value]:
            return jax.tree.leaves(self._vjp(inputs)[1])

        return jax.make_jaxpr(residuals)(*self.types).jaxpr

    def _vjp(self, inputs: PyTree) -> tuple[Value, Value]:
        step, policy, active = self.problem.step, self.problem.policy, self.active
        run = _forward.stored if self.loop.length > 1 else _forward.single

        def block(*marked: Arrays) -> Value:
            merged = [put(*g) for g in zip(inputs, active, marked, strict=True)]
            carry, ys = run(step, self.loop, policy, *merged)
            ys = [y for y in ys if is_inexact(y)] if self.with_outputs else []
            return pick(carry, active.carry), ys

        return jax.vjp(block, *map(pick, inputs, active))
