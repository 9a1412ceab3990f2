"""Which outputs of a program depend on which of its inputs, and on an axis of `vmap`.

If an output is said to depend on an input though it does not, this costs time and
memory. It is wrong only if a rule refuses tangents, as that of
`equinox.internal.nondifferentiable` does. So for an equation that is not known, each
output depends on all inputs.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.core
import jax.extend.core as jex

from .._arrays import (
    Flags,
    closed_under,
    is_inexact,
    pick,
    reduces_examples,
    split,
)
from .._compat import (
    batching_rule,
    called_by,
    close,
    form_of,
    form_params,
    is_through,
    scan_counts,
)
from .._types import AnyJaxpr, Aval
from ._effects import is_ref
from ._equations import HoldsPrograms, equations, equations_of, formula_of

# From marks for the inputs of a formula to marks for its outputs.
Marking: TypeAlias = Callable[[list[bool]], Sequence[bool]]

# From floats to floats, and their derivative is zero: in JAX they have no tangent.
_WITHOUT_TANGENT = frozenset(["ceil", "floor", "round", "stop_gradient"])


@functools.lru_cache(maxsize=512)
def reached(
    program: AnyJaxpr,
    inputs: Flags,
    *,
    is_derivative: bool = False,
    axis_name: Hashable = None,
) -> Flags:
    """Which outputs of a program depend on the marked inputs.

    `is_derivative` follows tangents only, and `axis_name` also the place along it.
    """
    # Integers have no tangents, nor has the result of `jax.lax.stop_gradient`. On the
    # place along the axis depends `jax.lax.axis_index`, for example.
    place = _NOTHING if axis_name is None else _PLACE
    marked = _all_of([place, *(_input(i) for i, mark in enumerate(inputs) if mark)])
    sources = _sources(program, _Reach(is_derivative, axis_name))
    return tuple(bool(source & marked) for source in sources)


# What a value depends on is a set of inputs: an integer with a bit for each of them,
# and the first bit for the place along the axis. So all inputs are followed at once.
Origins: TypeAlias = int

_NOTHING, _PLACE = 0, 1


def _input(index: int) -> Origins:
    return 2 << index


def _all_of(sources: Iterable[Origins]) -> Origins:
    return functools.reduce(operator.or_, sources, _NOTHING)


@functools.lru_cache(maxsize=512)
def _sources(program: AnyJaxpr, reach: "_Reach") -> tuple[Origins, ...]:
    """What each output of a program depends on."""
    return tuple(reach.follow(program))


def _bits(sources: Origins) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while sources:
        lowest = sources & -sources
        yield lowest.bit_length() - 1
        sources ^= lowest


def moving_inputs(formula: HoldsPrograms) -> list[list[int]]:
    """Which inputs move each output of a formula."""
    inputs = [1 << i for i in range(len(formula.in_avals_flat))]
    return [list(_bits(source)) for source in moved_by(formula, inputs)]


def moved_by(formula: HoldsPrograms, inputs: Sequence[Origins]) -> list[Origins]:
    """What the tangents of the outputs depend on, if those of the inputs do on this."""
    types = formula.in_avals_flat
    inputs = [of * is_inexact(type) for of, type in zip(inputs, types, strict=True)]
    if formula.steps is None:
        return _by_rule(formula.nonzeros_out, inputs)
    # Of a loop all inputs are followed at once: its rule, for each of them, would take
    # a time that grows with the square of their number.
    program, counts = formula.steps
    outs = _Reach(True, None).loop(program, *split(inputs, *counts))
    return [*outs, *[_NOTHING] * (len(formula.out_avals_flat) - len(outs))]


def moving_variables(program: jex.ClosedJaxpr, marks: Sequence[bool]) -> set[Any]:
    """The variables of a program that are differentiated if these inputs are."""
    moving = set[Any](pick(program.jaxpr.invars, marks))
    for eqn in program.jaxpr.eqns:
        flags = [isinstance(x, jex.Var) and x in moving for x in eqn.invars]
        if not any(flags):
            continue
        formula = formula_of(eqn)
        inexact = [is_inexact(x.aval) for x in eqn.outvars]
        nonzeros = inexact if formula is None else formula.nonzeros_out(flags)
        moving.update(pick(eqn.outvars, nonzeros))
    return moving


def names_axis(program: AnyJaxpr, axis_name: Hashable) -> bool:
    """Whether there is a collective over an axis in a program, or inside it."""
    return any(_names(eqn, axis_name) for eqn in equations(program))


@dataclasses.dataclass(frozen=True)
class _Reach:
    """How dependences are followed, see `reached`."""

    is_derivative: bool
    axis_name: Hashable

    def follow(self, program: AnyJaxpr) -> list[Origins]:
        """What each output of a program depends on."""
        jaxpr = close(program).jaxpr
        sources = {var: _input(i) for i, var in enumerate(jaxpr.invars)}
        has_refs = any(is_ref(var.aval) for var in jaxpr.invars)
        while True:
            before = [sources[var] for var in jaxpr.invars]
            for eqn in jaxpr.eqns:
                self._pass(eqn, sources)
            # A reference may be read before it is written, in the body of a loop. What
            # is written then reaches what was read, one iteration later.
            if not has_refs or before == [sources[var] for var in jaxpr.invars]:
                return [_source_of(atom, sources) for atom in jaxpr.outvars]

    def outputs(self, program: AnyJaxpr, inputs: Sequence[Origins]) -> list[Origins]:
        """What the outputs of a program depend on, if the inputs depend on this."""
        places, sources = [_PLACE, *inputs], _sources(program, self)
        return [_all_of(places[bit] for bit in _bits(of)) for of in sources]

    def _pass(self, eqn: jex.JaxprEqn, sources: dict[Any, Origins]) -> None:
        """Follows dependences through one equation."""
        inputs = [_source_of(atom, sources) for atom in eqn.invars]
        pairs = list(zip(eqn.outvars, self._equation(eqn, inputs), strict=True))
        # An equation may write to its references.
        pairs += [(var, _all_of(inputs)) for var in eqn.invars if is_ref(var.aval)]
        for var, source in pairs:
            if source and self._passes(var.aval):
                sources[var] = sources.get(var, _NOTHING) | source

    def _passes(self, aval: Aval) -> bool:
        return not self.is_derivative or is_inexact(aval)

    def _equation(self, eqn: jex.JaxprEqn, inputs: Sequence[Origins]) -> list[Origins]:
        name, params, count = form_of(eqn), eqn.params, len(eqn.outvars)
        if self.axis_name is not None and (
            _is_reduction(eqn, self.axis_name) or _is_over_examples(eqn)
        ):
            return [_NOTHING] * count  # the same all along the axis
        anything = _all_of([*inputs, _PLACE if self._names(eqn) else _NOTHING])
        if not anything:
            return [_NOTHING] * count
        if self.is_derivative and name in _WITHOUT_TANGENT:
            return [_NOTHING] * count
        # What is read from a reference may depend on anything that was written to it.
        if any(is_ref(var.aval) for var in eqn.invars):
            return [anything] * count
        if (inner := called_by(eqn)) is not None:
            return self.outputs(inner, inputs)
        if name == "shard_map":
            return self.outputs(params["jaxpr"], inputs)
        # How a batch is laid out is up to the rule.
        if name == "custom_vmap_call" and self.axis_name is None:
            return self.outputs(params["call"], inputs)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            return self._custom(eqn, inputs)
        if name == "scan":
            return self.loop(params["jaxpr"], *split(inputs, *scan_counts(params)))
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            which, *operands = inputs
            branches = [self.outputs(b, operands) for b in params["branches"]]
            return [_all_of([which, *ways]) for ways in zip(*branches, strict=True)]
        formula = formula_of(eqn)
        if formula is None:
            return [anything] * count
        if self.is_derivative:
            return moved_by(formula, inputs)
        rule = functools.partial(formula.reached_out, axis_name=self.axis_name)
        outs = _by_rule(rule, inputs)
        if self._names(eqn):
            places = [_PLACE * bool(mark) for mark in rule([False] * len(inputs))]
            outs = list(map(operator.or_, outs, places))
        return outs

    def _names(self, eqn: jex.JaxprEqn) -> bool:
        return self.axis_name is not None and any(
            _names(inner, self.axis_name) for inner in equations_of(eqn)
        )

    def _custom(self, eqn: jex.JaxprEqn, inputs: Sequence[Origins]) -> list[Origins]:
        if is_through(eqn):
            return list(inputs[len(inputs) - len(eqn.outvars) :])
        # A derivative rule may depend on more than the function does. But how a batch
        # is laid out follows from the function.
        if self.axis_name is None:
            return [_all_of(inputs)] * len(eqn.outvars)
        return self.outputs(form_params(eqn)["call_jaxpr"], inputs)

    def loop(self, program: AnyJaxpr, *groups: Sequence[Origins]) -> list[Origins]:
        """What the outputs of a loop depend on, at any step."""
        consts, carry, xs = groups
        outputs = lambda carry: self.outputs(program, [*consts, *carry, *xs])
        # The least fixed point: what a step adds holds for the next one.
        carry = closed_under(carry, lambda carry: outputs(carry)[: len(carry)])
        return [*carry, *outputs(carry)[len(carry) :]]

    def _while(self, params: Any, inputs: Sequence[Origins]) -> list[Origins]:
        counts = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body, carry = split(inputs, *counts)

        def after(carry: list[Origins]) -> list[Origins]:
            # If examples run differently long, all leaves of the carry differ.
            goes_on = _all_of(self.outputs(params["cond_jaxpr"], [*of_cond, *carry]))
            outs = self.outputs(params["body_jaxpr"], [*of_body, *carry])
            return [goes_on | out for out in outs]

        return closed_under(carry, after)


def _by_rule(rule: Marking, inputs: Sequence[Origins]) -> list[Origins]:
    """What the outputs of a formula depend on, by its rule for marked inputs."""
    # An output is marked for two inputs if it is for either of them. So each source is
    # marked by itself, at all inputs that have it.
    ways = [
        [source * bool(mark) for mark in rule([other == source for other in inputs])]
        for source in {_NOTHING, *inputs}
    ]
    return list(map(_all_of, zip(*ways, strict=True)))


def _source_of(atom: jax.core.Atom, sources: dict[Any, Origins]) -> Origins:
    return _NOTHING if isinstance(atom, jex.Literal) else sources.get(atom, _NOTHING)


def _is_reduction(eqn: jex.JaxprEqn, axis_name: Hashable) -> bool:
    is_reduction = eqn.primitive.name in ("psum", "pmax", "pmin")
    return is_reduction and axis_name in eqn.params["axes"]


def _is_over_examples(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation reduces over every `vmap` around it, as `unvmap` does."""
    is_custom = eqn.primitive.name == "custom_vmap_call"
    return is_custom and reduces_examples(batching_rule(eqn))


def _names(eqn: jex.JaxprEqn, axis_name: Hashable) -> bool:
    """Whether an equation is a collective over that axis."""
    # All axes without a name share one, a bare object. A `vmap` within a program may
    # have left it there, and nobody can have meant this one.
    if type(axis_name) is object:
        return False
    for value in eqn.params.values():
        names = value if isinstance(value, tuple) else (value,)
        if any(type(name) is type(axis_name) and name == axis_name for name in names):
            return True
    return False
