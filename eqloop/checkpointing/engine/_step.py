"""A step: the body of a scan on flat lists of arrays, with everything explicit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
from jax.interpreters import partial_eval

from ..._arrays import Arrays, Flags, closed_under, pick, split, strongly_typed
from ..._calls import Outputs
from ..._programs import Rewrite, computed_from, pruned, reached, run
from ..._types import Aval, Value


@dataclasses.dataclass(frozen=True)
class Step:
    """`(consts, carry, x) -> (carry, y)`, traced once and for all.

    Attributes:
        jaxpr: The traced function. It closes over nothing: its inputs are
            `[*consts, *carry, *x]` and its outputs `[*carry, *y]`.
        num_consts: How many of the inputs are the same for every step.
        num_carry: How many of the inputs, and of the outputs, are the carry.
        inverse: From `[*consts, *carry, *x]`, with the carry after a step, to the carry
            before it, if that is known. The derivatives of a step lose it, unless they
            say how it is differentiated.
    """

    jaxpr: jex.ClosedJaxpr
    num_consts: int
    num_carry: int
    inverse: jex.ClosedJaxpr | None = None

    def __call__(
        self, consts: Arrays, carry: Arrays, x: Arrays
    ) -> tuple[list[Value], list[Value]]:
        return split(run(self.jaxpr, *consts, *carry, *x), self.num_carry)

    def before(self, consts: Arrays, carry: Arrays, x: Arrays) -> list[Value]:
        """The carry before a step, from the one after it: by the inverse."""
        assert self.inverse is not None
        return run(self.inverse, *consts, *carry, *x)

    def rewritten(self, rewrite: Rewrite) -> "Step":
        """The step with another jaxpr of the same signature."""
        jaxpr = rewrite(self.jaxpr)
        same = jaxpr is self.jaxpr
        return self if same else dataclasses.replace(self, jaxpr=jaxpr)

    @property
    def const_types(self) -> list[Aval]:
        return list(self.jaxpr.in_avals[: self.num_consts])

    @property
    def carry_types(self) -> list[Aval]:
        return list(self.jaxpr.in_avals[self.num_consts :][: self.num_carry])

    @property
    def x_types(self) -> list[Aval]:
        return list(self.jaxpr.in_avals[self.num_consts + self.num_carry :])

    @property
    def y_types(self) -> list[Aval]:
        return list(self.jaxpr.out_avals[self.num_carry :])


def make_step(
    f: Callable[[list, list, list], tuple[Arrays, Arrays]],
    const_types: Sequence[Aval],
    carry_types: Sequence[Aval],
    x_types: Sequence[Aval],
) -> Step:
    """Traces `f(consts, carry, x) -> (carry, y)`, which closes over no tracers."""
    num_consts, num_carry = len(const_types), len(carry_types)

    def flat(*leaves: Value) -> list[Value]:
        inputs = split(leaves, num_consts, num_carry)
        return _strongly_typed(f(*inputs), inputs[1])

    jaxpr = jax.make_jaxpr(flat)(*const_types, *carry_types, *x_types)
    return Step(pruned(jaxpr), num_consts, num_carry)


def with_inverse(
    step: Step, consts: Arrays, inverse: Step, more: Arrays
) -> tuple[Step, list[Value]]:
    """A step that knows its inverse, and the consts of both.

    Args:
        step: The step.
        consts: What it gets each time.
        inverse: From the carry after a step and its `x` to the carry before it.
        more: What that gets each time; some may be consts of the step as well.
    """
    every = list({id(const): const for const in (*consts, *more)}.values())
    at = {id(const): i for i, const in enumerate(every)}
    types = [*map(jax.typeof, every)], step.carry_types, step.x_types

    def joint(one: Step, own: Arrays) -> Step:
        places = [at[id(const)] for const in own]
        return make_step(lambda c, *io: one([c[i] for i in places], *io), *types)

    jaxpr = joint(inverse, more).jaxpr
    return dataclasses.replace(joint(step, consts), inverse=jaxpr), every


def without_outputs(step: Step, dropped: Sequence[bool] | None = None) -> Step:
    """The step without some leaves of `y`, or all, and without what they alone need."""
    if not step.y_types:
        return step
    dropped = dropped or [True] * len(step.y_types)
    kept = (*[True] * step.num_carry, *[not drop for drop in dropped])
    return dataclasses.replace(step, jaxpr=pruned(step.jaxpr, kept))


def trace_step(
    f: Callable[[list, list], tuple[Arrays, Arrays]],
    carry_types: Sequence[Aval],
    x_types: Sequence[Aval],
) -> tuple[Step, list[Value]]:
    """Traces a function that may close over arrays, tracers among them.

    Args:
        f: `(carry, x) -> (carry, y)` on lists of arrays.
        carry_types: The type of every leaf of the carry.
        x_types: The type of every leaf of one element of `xs`.

    Returns:
        The step, and the arrays that `f` closed over: the consts to run it with.
    """
    num_carry = len(carry_types)

    def flat(*leaves: Value) -> list[Value]:
        inputs = split(leaves, num_carry)
        return _strongly_typed(f(*inputs), inputs[0])

    closed = jax.make_jaxpr(flat)(*carry_types, *x_types)
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    # What it closes over becomes its first inputs, for which there are no names.
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    jaxpr = jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed)
    return Step(pruned(jex.ClosedJaxpr(jaxpr, [])), len(consts), num_carry), consts


def _strongly_typed(
    outs: tuple[Arrays, Arrays], before: Sequence[Value]
) -> list[Value]:
    """What a step returns, with no weak types.

    A leaf that is handed on as it is stays the same variable, for `normal_form`.
    """
    carry, y = outs
    given = [*before, *[None] * (len(carry) + len(y))]
    pairs = zip((*carry, *y), given, strict=False)
    return [x if x is b else strongly_typed(x) for x, b in pairs]


def reaching(
    step: Step,
    consts: Sequence[bool],
    carry: Sequence[bool],
    x: Sequence[bool],
    **settings: Any,
) -> tuple[Flags, Flags]:
    """Which leaves of carry and `y` depend on the marked inputs, over all steps.

    Args:
        step: The step.
        consts: A mark for every const.
        carry: A mark for every leaf of the initial carry.
        x: A mark for every leaf of `x`.
        settings: Those of `reached`.

    Returns:
        The marks of the carry, which hold at every step, and those of `y`.
    """
    outs = lambda carry: reached(step.jaxpr, (*consts, *carry, *x), **settings)
    marked = tuple(closed_under(carry, lambda carry: outs(carry)[: step.num_carry]))
    return marked, outs(marked)[step.num_carry :]


# Outputs that are the same at every step: computed once, beside the loop.


def hoist(
    owner: str, step: Step, consts: Sequence[Value], outputs: Outputs, why: str
) -> tuple[Step, list[Value]]:
    """The step without the outputs that are the same each time, and their values.

    Args:
        owner: The name of the transform, for error messages.
        step: The step; its `y` are the arrays of `outputs`.
        consts: What it gets each time.
        outputs: What is to be the same.
        why: What to say of outputs that are not, see `Outputs.check_same`.

    Raises:
        ValueError: If there are some that are not.
    """
    same = outputs.same
    if not any(same):
        return step, []
    outputs.check_same(owner, _varying_outputs(step), why)
    return without_outputs(step, same), _evaluated(step, consts, same)


def _varying_outputs(step: Step) -> list[bool]:
    """For every leaf of `y`, whether it depends on the carry or on `x`."""
    _, marks = reaching(
        step,
        consts=[False] * len(step.const_types),
        carry=[True] * len(step.carry_types),
        x=[True] * len(step.x_types),
    )
    return list(marks)


def _evaluated(step: Step, consts: Sequence[Value], which: Sequence[bool]) -> list:
    """The values of outputs that depend on consts only.

    Just the equations that they need are evaluated, so that what the step does besides
    is not done once too often.
    """
    jaxpr = step.jaxpr.jaxpr
    y = jaxpr.outvars[step.num_carry :]
    outvars = pick(y, which)
    variables = [var for var in outvars if isinstance(var, jex.Var)]
    needed = computed_from(jaxpr.eqns, variables)
    eqns = [eqn for eqn in jaxpr.eqns if not needed.isdisjoint(eqn.outvars)]
    # What is left may call functions that return more than is needed of them.
    left, used = partial_eval.dce_jaxpr(
        jaxpr.replace(outvars=outvars, eqns=eqns), [True] * len(outvars)
    )
    inputs = [const for const, u in zip(consts, used, strict=False) if u]
    return run(jex.ClosedJaxpr(left, ()), *inputs)
