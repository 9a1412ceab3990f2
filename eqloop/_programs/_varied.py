"""Programs whose values may all differ along axes of devices.

Inside of a checked `jax.shard_map`, a type says along which axes of the mesh a value
may differ between devices. Where a value that is the same on all of them meets one that
is not, JAX casts it (`pvary`), and the transpose of the cast adds up cotangents over
all devices. Devices that stop a loop at different times must not wait for each other
within its steps, so what they close over is cast before the loop. The step was traced
without that cast, and here it gets the types that it would have had.
"""

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_derivatives
import jax.extend.core as jex

from .._arrays import (
    axes_of,
    instantiated,
    is_inexact,
    is_type,
    put,
    split,
    vary,
    varying_type,
    zero_tangent,
)
from .._compat import HiPrimitive, close, is_open, is_through
from .._types import PyTree, Value
from ._calculus import interpreted, jvp_of, run, value_of
from ._equations import HoldsPrograms, aval_of, formula_of, with_formula
from ._jaxprs import alone


class CannotVaryError(Exception):
    """A program that cannot be given other types."""


@functools.lru_cache(maxsize=128)
def varied(program: jex.ClosedJaxpr, axes: frozenset[str]) -> jex.ClosedJaxpr:
    """A program whose inputs and outputs may differ along some axes of the mesh.

    `CannotVaryError`: some custom derivatives can be taken only where they were traced.
    """

    def outputs(*flat: Value) -> list[Value]:
        return [vary(out, axes) for out in _values_with_more_axes(program, flat, axes)]

    types = [varying_type(aval, axes) for aval in program.in_avals]
    return jax.make_jaxpr(outputs)(*types)


def _values_with_more_axes(
    program: jex.ClosedJaxpr, inputs: Sequence[Value], axes: frozenset[str]
) -> list[Value]:
    def results(eqn: jex.JaxprEqn, values: list[Value]) -> list[Value]:
        pairs = zip(eqn.invars, values, strict=True)
        if any(not axes_of(x) <= axes_of(aval_of(atom)) for atom, x in pairs):
            return _varied_equation(eqn, values, axes)
        return _rebound(eqn, values)

    return interpreted(program, inputs, value_of, results, lambda const: const)


def _varied_equation(
    eqn: jex.JaxprEqn, values: Sequence[Value], axes: frozenset[str]
) -> list[Value]:
    """The outputs of an equation, some of whose inputs vary more than they did."""
    if eqn.primitive.name == "pvary":
        return [vary(values[0], frozenset(eqn.params["axes"]))]
    # All operands of an equation vary alike.
    values = [vary(x, axes) if is_type(jax.typeof(x)) else x for x in values]
    if (formula := formula_of(eqn)) is not None:
        return _rebound(with_formula(eqn, varied_formula(formula, axes)), values)
    if eqn.primitive.name == "custom_jvp_call" and not is_through(eqn):
        return _with_varied_rule(alone(eqn), eqn, axes)(*values)
    if "_prim" in eqn.params or eqn.primitive.name.startswith("custom_vjp"):
        # What is the same on all devices has a cotangent that is, and only the rule
        # itself could add it up.
        raise CannotVaryError
    params = {name: _of_param(x, axes) for name, x in eqn.params.items()}
    return _rebound(eqn.replace(params=params), values)


def _with_varied_rule(
    program: jex.ClosedJaxpr, eqn: jex.JaxprEqn, axes: frozenset[str]
) -> Callable[..., list[Value]]:
    """A function with a `jax.custom_jvp`, which has been traced for other types.

    `program` is the equation alone; what it takes and gives may differ along `axes`.
    """
    gives = tuple(map(is_inexact, program.out_avals))

    @jax.custom_jvp
    def function(*args: Value) -> list[Value]:
        return run(varied(eqn.params["call_jaxpr"], axes), *args)

    @functools.partial(function.defjvp, symbolic_zeros=True)
    def rule(primals: Sequence[Value], tangents: Sequence[Value]) -> PyTree:
        is_zero = lambda dot: isinstance(dot, jax.custom_derivatives.SymbolicZero)
        nonzeros = tuple(not is_zero(dot) for dot in tangents)
        dots = [dot for dot in tangents if not is_zero(dot)]
        # The tangents are behind the primals, both among inputs and among outputs.
        rule = varied(jvp_of(program, (nonzeros,), (gives,)), axes)
        outs, dots = split(run(rule, *primals, *dots), len(gives))
        zeros = [zero_tangent(jax.typeof(out)) for out in outs]
        return outs, instantiated(put(zeros, gives, dots))

    return function


def _rebound(eqn: jex.JaxprEqn, values: Sequence[Value]) -> list[Value]:
    return run(alone(eqn), *values)


def _of_param(param: Any, axes: frozenset[str]) -> Any:
    """A parameter of an equation, with the programs in it varied."""
    if isinstance(param, jex.ClosedJaxpr):
        return varied(param, axes)
    if is_open(param):
        return varied(close(param), axes).jaxpr
    if type(param) in (tuple, list):
        return type(param)(_of_param(entry, axes) for entry in param)
    return param


def varied_formula(formula: Any, axes: frozenset[str]) -> Any:
    """A formula whose inputs and outputs may differ along some axes of the mesh."""
    new = copy.copy(formula)
    new.leftover = None
    new.in_avals, new.out_aval, new.params = (
        _of_setting(part, axes)
        for part in (formula.in_avals, formula.out_aval, formula.params)
    )
    HiPrimitive.__init__(new)  # sets up everything else, from the types
    return new


def _of_setting(part: Any, axes: frozenset[str]) -> Any:
    """A part of a formula: all programs and types in it are varied."""
    again = functools.partial(_of_setting, axes=axes)
    if isinstance(part, jex.ClosedJaxpr):
        return varied(part, axes)
    if is_type(part):
        return varying_type(part, axes)
    if isinstance(part, HoldsPrograms):
        return varied_formula(part, axes)
    if isinstance(part, dict):
        return {name: again(entry) for name, entry in part.items()}
    if isinstance(part, tuple) and type(part) is not tuple:  # one with named fields
        return type(part)(*map(again, part))
    if isinstance(part, tuple | list):
        new = type(part)(map(again, part))
        return part if all(map(operator.is_, new, part)) else new
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        new = {name: again(value) for name, value in fields.items()}
        changed = {n: x for n, x in new.items() if x is not fields[n]}
        return dataclasses.replace(part, **changed) if changed else part
    return part
