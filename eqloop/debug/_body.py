"""Runs the equations of one body, and checks their results.

A body is a program, or what a loop or a branch runs. Of every number that is checked,
and of every operand of what is checked, the least and the greatest are computed; at the
end they tell which equation, if any, was the first to fail. So the body runs as it is,
with a reduction beside each array that matters.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
from jax.extend import source_info_util

from .._arrays import Arrays, describe, has_dtype
from .._compat import form_of
from .._programs import constant, position_p
from .._types import AnyJaxpr, Index, Value
from ._can_fail import SAME_NUMBERS, can_fail, holds_numbers
from ._context import Context
from ._finding import OPERANDS, Extent, Finding, chosen, extent, nothing
from ._sites import Argument, Site


@dataclasses.dataclass(frozen=True)
class _Check:
    site: int
    order: int
    out: int
    operands: list[int]
    index: Index


Rule = Callable[["Body", Any, Arrays, Context], Sequence[Any]]


class Body:
    """One run of a body.

    Attributes:
        sites: All places of the whole program; that of number `i` is `sites[i - 1]`.
        rules: What is done for those equations that have bodies of their own.
        index: The index of the step that the innermost loop is at, where it says so.
        count: How many steps are run from there.
    """

    def __init__(self, sites: list[Site | Argument], rules: dict[str, Rule]):
        self.sites = sites
        self.rules = rules
        self.index: Any = None
        self.count = 1
        # By id, with the array itself, so that no other array gets the same id.
        self._rows: dict[int, tuple[Any, int]] = {}
        zero = jnp.zeros((), float)
        self._extents = [Extent(zero, zero, nothing().where)]
        self._checks: list[_Check] = []
        self._findings: list[tuple[int, Finding]] = []
        self._order = 0

    def run(
        self, jaxpr: AnyJaxpr, consts: Arrays, args: Arrays, context: Context
    ) -> list[Value]:
        """Runs a jaxpr, and returns its outputs."""
        values: dict[Any, Any] = {}
        read = lambda atom: atom.val if isinstance(atom, jex.Literal) else values[atom]
        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            operands = list(map(read, eqn.invars))
            if eqn.primitive is position_p:
                (self.index,), self.count = operands, eqn.params["count"]
                context = context.at_once(self.count)
                continue
            outs = self._run(eqn, operands, context)
            values.update(zip(eqn.outvars, outs, strict=True))
        return list(map(read, jaxpr.outvars))

    def inner(
        self, jaxpr: AnyJaxpr, consts: Arrays, args: Arrays, context: Context
    ) -> tuple[list[Value], Finding]:
        """Runs the body of a loop or a branch in this one."""
        body = Body(self.sites, self.rules)
        outs = body.run(jaxpr, consts, args, context)
        return outs, body.finding(context)

    def note(self, finding: Finding, context: Context) -> None:
        """Adds the findings of a loop's body or of a branch in this context."""
        if context.has_position and self.index is not None:
            finding = finding.at(len(context.frames) - 1, self.index)
        self._order += 1
        self._findings.append((self._order, finding))

    def check(self, site: Site, outs: Arrays, operands: Arrays) -> None:
        """Checks whether finite operands gave a result that is not finite."""
        self.sites.append(site)
        self._order += 1
        rows = [self._row(x) for x in operands if _has_extent(x)]
        out = self._joint_row([x for x in outs if _has_extent(x)])
        check = _Check(len(self.sites), self._order, out, rows, self.index)
        self._checks.append(check)

    def extent(self, x: Value) -> Extent:
        """The extent of an array."""
        return self._extents[self._row(x)]

    def finding(self, context: Context) -> Finding:
        """The finding of this body."""
        order, finding = self._own(context)
        for at, other in self._findings:
            is_earlier = (other.site > 0) & (at < order)
            finding = chosen(is_earlier, other, finding)
            order = jnp.where(is_earlier, at, order)
        return finding

    def _run(
        self, eqn: jex.JaxprEqn, operands: Arrays, context: Context
    ) -> Sequence[Value]:
        rule = self.rules.get(form_of(eqn))
        if rule is not None:
            return rule(self, eqn, operands, context.of(eqn))
        return self.opaque(eqn, operands, context)

    def opaque(
        self, eqn: jex.JaxprEqn, operands: Arrays, context: Context
    ) -> Sequence[Value]:
        """Runs an equation, and checks its results."""
        outs = _bind_again(eqn, operands)
        if eqn.primitive.name in SAME_NUMBERS:
            for out, operand in zip(outs, operands, strict=False):
                if (known := self._rows.get(id(operand))) is not None:
                    self._rows[id(out)] = out, known[1]
        if can_fail(eqn):
            self.check(self._site(eqn, context.of(eqn)), outs, operands)
        return outs

    def _site(self, eqn: jex.JaxprEqn, context: Context) -> Site:
        types = [describe(x.aval) for x in eqn.invars if holds_numbers(x.aval)]
        return Site(
            eqn.primitive.name,
            context.place_of(eqn),
            tuple(types),
            context.frames,
            context.is_backward,
            context.is_tangent,
            eqn.outvars[0].aval if len(eqn.outvars) == 1 else None,
        )

    def _row(self, x: Value) -> int:
        """The number of the extent of an array."""
        if id(x) not in self._rows:
            self._extents.append(extent(x))
            self._rows[id(x)] = x, len(self._extents) - 1
        return self._rows[id(x)][1]

    def _joint_row(self, arrays: Arrays) -> int:
        rows = list(map(self._row, arrays))
        if len(rows) == 1:
            return rows[0]
        low, high, _ = zip(*(self._extents[row] for row in rows), strict=True)
        low, high = jnp.min(jnp.stack(low)), jnp.max(jnp.stack(high))
        self._extents.append(Extent(low, high, nothing().where))
        return len(self._extents) - 1

    def _own(self, context: Context) -> tuple[Value, Finding]:
        """The first check that failed, and when."""
        never = jnp.asarray(self._order + 1, jnp.int32)
        if not self._checks:
            return never, nothing()
        low, high, where = map(jnp.stack, zip(*self._extents, strict=True))
        table = jnp.stack([low, high], axis=1)
        width = max(OPERANDS, *(len(check.operands) for check in self._checks))
        pad = lambda rows: [*rows, *[0] * (width - len(rows))]
        outs = constant([check.out for check in self._checks])
        results = table[outs]
        operands = table[constant([pad(check.operands) for check in self._checks])]

        is_nan = jnp.isnan(results).any(-1)
        made_nan = is_nan & ~jnp.isnan(operands).any((-2, -1))
        is_infinite = ~is_nan & ~jnp.isfinite(results).all(-1)
        made_infinite = is_infinite & jnp.isfinite(operands).all((-2, -1))
        failed = made_nan | made_infinite
        which, any_failed = jnp.argmax(failed), failed.any()

        of_which = lambda values: constant(values)[which]
        site = of_which([check.site for check in self._checks])
        order = of_which([check.order for check in self._checks])
        ranges = jnp.concatenate(
            [results[which][None], operands[which][:OPERANDS]], axis=0
        )
        site, where = jnp.where(any_failed, site, 0), where[outs[which]]
        found = Finding(site, nothing().iterations, ranges, where)
        indices = [check.index for check in self._checks]
        if context.has_position and any(index is not None for index in indices):
            known = [jnp.int32(-1) if index is None else index for index in indices]
            found = found.at(len(context.frames) - 1, jnp.stack(known)[which])
        return jnp.where(any_failed, order, never), found


def _bind_again(eqn: jex.JaxprEqn, operands: Arrays) -> Sequence[Value]:
    """What an equation gives."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    traceback = eqn.source_info.traceback
    params = eqn.primitive.get_bind_params(eqn.params)
    with source_info_util.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        outs = eqn.primitive.bind(*operands, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _has_extent(x: Value) -> bool:
    return has_dtype(x) and holds_numbers(x)
