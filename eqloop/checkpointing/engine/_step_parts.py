"""A backward step in two programs, so that its residuals can be stored in between.

`ahead` goes from the inputs of a step to its residuals, and `rest` from these and the
cotangents after the step to those before it:

    backward step    h -> cos(h)    c -> c cos(h)       for the step `sin(h)`
    ahead            h -> cos(h)
    rest             cos(h), c -> c cos(h)

The primal may store the residuals of the last steps (`KnownResiduals`).
"""

import dataclasses
import functools

import jax.extend.core as jex

from ..._arrays import Arrays, Flags, pick, put, split, zero_array
from ..._programs import (
    jvp_of,
    parted,
    pruned,
    reached,
    run,
    traced,
    with_parts,
    without_dead_code,
)
from ..._types import Aval, Index, Value
from ..rewrites._in_place import in_place
from ..steps._loop import element
from ..steps._step import Step, computing, of_consts
from ._backward_step import (
    Back,
    BackwardStep,
    BlockEnds,
    BlockResult,
    program_with_outputs,
)
from .slots._slots import AbstractSlots


@dataclasses.dataclass(frozen=True)
class StepParts:
    """A backward step in two programs.

    Attributes:
        ahead: From consts, a carry and `x` to the residuals.
        rest: From the residuals, `z` and `carried` to the outputs, see `BlockResult`.
        outs: How many sums and how many leaves of `carried` are among these outputs.
        source: For each residual that is itself a const or a leaf of `x`, the place of
            that input: it need not be kept. `None` for the others.
        varies: Which residuals differ from step to step.
    """

    ahead: jex.ClosedJaxpr
    rest: jex.ClosedJaxpr
    outs: tuple[int, int]
    source: tuple[int | None, ...]
    varies: tuple[bool, ...]

    @property
    def kept(self) -> list[bool]:
        """Which residuals have to be kept for each step."""
        at = zip(self.source, self.varies, strict=True)
        return [source is None and varies for source, varies in at]

    @property
    def kept_types(self) -> list[Aval]:
        return pick(self.ahead.out_avals, self.kept)

    def fixed(self, consts: Arrays) -> list[Value]:
        """The residuals that are the same for all steps, and are no const."""
        at = zip(self.source, self.varies, strict=True)
        is_fixed = [source is None and not varies for source, varies in at]
        return of_consts(self.ahead, consts, is_fixed)

    def residuals(
        self, consts: Arrays, x: Arrays, kept: Arrays, fixed: Arrays
    ) -> list[Value]:
        """All residuals of a step, whose consts may be followed by others.

        `kept` are those that were kept of it, `fixed` those that are the same for all.
        """
        own, same = iter(kept), iter(fixed)
        # `source` names only consts and leaves of `x`, as the carry is not known.
        first_x = len(self.ahead.in_avals) - len(x)
        inputs = {**dict(enumerate(consts)), **dict(enumerate(x, first_x))}
        return [
            inputs[source] if source is not None else next(own if varies else same)
            for source, varies in zip(self.source, self.varies, strict=True)
        ]

    def take(self, residuals: Arrays, ends: BlockEnds) -> BlockResult:
        """Goes back past a step with all of its residuals, without evaluating it.

        What is zero among the `ends` is `None`.
        """
        carried, z = ends
        arrived = tuple(end is not None for end in (*z, *carried))
        rest = self.rest if all(arrived) else _rest_for(self.rest, arrived)
        outs = run(in_place(rest), *residuals, *pick([*z, *carried], arrived))
        return BlockResult(*split(outs, *self.outs))


@functools.lru_cache(maxsize=128)
def parts_of(back: BackwardStep) -> StepParts:
    """Divides a backward step into two programs."""
    return _parts_in(back.one)


@functools.lru_cache(maxsize=128)
def step_with_residuals(back: BackwardStep) -> tuple[Step, StepParts]:
    """A step whose `y` begin with the residuals that are kept, and its `StepParts`."""
    # The step and its residuals are one program, so that nothing is computed twice. Of
    # a loop in the step XLA would not see that two programs run the same.
    program, step = program_with_outputs(back), back.step
    num_y = len(step.y_types)
    outs = [False] * (step.num_carry + num_y)
    outs += [True] * (len(program.out_avals) - len(outs))
    of_back = pruned(program, tuple(outs))
    parts = _parts_in(dataclasses.replace(back.one, program=of_back))
    # Without the equations that need cotangents: what is left are the way there, and
    # the residuals.
    jaxpr, known = program.jaxpr, len(step.jaxpr.in_avals)
    unknown, eqns = set(jaxpr.invars[known:]), list[jex.JaxprEqn]()
    for eqn in jaxpr.eqns:
        if unknown.isdisjoint(v for v in eqn.invars if isinstance(v, jex.Var)):
            eqns.append(eqn)
        else:
            unknown.update(eqn.outvars)
    carry, y, _ = split(jaxpr.outvars, step.num_carry, num_y)
    kept = pick(parts.ahead.jaxpr.outvars, parts.kept)
    forward = with_parts(
        program, invars=jaxpr.invars[:known], eqns=eqns, outvars=[*carry, *kept, *y]
    )
    return dataclasses.replace(step, jaxpr=pruned(forward)), parts


