"""Loops, branches and calls: as those of `jax.lax`, with functions for their bodies."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._arrays import sees_examples, split
from ..._compat import CALLS, batching_rule, form_params, scan_counts
from ..._programs import (
    Formula,
    as_written,
    is_watched,
    rewritable_programs,
    run,
    traced_function,
)
from ...progress import Again
from .._atoms import Closed, shape_of
from .._dead_code import eliminate_dead_code
from ._lines import call, structure, tuple_of
from ._reads import is_report, reads_index
from ._scope import Scope
from ._values import UnprintableError, parameter

Statement: TypeAlias = Callable[[Scope, jex.JaxprEqn], None]


def traced_name(jaxpr: Closed) -> str:
    """What the function was called that was traced; empty for a lambda."""
    name, _ = traced_function(jaxpr)
    return name if name.isidentifier() else ""


def _write_scan(scope: Scope, eqn: jex.JaxprEqn) -> None:
    params = eqn.params
    (body,) = rewritable_programs(eqn)
    num_consts, num_carry = scan_counts(params)
    consts, init, xs = split(scope.arguments(eqn.invars), num_consts, num_carry)

    def result(outputs: list[str]) -> str:
        carry, ys = split(outputs, num_carry)
        return tuple_of((structure(carry), _or_none(ys)), bare=True)

    step = scope.local_function(
        traced_name(body),
        "step",
        body,
        consts,
        [("carry", num_carry), ("x", len(xs))],
        result,
    )
    settings: dict[str, str] = {"length": str(params["length"])}
    if params["reverse"]:
        settings["reverse"] = "True"
    if params["unroll"] != 1:
        settings["unroll"] = str(params["unroll"])
    loop = call("lax.scan", step, structure(init), _or_none(xs), **settings)
    carry, ys = split(eqn.outvars, num_carry)
    _assign_groups(scope, [carry, ys], loop)


def _write_while(scope: Scope, eqn: jex.JaxprEqn) -> None:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    wishes = traced_name(cond), traced_name(body)
    cond_consts, body_consts, init = split(
        scope.arguments(eqn.invars), params["cond_nconsts"], params["body_nconsts"]
    )
    if shape_of(cond.jaxpr.outvars[0]):
        cond, body = _for_all_examples(cond, body, len(cond_consts))
        body_consts = [*cond_consts, *body_consts]
    groups = [("carry", len(init))]
    names = [
        scope.local_function(wish or default, default, jaxpr, consts, groups, returned)
        for wish, jaxpr, default, consts in (
            (wishes[0], cond, "keep_going", cond_consts),
            (wishes[1], body, "body", body_consts),
        )
    ]
    scope.assign(eqn.outvars, call("lax.while_loop", *names, structure(init)))


def _for_all_examples(cond: Closed, body: Closed, count: int) -> tuple[Closed, Closed]:
    """Condition and body of a loop, to which `vmap` has given one for each example."""
    # JAX makes one of them only when it compiles: the loop goes on as long as some
    # example does, and changes none that has ended.
    # The consts of the new body begin with those of the condition.
    goes_on, step = (functools.partial(run, each) for each in (cond, body))
    carry = len(body.out_avals)

    def some(*inputs: Any) -> Any:
        return jnp.any(goes_on(*inputs)[0])

    def step_some(*inputs: Any) -> list[Any]:
        consts, rest = split(inputs, count)
        old = rest[len(rest) - carry :]
        (active,) = goes_on(*consts, *old)
        axes = range(active.ndim)
        return [
            lax.select(lax.broadcast_in_dim(active, y.shape, axes), y, x)
            for x, y in zip(old, step(*rest), strict=True)
        ]

    inputs = [*cond.in_avals[:count], *body.in_avals]
    return jax.make_jaxpr(some)(*cond.in_avals), jax.make_jaxpr(step_some)(*inputs)


def _write_cond(scope: Scope, eqn: jex.JaxprEqn) -> None:
    index, *operands = eqn.invars
    definition = scope.definition(index)
    arguments = scope.arguments(operands)
    if definition is None or reads_index(eqn, definition):
        names = _branches(scope, eqn, ["branch"] * len(eqn.params["branches"]))
        value = call("lax.switch", scope.argument(index), tuple_of(names), *arguments)
    elif definition.primitive.name == "platform_index":
        platforms = [
            "default" if group is None else group[0]
            for group in definition.params["platforms"]
        ]
        names = _branches(scope, eqn, [f"on_{platform}" for platform in platforms])
        by_platform = dict(zip(platforms, names, strict=True))
        value = call("lax.platform_dependent", *arguments, **by_platform)
    else:
        no, yes = _branches(scope, eqn, ["if_false", "if_true"])
        which = scope.argument(definition.invars[0])
        value = call("lax.cond", which, yes, no, *arguments)
    scope.assign(eqn.outvars, value)


def _branches(scope: Scope, eqn: jex.JaxprEqn, defaults: Sequence[str]) -> list[str]:
    """Writes the branches, and gives their names."""
    groups = [("operand", 1)] * (len(eqn.invars) - 1)
    return [
        scope.local_function(traced_name(branch), default, branch, (), groups, returned)
        for branch, default in zip(eqn.params["branches"], defaults, strict=True)
    ]


def _write_call(scope: Scope, eqn: jex.JaxprEqn) -> None:
    (callee,) = rewritable_programs(eqn)
    name = eqn.params.get("name") or traced_name(callee)
    function = scope.module.function(callee, name, "@jax.jit")
    scope.assign(eqn.outvars, call(function, *scope.arguments(eqn.invars)))


def _of_examples(scope: Scope, eqn: jex.JaxprEqn) -> None:
    """What sees the examples of a `vmap` around it, where there is none."""
    if not sees_examples(batching_rule(eqn)):
        raise UnprintableError(eqn.primitive)
    callee = eqn.params["call"]
    function = scope.module.function(callee, traced_name(callee))
    scope.assign(eqn.outvars, call(function, *scope.arguments(eqn.invars)))


def _checkpoint(scope: Scope, eqn: jex.JaxprEqn) -> None:
    (callee,) = rewritable_programs(eqn)
    function = scope.module.function(callee, traced_name(callee))
    settings: dict[str, str] = {}
    params = form_params(eqn)
    if not params["prevent_cse"]:
        settings["prevent_cse"] = "False"
    policy = params["policy"]
    for name, known in vars(jax.checkpoint_policies).items():
        # A policy without a name trades memory for time, and changes no number.
        if policy is not None and policy is known:
            settings.setdefault("policy", f"jax.checkpoint_policies.{name}")
    remat = call("jax.checkpoint", function, **settings)
    scope.assign(eqn.outvars, call(remat, *scope.arguments(eqn.invars)))


def expansion(eqn: jex.JaxprEqn) -> tuple[Closed, str]:
    """What a primitive that says so itself expands to, and a name for it."""
    # This library's are such, and are written without progress bars, and under
    # `DebugNonFinite` without its checks: a module that runs on its own has nobody to
    # tell.
    formula: Any = eqn.params["_prim"]
    if isinstance(formula, Formula):
        formula = formula.with_bars(Again(backward=True))

    def expanded(*flat: Any) -> list[Any]:
        result = formula.expand(*formula.in_tree.unflatten(flat))
        return formula.out_tree.flatten_up_to(result)

    # Watched by nobody, but so nothing in it checks by itself.
    with is_watched(True), as_written(True):
        jaxpr = jax.make_jaxpr(expanded)(*formula.in_avals_flat)
    jaxpr = eliminate_dead_code(jaxpr)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(formula).__name__).lower()
    return jaxpr, name


def _callback(scope: Scope, eqn: jex.JaxprEqn) -> None:
    """The number of a bar that nobody shows, instead of a report to it."""
    if not is_report(eqn):
        raise UnprintableError(eqn.primitive)
    shape = parameter(shape_of(eqn.outvars[0]))
    scope.assign(eqn.outvars, call("jnp.zeros", shape, "jnp.int32"))


def _linear_solve(scope: Scope, eqn: jex.JaxprEqn) -> None:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    *consts, b = split(scope.arguments(eqn.invars), *lengths)
    count = len(b)
    if len(eqn.outvars) != count:  # what it gives besides
        raise UnprintableError(eqn.primitive)
    names: dict[str, str] = {}
    for role, jaxpr, closed_over in zip(jaxprs._fields, jaxprs, consts, strict=True):
        # JAX derives `vecmat` from `matvec` itself.
        if jaxpr is not None and role != "vecmat":
            names[role] = scope.local_function(
                "", role, jaxpr, closed_over, [("x", count)], structure
            )
    solvers = {
        role: f"lambda _, x: {names[role]}(x)"
        for role in ("solve", "transpose_solve")
        if role in names
    }
    solve = call(
        "lax.custom_linear_solve",
        names["matvec"],
        structure(b),
        **solvers,
        symmetric=repr(jaxprs.vecmat is jaxprs.matvec),
    )
    scope.assign(eqn.outvars, solve)


def _barrier(scope: Scope, eqn: jex.JaxprEqn) -> None:
    operands = structure(scope.arguments(eqn.invars))
    scope.assign(eqn.outvars, call("lax.optimization_barrier", operands))


def _unstack(scope: Scope, eqn: jex.JaxprEqn) -> None:
    (x,) = scope.arguments(eqn.invars)
    value = call("jnp.unstack", x, axis=str(eqn.params["axis"]))
    scope.assign(eqn.outvars, value, one_is_bare=False)


def _sort(scope: Scope, eqn: jex.JaxprEqn) -> None:
    params = eqn.params
    operands = structure(scope.arguments(eqn.invars))
    settings: dict[str, str] = {
        "is_stable": repr(params["is_stable"]),
        "num_keys": str(params["num_keys"]),
    }
    value = call("lax.sort", operands, str(params["dimension"]), **settings)
    scope.assign(eqn.outvars, value)


def _debug_print(scope: Scope, eqn: jex.JaxprEqn) -> None:
    params = eqn.params
    leaves = scope.arguments(eqn.invars)
    statics = dict(params["static_args"])
    total = params["in_tree"].num_leaves
    operands = iter(leaves)
    flat = [
        parameter(statics[i]) if i in statics else next(operands) for i in range(total)
    ]
    args, kwargs = params["in_tree"].unflatten(flat)
    escaped = lambda text: text.replace("{", "{{").replace("}", "}}")
    text = params["fmt"] if params["has_placeholders"] else escaped(params["fmt"])
    settings = dict(kwargs, ordered="True") if params["ordered"] else kwargs
    scope.statement(call("jax.debug.print", parameter(text), *args, **settings))


def returned(outputs: Sequence[str]) -> str:
    """What a function returns: one value, or several as a tuple."""
    return structure(outputs, bare=True)


def _or_none(items: Sequence[str]) -> str:
    return structure(items) if items else "None"


def _assign_groups(
    scope: Scope, groups: Sequence[Sequence[jex.Var]], value: str
) -> None:
    """Writes `(a, b), c = value`."""
    targets: list[str] = []
    for group in groups:
        if not group:
            targets.append("_")
        elif len(group) <= 4:
            targets.append(structure(scope.targets(group)))
        else:
            (name,) = scope.fresh(1)
            targets.append(name)
            scope.bind(group, [f"{name}[{i}]" for i in range(len(group))])
    scope.statement(value, f"{tuple_of(targets, bare=True)} = ")


CONTROL: dict[str, Statement] = {
    **dict.fromkeys(CALLS, _write_call),
    "cond": _write_cond,
    "custom_linear_solve": _linear_solve,
    "custom_vmap_call": _of_examples,
    "debug_print": _debug_print,
    "optimization_barrier": _barrier,
    "pure_callback": _callback,
    "remat2": _checkpoint,
    "scan": _write_scan,
    "sort": _sort,
    "unstack": _unstack,
    "while": _write_while,
}
