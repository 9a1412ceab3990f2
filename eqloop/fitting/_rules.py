"""Functions with a `jax.custom_jvp` whose rule is another program.

In a gradient, the rule of such a function runs in its place.
"""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex
import numpy as np

from .._arrays import Flags, is_inexact, pick
from .._compat import form_of, form_params
from .._programs import alone, equations, formula_of, jvp_of, moving_variables, run
from .._types import PyTree, Value
from ..checkpointing import fitting, is_left_open
from ._written import flattened

Program = Callable[..., Sequence[Value]]


def rule_with_loops(eqn: jex.JaxprEqn) -> jex.ClosedJaxpr | None:
    """The rule of a function that has loops which are left open: primals, and tangents.

    It is `[*inputs, *tangents] -> [*outputs, *tangents]`, of what can have tangents.
    """
    if form_of(eqn) != "custom_jvp_call" or form_params(eqn)["symbolic_zeros"]:
        return None  # a rule may ask which tangents there are
    function = form_params(eqn)["call_jaxpr"]
    if not any(is_left_open(formula_of(e)) for e in equations(function)):
        return None
    with fitting():
        return flattened(jvp_of(alone(eqn), *_nonzeros(alone(eqn))))


def differentiated(rule: jex.ClosedJaxpr, eqn: jex.JaxprEqn) -> list[Flags]:
    """For each equation of the rule of a function, which operands have tangents."""
    count = len(eqn.invars)
    marks = [i >= count for i in range(len(rule.in_avals))]
    moving = moving_variables(rule, marks)
    is_moving = lambda x: isinstance(x, jex.Var) and x in moving
    return [tuple(map(is_moving, e.invars)) for e in rule.jaxpr.eqns]


def with_rule_program(eqn: jex.JaxprEqn, rule: jex.ClosedJaxpr) -> jex.JaxprEqn:
    """The equation of a function, with another program in place of its rule."""
    program, whole = form_params(eqn)["call_jaxpr"], alone(eqn)
    of = lambda program: lambda *inputs: run(program, *inputs)
    (nonzeros,), (gives,) = _nonzeros(whole)
    function = with_rule(of(program), of(rule), nonzeros, gives)
    (new,) = jax.make_jaxpr(function)(*whole.in_avals).jaxpr.eqns
    return eqn.replace(primitive=new.primitive, params=new.params)


def with_rule(f: Program, rule: Program, nonzeros: Flags, gives: Flags) -> Program:
    """A function with a derivative of its own.

    `rule` also takes tangents of inputs in `nonzeros`, and gives those of `gives`.
    """

    @jax.custom_jvp
    def function(*inputs: Value) -> Sequence[Value]:
        return f(*inputs)

    @function.defjvp
    def push(primals: PyTree, tangents: PyTree) -> tuple[list[Value], list[Value]]:
        found = rule(*primals, *pick(tangents, nonzeros))
        outs, dots = found[: len(gives)], iter(found[len(gives) :])
        zero = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        pairs = zip(outs, gives, strict=True)
        return [*outs], [next(dots) if moving else zero(x) for x, moving in pairs]

    return function


def _nonzeros(program: jex.ClosedJaxpr) -> tuple[tuple[Flags], tuple[Flags]]:
    inexact = lambda avals: (tuple(map(is_inexact, avals)),)
    return inexact(program.in_avals), inexact(program.out_avals)