@functools.lru_cache(maxsize=128)
def _rest_for(rest: jex.ClosedJaxpr, arrived: Flags) -> jex.ClosedJaxpr:
    """`rest` without the cotangents that are zero."""
    # It is linear in cotangents, and so it is its own derivative. In a derivative zeros
    # are symbols, which multiply nothing: zero times infinity would be NaN.
    types, outs = rest.in_avals, (True,) * len(rest.out_avals)
    known = len(types) - len(arrived)
    marks = (*[False] * known, *arrived)
    keep = [*[True] * known, *[False] * len(arrived), *[True] * sum(arrived)]
    of_tangents = [*[False] * len(outs), *outs]
    try:
        both = jvp_of(rest, (marks,), (outs,))
        moved, left = without_dead_code(both, of_tangents, keep=keep)
        if left == keep:
            return moved
    except Exception:
        pass  # see below

    # A custom rule need not be linear, and perhaps it has no derivative.
    def of_all(*flat: Value) -> list[Value]:
        zeros = list(map(zero_array, types[known:]))
        return run(rest, *flat[:known], *put(zeros, arrived, flat[known:]))

    return traced(of_all, [*types[:known], *pick(types[known:], arrived)])


def _parts_in(back: Back) -> StepParts:
    """Divides the program of a backward step into two."""
    program, (consts, carry, x, _) = back.program, back.counts
    known = consts + carry + x
    others = len(program.in_avals) - known
    # What follows from consts, carry and `x` goes ahead; what needs `z` or cotangents
    # is the rest. What passes from one to the other are the residuals.
    ahead, rest = parted(program, (True,) * known + (False,) * others)
    inputs = ahead.jaxpr.invars
    # Consts and `x` can be read again when the step is reversed; a carry cannot.
    of_carry = range(consts, consts + carry)
    at_hand = {var: i for i, var in enumerate(inputs) if i not in of_carry}
    source = tuple(at_hand.get(var) for var in ahead.jaxpr.outvars)
    varies = (False,) * consts + (True,) * (carry + x)
    varies = tuple(
        varies or _reads_more(ahead, i, consts)
        for i, varies in enumerate(reached(ahead, varies))
    )
    return StepParts(ahead, rest, back.outs, source, varies)


def _reads_more(ahead: jex.ClosedJaxpr, output: int, consts: int) -> bool:
    """Whether an output that is the same for all steps takes more than consts.

    A loop in the step has all of its outputs or none, also if some are always the same.
    """
    which = [i == output for i in range(len(ahead.out_avals))]
    return any(computing(ahead, which)[1][consts:])


@dataclasses.dataclass(frozen=True)
class KnownResiduals:
    """The residuals of the last steps, which the primal has stored.

    Attributes:
        rows: The arrays; each row is for one step.
        first: The position of the step whose row is the first.
        back: The backward step whose residuals they are.
        parts: The same in two programs.
        slots: In which form they are stored.
        fixed: The residuals that are the same for all steps.
    """

    rows: Arrays
    first: int
    back: BackwardStep
    parts: StepParts
    slots: AbstractSlots
    fixed: Arrays

    def take(
        self,
        consts: Arrays,
        x: Arrays,
        ends: BlockEnds,
        position: Index,
        now: BackwardStep,
    ) -> BlockResult:
        """Takes cotangents past the step at a position.

        `now` is the backward step of the sweep.
        """
        # The primal had to store the residuals for all cotangents that might arrive.
        # `now` knows which of them did.
        carried, z = ends
        dtypes = [aval.dtype for aval in self.parts.kept_types]
        rows = [element(row, position - self.first) for row in self.rows]
        kept = self.slots.unpacked(rows, dtypes)
        residuals = self.parts.residuals(consts, x, kept, self.fixed)
        of, whole = now.active, self.back.active
        of_carry, of_y = pick(of.carry, whole.carry), pick(now.wanted, self.back.wanted)
        among = lambda flags, values: put([None] * len(flags), flags, values)
        ends = among(of_carry, carried), among(of_y, z)
        sums, before, xs = self.parts.take(residuals, ends)
        return BlockResult(
            pick(sums, pick(of.consts, whole.consts)),
            pick(before, of_carry),
            pick(xs, pick(of.xs, whole.xs)),
        )
