"""A step: the body of a scan on flat lists of arrays, with everything explicit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex

from ..._arrays import Arrays, Flags, closed_under, pick, split, strongly_typed
from ..._calls import Outputs, named_as
from ..._programs import (
    Rewrite,
    computed_from,
    pruned,
    reached,
    run,
    with_parts,
    without_dead_code,
    without_shifted_writes,
)
from ..._types import Aval, Value

# The carry after a step, and its `y`; of a loop, the final carry and `ys`.
StepResult: TypeAlias = tuple[list[Value], list[Value]]


class NoWayBackError(ValueError):
    """Cotangents cannot be taken back past a step, or a loop.

    It is raised to the user only if a cotangent arrives that would have to be: as a
    `ValueError`, which is what JAX raises.
    """

    def __reduce__(self) -> tuple[type[ValueError], tuple[Any, ...]]:
        return ValueError, self.args

    @classmethod
    def of(cls, error: ValueError) -> "NoWayBackError":
        """What JAX says of a step that it cannot transpose."""
        return cls(str(error))


# So it is named when it is shown.
NoWayBackError.__module__ = "builtins"
NoWayBackError.__name__ = NoWayBackError.__qualname__ = "ValueError"


@dataclasses.dataclass(frozen=True)
class Step:
    """`(consts, carry, x) -> (carry, y)`, traced once and for all.

    Attributes:
        jaxpr: The traced function. It closes over nothing: its inputs are
            `[*consts, *carry, *x]` and its outputs `[*carry, *y]`.
        num_consts: How many of the inputs are the same for every step.
        num_carry: How many of the inputs, and of the outputs, are the carry.
        inverse: A function from `[*consts, *carry, *x]`, with the carry after the step,
            to the carry before it; `None` if there is none. It belongs to this step
            alone: the step's derivative must say what its own inverse is.
        saved: Which leaves of the carry are there for the inverse alone: a step writes
            to them what it saves, and reads none of them. The inverse returns them as
            they are: those before the step are in another row. Empty if none are.
    """

    jaxpr: jex.ClosedJaxpr
    num_consts: int
    num_carry: int
    inverse: jex.ClosedJaxpr | None = None
    saved: Flags = ()

    def __call__(self, consts: Arrays, carry: Arrays, x: Arrays) -> StepResult:
        return split(run(self.jaxpr, *consts, *carry, *x), self.num_carry)

    def before(self, consts: Arrays, carry: Arrays, x: Arrays) -> list[Value]:
        """The carry before a step, which the inverse computes from the one after it."""
        assert self.inverse is not None
        return run(self.inverse, *consts, *carry, *x)

    def rewritten(self, rewrite: Rewrite) -> "Step":
        """The step with a rewritten jaxpr, which has the same signature.

        The inverse is not rewritten: it stays valid, since a rewrite keeps the meaning.
        """
        jaxpr = rewrite(self.jaxpr)
        # The same object if nothing changed: steps are keys of many caches, and a jaxpr
        # is hashed by its identity. An equal copy would be traced and planned anew.
        if jaxpr is self.jaxpr:
            return self
        return dataclasses.replace(self, jaxpr=jaxpr)

    @property
    def saves(self) -> Flags:
        """For every leaf of the carry, whether it is one of those that are `saved`."""
        return self.saved or (False,) * self.num_carry

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
    """Traces a function that closes over no tracers; `trace_step` is for others.

    `f` is `(consts, carry, x) -> (carry, y)` on lists; `x` is one element of `xs`.
    """
    num_consts, num_carry = len(const_types), len(carry_types)

    def flat(*leaves: Value) -> list[Value]:
        inputs = split(leaves, num_consts, num_carry)
        return _strongly_typed(f(*inputs), inputs[1])

    jaxpr = jax.make_jaxpr(flat)(*const_types, *carry_types, *x_types)
    return Step(pruned(jaxpr), num_consts, num_carry)


# A traced step, and the consts to run it with.
Traced: TypeAlias = tuple[Step, list[Value]]


def with_inverse(traced: Traced, saving: Traced, inverse: Traced) -> Traced:
    """A step with an inverse, and the consts that both share.

    Behind its own carry is what is saved for the inverse: the `y` of `saving`.
    """
    # They were traced one by one, and usually close over the same parameters. Arrays
    # have no `==` that would do, but are the same objects in all of them.
    every = [const for _, consts in (traced, saving, inverse) for const in consts]
    shared = list({id(const): const for const in every}.values())
    place = {id(const): i for i, const in enumerate(shared)}

    def called(of: Traced, consts: Arrays, *inputs: Arrays) -> Any:
        return of[0]([consts[place[id(const)]] for const in of[1]], *inputs)

    step, saved = traced[0], saving[0].y_types
    own = step.num_carry

    def move(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        before = carry[:own]
        after, y = called(traced, consts, before, x)
        return [*after, *called(saving, consts, before, x)[1]], y

    # `inverse` takes the carry after a step, its `x`, and behind that what was saved.
    def move_back(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        after, kept = split(carry, own)
        return [*called(inverse, consts, after, [*x, *kept])[0], *kept], ()

    types = list(map(jax.typeof, shared)), [*step.carry_types, *saved], step.x_types
    jaxpr = make_step(move_back, *types).jaxpr
    flags = (*[False] * own, *[True] * len(saved)) if saved else ()
    step = dataclasses.replace(make_step(move, *types), inverse=jaxpr, saved=flags)
    return step, shared


def without_outputs(step: Step, dropped: Sequence[bool] | None = None) -> Step:
    """The step without some leaves of `y`, and without the equations for them alone.

    `dropped` marks the leaves to leave out; all of them by default.
    """
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
    """Traces `(carry, x) -> (carry, y)`, which may close over arrays, also tracers.

    What it closes over is returned beside the step: the consts to run it with.
    """
    num_carry = len(carry_types)

    def flat(*leaves: Value) -> list[Value]:
        inputs = split(leaves, num_carry)
        return _strongly_typed(f(*inputs), inputs[0])

    # A step is one program, whose plan and bytes are those that `jit` gives it.
    with jax.disable_jit(False):
        closed = jax.make_jaxpr(named_as(flat, f))(*carry_types, *x_types)
    # JAX lifts what a function closes over to constants of the jaxpr. Here these become
    # ordinary inputs, so that they are batched and differentiated like any other.
    jaxpr, consts = closed.jaxpr, list(closed.consts)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    program = pruned(with_parts(closed, constants={}, invars=invars))
    program = without_shifted_writes(program)
    return Step(program, len(consts), num_carry), consts


def _strongly_typed(
    outs: tuple[Arrays, Arrays], before: Sequence[Value]
) -> list[Value]:
    """The outputs of a step in one list, none of them weakly typed."""
    carry, y = outs
    # `before` is as long as the carry; no `y` is compared with anything.
    given = [*before, *[None] * (len(carry) + len(y))]
    pairs = zip((*carry, *y), given, strict=False)
    # A leaf of the carry that the step returns as it came stays the same tracer: a
    # conversion would make a new variable of it, and `normal_form` recognises such
    # leaves by their variable. Its weak type, if it has one, is removed there.
    return [x if x is b else strongly_typed(x) for x, b in pairs]


def reaching(
    step: Step,
    consts: Sequence[bool],
    carry: Sequence[bool],
    x: Sequence[bool],
    **settings: Any,
) -> tuple[Flags, Flags]:
    """Which leaves of the carry and of `y` depend on the marked inputs at some step.

    A leaf of the carry is marked if it does so after any number of steps.
    """
    # The least fixed point: what one step marks in the carry, the next one starts from.
    outs = lambda carry: reached(step.jaxpr, (*consts, *carry, *x), **settings)
    marked = tuple(closed_under(carry, lambda carry: outs(carry)[: step.num_carry]))
    return marked, outs(marked)[step.num_carry :]


# Outputs that are the same at every step are computed once, outside of the loop.


def hoist(
    owner: str, step: Step, consts: Sequence[Value], outputs: Outputs, why: str
) -> tuple[Step, list[Value]]:
    """Computes the outputs with `out_axes=None` outside of the loop.

    It returns the step without them, and their values; `why` is for `check_same`.
    """
    same = outputs.same
    if not any(same):
        return step, []
    outputs.check_same(owner, _varying_outputs(step), why)
    which = (*[False] * step.num_carry, *same)
    return without_outputs(step, same), of_consts(step.jaxpr, consts, which)


def _varying_outputs(step: Step) -> list[bool]:
    """For every leaf of `y`, whether it depends on the carry or on `x`."""
    _, marks = reaching(
        step,
        consts=[False] * len(step.const_types),
        carry=[True] * len(step.carry_types),
        x=[True] * len(step.x_types),
    )
    return list(marks)


def of_consts(
    program: jex.ClosedJaxpr, consts: Sequence[Value], which: Sequence[bool]
) -> list[Value]:
    """The values of outputs that need no other inputs than consts, which come first."""
    program, read = computing(program, which)
    return run(program, *pick(consts, read[: len(consts)]))


def computing(
    program: jex.ClosedJaxpr, which: Sequence[bool]
) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """The part of a program that computes some of its outputs, and nothing else.

    It comes with which of the inputs it has.
    """
    # `without_dead_code` alone would not do. It keeps equations that have an effect, so
    # a print in the step would run once more.
    jaxpr = program.jaxpr
    outvars = pick(jaxpr.outvars, which)
    variables = [var for var in outvars if isinstance(var, jex.Var)]
    needed = computed_from(jaxpr.eqns, variables)
    eqns = [eqn for eqn in jaxpr.eqns if not needed.isdisjoint(eqn.outvars)]
    # An equation that is left may be a call, and only some of its outputs be needed:
    # dead code is looked for in it, too.
    return without_dead_code(with_parts(program, eqns=eqns, outvars=outvars))
