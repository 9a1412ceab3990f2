"""Runs a program and checks its numbers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .._arrays import Arrays, is_inexact
from .._programs import constant
from .._types import PyTree, Value
from ..tracing import NonFiniteError
from ._body import Body
from ._context import Context
from ._finding import Finding, first, nothing
from ._program import Program
from ._rules import RULES
from ._sites import Argument, Site


class Watch:
    """A program to run, with all places where it may fail.

    The places are found while the program is traced, before it can fail.
    """

    def __init__(self, program: Program):
        self.program = program
        self._sites: list[Site | Argument] = []

    def __call__(self, args: Arrays) -> tuple[list[Value], Finding]:
        """Runs the program: its outputs, and what was found."""
        program = self.program
        closed, context = program.jaxpr, Context()
        body = Body(self._sites, RULES)
        outs = body.run(closed.jaxpr, closed.consts, args, context)
        finding = first(body.finding(context), self._given(body, args, outs))
        return outs, finding

    def error(self, finding: PyTree) -> NonFiniteError:
        """The error to raise."""
        site, iterations, ranges = finding
        return NonFiniteError(self._sites[int(site) - 1].describe(ranges, iterations))

    def _given(self, body: Body, args: Arrays, outs: Arrays) -> Finding:
        """The argument that has a NaN, if a result has one.

        A NaN that reaches no result is meant to be there, as for missing data.
        """
        is_new = lambda out: all(out is not arg for arg in args)
        results = [out for out in outs if is_inexact(out) and is_new(out)]
        named = [
            (name, arg)
            for name, arg in zip(self.program.names, args, strict=True)
            if is_inexact(arg)
        ]
        if not (results and named):
            return nothing()
        numbers: list[int] = []
        for name, _ in named:
            self._sites.append(Argument(name))
            numbers.append(len(self._sites))
        given = _have_nan(body, [arg for _, arg in named])
        site = constant(numbers)[jnp.argmax(given)]
        is_wrong = given.any() & _have_nan(body, results).any()
        return nothing()._replace(site=jnp.where(is_wrong, site, 0))


def _have_nan(body: Body, arrays: Sequence[Value]) -> jax.Array:
    return jnp.isnan(jnp.stack([body.extent(x)[0] for x in arrays]))
