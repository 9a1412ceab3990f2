"""Which inputs of a jaxpr are read, passed through, or unused.

What is asked of a value flows from the outputs back to the inputs. An output is asked
for as it is; so is what it is merely handed on from, by a call, by a loop that does not
change it, by a branch. Of what any other equation takes, the value is asked for, if
anything is asked of what the equation gives, or if it has an effect.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.extend.core as jex

from .._arrays import pick, split
from .._compat import called_by, close, form_of, form_params, scan_counts
from .._programs import formula_of
from .._types import AnyJaxpr

Usage = Literal["unused", "passed", "read"]
# How a value is used is a place in this tuple. Of two uses, the greater counts.
_USAGES: tuple[Usage, ...] = "unused", "passed", "read"
_UNUSED, _PASSED, _READ = range(3)
_Many = list[int]


def leaf_usage(jaxpr: jex.ClosedJaxpr) -> list[Usage]:
    """How each input of a jaxpr is used."""
    outs = [_PASSED] * len(jaxpr.out_avals)
    return [_USAGES[asked] for asked in _asked_of_inputs(jaxpr, outs)]


def _asked_of_inputs(program: AnyJaxpr, outs: Sequence[int]) -> _Many:
    """How the inputs of a program are used, if its outputs are used like this."""
    jaxpr = close(program).jaxpr
    asked: dict[Any, int] = {}
    of = lambda variables: [asked.get(v, _UNUSED) for v in variables]

    def ask(atoms: Sequence[Any], many: Sequence[int]) -> None:
        for atom, one in zip(atoms, many, strict=True):
            if not isinstance(atom, jex.Literal):
                asked[atom] = max(one, *of([atom]))

    ask(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        ask(eqn.invars, _asked_of_operands(eqn, of(eqn.outvars)))
    return of(jaxpr.invars)


def _asked_of_operands(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    name, params, formula = form_of(eqn), form_params(eqn), formula_of(eqn)
    if name in ("custom_jvp_call", "custom_vjp_call", "shard_map"):
        call = params.get("call_jaxpr", params.get("jaxpr"))
    else:
        call = called_by(eqn) if formula is None else formula.expanded
    if call is not None:
        return _asked_of_inputs(call, outs)
    rules = {"scan": _of_scan, "while": _of_while, "cond": _of_cond}
    if name in rules:
        return rules[name](eqn, outs)
    return [_READ if any(outs) or eqn.effects else _UNUSED] * len(eqn.invars)


def _of_scan(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    num_consts, num_carry = scan_counts(eqn.params)
    carry, ys = split(outs, num_carry)

    def once(carry: _Many, ys: _Many) -> tuple[_Many, _Many, _Many]:
        asked = _asked_of_inputs(eqn.params["jaxpr"], [*carry, *ys])
        return split(asked, num_consts, num_carry)

    if eqn.params["length"] == 0:
        num_xs = len(eqn.invars) - num_consts - num_carry
        return [*[_UNUSED] * num_consts, *carry, *[_UNUSED] * num_xs]
    # What is stacked is not handed on, except for the elements of `xs`.
    stacked = [_READ if y else y for y in ys]
    carry = _until_settled(carry, lambda carry: once(carry, stacked)[1])
    return [*once(carry, stacked)[0], *carry, *once(carry, ys)[2]]


def _of_while(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    changes = [at != num_body + i for i, at in enumerate(_inputs_handed_on(body))]

    def once(carry: _Many) -> tuple[_Many, _Many, _Many]:
        # How often the body runs matters for what it changes and for its effects.
        matters = body.effects or any(pick(carry, changes))
        asked = _asked_of_inputs(cond, [_READ if matters else _UNUSED])
        of_cond, by_cond = split(asked, num_cond)
        of_body, by_body = split(_asked_of_inputs(body, carry), num_body)
        return of_cond, of_body, list(map(max, by_cond, by_body))

    carry = _until_settled(outs, lambda carry: once(carry)[2])
    of_cond, of_body, _ = once(carry)
    return [*of_cond, *of_body, *carry]


def _of_cond(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    branches = eqn.params["branches"]
    operands = [_asked_of_inputs(branch, outs) for branch in branches]
    # Which branch runs does not matter for what all of them hand on alike.
    sources = zip(*map(_inputs_handed_on, branches), strict=True)
    differs = [None in source or len(set(source)) > 1 for source in sources]
    matters = eqn.effects or any(pick(outs, differs))
    return [_READ if matters else _UNUSED, *map(max, *operands)]


def _inputs_handed_on(program: AnyJaxpr) -> list[int | None]:
    """For each output of a program the input that it is, if it is one."""
    jaxpr = close(program).jaxpr
    at = {id(variable): i for i, variable in enumerate(jaxpr.invars)}
    return [at.get(id(out)) for out in jaxpr.outvars]


def _until_settled(carry: _Many, once: Callable[[_Many], _Many]) -> _Many:
    """How the initial carry is used, over any number of steps."""
    while (more := list(map(max, carry, once(carry)))) != carry:
        carry = more
    return carry
