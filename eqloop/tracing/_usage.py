"""Which inputs of a jaxpr are read, passed through, or unused.

What is asked of a value flows from the outputs back to the inputs. An output is asked
for as it is; so is what it is merely handed on from, by a call, by a loop that does not
change it, by a branch. Of what any other equation takes, the value is asked for, if
anything is asked of what the equation gives, or if it has an effect.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.extend.core as jex

from .._arrays import pick, split
from .._compat import CALLS, close, form_of, form_params, scan_counts
from .._programs import Formula
from .._types import AnyJaxpr

Usage = Literal["unused", "passed", "read"]


class _Asked(enum.IntEnum):
    """How a value is used. Of two uses, the greater counts."""

    NOTHING = 0
    AS_IT_IS = 1
    ITS_VALUE = 2


_NAMES: dict[_Asked, Usage] = {
    _Asked.NOTHING: "unused",
    _Asked.AS_IT_IS: "passed",
    _Asked.ITS_VALUE: "read",
}
_Many = list[_Asked]


def leaf_usage(jaxpr: jex.ClosedJaxpr) -> list[Usage]:
    """How each input of a jaxpr is used."""
    outs = [_Asked.AS_IT_IS] * len(jaxpr.out_avals)
    return [_NAMES[asked] for asked in _asked_of_inputs(jaxpr, outs)]


def _asked_of_inputs(jaxpr: AnyJaxpr, outs: Sequence[_Asked]) -> _Many:
    """How the inputs of a jaxpr are used, if its outputs are used like this."""
    jaxpr = close(jaxpr).jaxpr
    asked: dict[Any, _Asked] = {}

    def ask(atoms: Sequence[jax.core.Atom], many: Sequence[_Asked]) -> None:
        for atom, one in zip(atoms, many, strict=True):
            if not isinstance(atom, jex.Literal):
                asked[atom] = max(one, asked.get(atom, _Asked.NOTHING))

    of = lambda variables: [asked.get(v, _Asked.NOTHING) for v in variables]
    ask(jaxpr.outvars, outs)
    for eqn in reversed(jaxpr.eqns):
        rule = _RULES.get(form_of(eqn), _compute)
        ask(eqn.invars, rule(eqn, of(eqn.outvars)))
    return of(jaxpr.invars)


# What is asked of the inputs of an equation, by what is asked of its outputs.


def _compute(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    for value in eqn.params.values():
        if isinstance(value, Formula):
            return _asked_of_inputs(value.expanded, outs)
    asked = _Asked.ITS_VALUE if any(outs) or eqn.effects else _Asked.NOTHING
    return [asked] * len(eqn.invars)


def _usage_of_call(param: str) -> Callable[[jex.JaxprEqn, _Many], _Many]:
    return lambda eqn, outs: _asked_of_inputs(form_params(eqn)[param], outs)


def _usage_of_scan(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    body = eqn.params["jaxpr"]
    num_consts, num_carry = scan_counts(eqn.params)
    carry, ys = split(outs, num_carry)

    def asked(carry: _Many, ys: _Many) -> tuple[_Many, _Many, _Many]:
        return split(_asked_of_inputs(body, [*carry, *ys]), num_consts, num_carry)

    if eqn.params["length"] == 0:
        nothing = [_Asked.NOTHING] * len(eqn.invars)
        return [*nothing[:num_consts], *carry, *nothing[num_consts + num_carry :]]
    # What is stacked is not handed on, except for the elements of `xs`.
    stacked = [_Asked.ITS_VALUE if y else y for y in ys]
    carry = _until_settled(carry, lambda carry: asked(carry, stacked)[1])
    consts, _, _ = asked(carry, stacked)
    _, _, xs = asked(carry, ys)
    return [*consts, *carry, *xs]


def _usage_of_while(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    cond, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    stays = [at == num_body + i for i, at in enumerate(_inputs_handed_on(body))]

    def of_cond(carry: _Many) -> tuple[_Many, _Many]:
        # How often the body runs matters for what it changes and for its effects.
        changed = [asked for asked, same in zip(carry, stays, strict=True) if not same]
        asked = _Asked.ITS_VALUE if body.effects or any(changed) else _Asked.NOTHING
        return split(_asked_of_inputs(cond, [asked]), num_cond)

    def once(carry: _Many) -> _Many:
        _, by_body = split(_asked_of_inputs(body, carry), num_body)
        _, by_cond = of_cond(carry)
        return list(map(max, by_body, by_cond))

    carry = _until_settled(outs, once)
    by_body, _ = split(_asked_of_inputs(body, carry), num_body)
    by_cond, _ = of_cond(carry)
    return [*by_cond, *by_body, *carry]


def _usage_of_cond(eqn: jex.JaxprEqn, outs: _Many) -> _Many:
    branches = eqn.params["branches"]
    operands = [_asked_of_inputs(branch, outs) for branch in branches]
    # Which branch runs does not matter for what all of them hand on alike.
    sources = zip(*map(_inputs_handed_on, branches), strict=True)
    differs = [None in source or len(set(source)) > 1 for source in sources]
    index = _compute(eqn, pick(outs, differs))[:1]
    return [*index, *map(max, *operands)]


def _inputs_handed_on(jaxpr: AnyJaxpr) -> list[int | None]:
    """For each output of a jaxpr the input that it is, if it is one."""
    jaxpr = close(jaxpr).jaxpr
    at: dict[jax.core.Atom, int]
    at = {variable: i for i, variable in enumerate(jaxpr.invars)}
    is_literal = lambda atom: isinstance(atom, jex.Literal)
    return [None if is_literal(out) else at.get(out) for out in jaxpr.outvars]


def _until_settled(carry: _Many, once: Callable[[_Many], _Many]) -> _Many:
    """How the initial carry is used, over any number of steps."""
    while True:
        more = list(map(max, carry, once(carry)))
        if more == carry:
            return carry
        carry = more


_RULES: dict[str, Callable[[jex.JaxprEqn, _Many], _Many]] = {
    "scan": _usage_of_scan,
    "while": _usage_of_while,
    "cond": _usage_of_cond,
    "shard_map": _usage_of_call("jaxpr"),
    **{name: _usage_of_call(param) for name, param in CALLS.items()},
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call"), _usage_of_call("call_jaxpr")
    ),
}
