"""Functions with derivatives of their own, which keep them.

The rules are traced again: `jax.jvp` and `jax.vjp` of the equation give what its rules
compute. In the module they are functions of flat arrays, and around them stand
functions of the form that `defjvp` and `defvjp` ask for.

A rule that JAX itself cannot run has no text. The function is written nevertheless,
with a rule that raises when it is used.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np

from ..._arrays import is_inexact, pick, put
from ..._programs import Formula, alone, digest_of, rewritable_programs, run
from .._atoms import Closed
from .._dead_code import eliminate_dead_code
from .._primitives import FORMULAS
from ._control import Statement, expansion, traced_name
from ._lines import call, lines, structure, tuple_of
from ._scope import Module, Scope, head
from ._values import parameter

# Rules within rules. Those of `jnp.i0` never end (JAX 0.12).
DEEPEST = 8


class _NoRuleError(Exception):
    """A rule that cannot be traced; the message says why."""


def _called(eqn: jex.JaxprEqn) -> tuple[Closed, str]:
    """What an equation calls, and a name for it."""
    (callee,) = rewritable_programs(eqn)
    return callee, traced_name(callee)


def _custom(
    kind: str,
    rules: Callable[[Module, jex.JaxprEqn, str], None],
    called: Callable[[jex.JaxprEqn], tuple[Closed, str]] = _called,
) -> Statement:
    """What writes a call of a function with derivatives of its own."""

    def write_rules(module: Module, eqn: jex.JaxprEqn, name: str) -> None:
        try:
            if len(module.open_functions) > DEEPEST:
                raise _NoRuleError(
                    f"derivatives of more than {DEEPEST} orders are not written"
                )
            rules(module, eqn, name)
        except _NoRuleError as error:
            module.functions.append(_refusal(module, kind, name, str(error)))

    def statement(scope: Scope, eqn: jex.JaxprEqn) -> None:
        callee, wish = called(eqn)
        module = scope.module
        # A rule may call the function itself. It has been traced anew there, so that
        # only what it says tells that it is the same.
        key = kind, wish, digest_of(alone(eqn))
        name = module.open_functions.get(key)
        if name is None:
            known = module.has_written(callee, kind)
            decorator = f"@jax.custom_{kind}"
            name = module.function(callee, wish, decorator, kind=kind)
            if not known:
                module.open_functions[key] = name
                write_rules(module, eqn, name)
                del module.open_functions[key]
        scope.assign(eqn.outvars, call(name, *scope.arguments(eqn.invars)))

    return statement


def _write_jvp(module: Module, eqn: jex.JaxprEqn, name: str) -> None:
    run, ins, outs = _can_run(eqn)
    nonzeros_in, nonzeros_out = list(map(is_inexact, ins)), list(map(is_inexact, outs))

    def rule(*leaves: Any) -> list[Any]:
        primals = leaves[: len(ins)]
        tangents = put(list(map(_float0, ins)), nonzeros_in, leaves[len(ins) :])
        out, tangents_out = jax.jvp(run, primals, tuple(tangents))
        return [*out, *pick(tangents_out, nonzeros_out)]

    moving = [aval.to_tangent_aval() for aval in pick(ins, nonzeros_in)]
    flat = _rule(module, rule, [*ins, *moving], f"{name}_rule")
    read = [f"tangents[{i}]" for i, has in enumerate(nonzeros_in) if has]
    rows = _rows("outputs", len(outs) + sum(nonzeros_out))
    shapes = [tuple_of(map(str, aval.shape)) for aval in outs]
    zeros = [call("np.zeros", shape, "jax.dtypes.float0") for shape in shapes]
    tangents_out = put(zeros, nonzeros_out, rows[len(outs) :])
    module.functions.append(
        _function_lines(
            f"@{name}.defjvp",
            module.names.claim(f"{name}_jvp", "jvp"),
            ("primals", "tangents"),
            ("outputs", call(flat, "*primals", *read)),
            (structure(rows[: len(outs)]), structure(tangents_out)),
        )
    )


def _write_vjp(module: Module, eqn: jex.JaxprEqn, name: str) -> None:
    run, ins, outs = _can_run(eqn)
    nonzeros_in, nonzeros_out = list(map(is_inexact, ins)), list(map(is_inexact, outs))
    pulls: list[Any] = []

    def forward(*primals: Any) -> list[Any]:
        of_moving = lambda *moving: run(*put(primals, nonzeros_in, moving))
        out, pull = jax.vjp(of_moving, *pick(primals, nonzeros_in))
        residuals, treedef = jax.tree.flatten(pull)
        pulls.append(treedef)
        return [*out, *residuals]

    def backward(*leaves: Any) -> list[Any]:
        residuals, cts = leaves[:-live], leaves[-live:]
        pull = jax.tree.unflatten(pulls[-1], residuals)
        return list(pull(put(list(map(_float0, outs)), nonzeros_out, cts)))

    live = sum(nonzeros_out)
    fwd = _traced(forward, ins)
    residuals = fwd.out_avals[len(outs) :]
    cts = [aval.to_ct_aval() for aval in pick(outs, nonzeros_out)]
    flat_fwd = module.function(fwd, f"{name}_forward", as_tuple=True)
    flat_bwd = _rule(module, backward, [*residuals, *cts], f"{name}_backward")
    names = [module.names.claim(f"{name}_{rule}", rule) for rule in ("fwd", "bwd")]
    rows = _rows("outputs", len(outs))
    many = len(outs) > 1
    read = [f"cts[{i}]" if many else "cts" for i, has in enumerate(nonzeros_out) if has]
    cts_in = put(["None"] * len(ins), nonzeros_in, _rows("inputs", sum(nonzeros_in)))
    pair = structure(rows), f"outputs[{len(outs)}:]"
    value = call(flat_fwd, "*primals")
    module.functions += [
        _function_lines("", names[0], ("*primals",), ("outputs", value), pair),
        _function_lines(
            "",
            names[1],
            ("residuals", "cts"),
            ("inputs", call(flat_bwd, "*residuals", *read)),
            cts_in,
        ),
        lines(call(f"{name}.defvjp", *names)),
    ]


def _function_lines(
    decorator: str,
    name: str,
    parameters: Sequence[str],
    assignment: tuple[str, str],
    result: Sequence[str],
) -> list[str]:
    """A function that computes one thing and returns a tuple of its parts."""
    target, value = assignment
    return [
        *head(decorator, name, parameters),
        *lines(value, indent=1, prefix=f"{target} = "),
        *lines(tuple_of(result, bare=True), indent=1, prefix="return "),
    ]


def _refusal(module: Module, kind: str, name: str, why: str) -> list[str]:
    """Rules that say why there are none."""
    error = call("NotImplementedError", parameter(f"{name} has no derivative: {why}"))
    rule = module.names.claim(f"{name}_rule", "rule")
    body = [f"def {rule}(*args):", *lines(error, indent=1, prefix="raise ")]
    if kind == "jvp":
        return [f"@{name}.defjvp", *body]
    return [*body, "", "", f"{name}.defvjp({rule}, {rule})"]


def _rule(
    module: Module, rule: Callable[..., Any], avals: Sequence[Any], wish: str
) -> str:
    jaxpr = eliminate_dead_code(_traced(rule, avals))
    return module.function(jaxpr, wish, as_tuple=True)


def _traced(rule: Callable[..., Any], avals: Sequence[Any]) -> Closed:
    try:
        jaxpr = jax.make_jaxpr(rule)(*avals)
    except Exception as error:  # whatever the user's rule raises
        why, *_ = str(error).splitlines() or [""]
        raise _NoRuleError(f"{type(error).__name__}: {why}") from error
    # An array of a call that is over. Usually JAX raises where a rule closes over one;
    # the derivative of `jax.scipy.special.expi` does so all the same (JAX 0.10).
    if any(isinstance(const, jax.core.Tracer) for const in jaxpr.consts):
        raise _NoRuleError("its rule closes over an array that was being traced")
    return jaxpr


def _can_run(
    eqn: jex.JaxprEqn,
) -> tuple[Callable[..., Any], list[jax.core.AbstractValue], list[Any]]:
    """A function that runs an equation, and the types of its operands and results."""
    program = alone(eqn)
    return functools.partial(run, program), program.in_avals, program.out_avals


def _rows(name: str, count: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(count)]


def _float0(aval: Any) -> Any:
    return np.zeros(aval.shape, jax.dtypes.float0)


_of_others = _custom("jvp", _write_jvp, expansion)


def _write_formula(scope: Scope, eqn: jex.JaxprEqn) -> None:
    """A primitive that says itself what it expands to, and what its derivatives are."""
    # Those of this library's are the derivatives of what they expand to.
    name = type(eqn.params["_prim"]).__name__
    if isinstance(eqn.params["_prim"], Formula):
        function = scope.module.function(*expansion(eqn))
    elif name in FORMULAS:
        function = f"jnp.{FORMULAS[name]}"
    else:
        _of_others(scope, eqn)
        return
    scope.assign(eqn.outvars, call(function, *scope.arguments(eqn.invars)))


DERIVATIVES: dict[str, Statement] = {
    "call_hi_primitive": _write_formula,
    "custom_jvp_call": _custom("jvp", _write_jvp),
    "custom_vjp_call": _custom("vjp", _write_vjp),
}
