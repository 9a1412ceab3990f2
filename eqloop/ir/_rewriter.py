"""Writing a jaxpr anew, equation by equation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.core
import jax.extend.core as jex

from .._programs import Rewrite, map_programs
from ._atoms import Closed


class Rewriter:
    """The new equations of a jaxpr, and what stands for its old variables.

    The inputs and outputs stay what they are. If nothing changes, `result` is the very
    jaxpr that was given: so a fixed point is told by identity.
    """

    def __init__(self, jaxpr: Closed):
        self._jaxpr = jaxpr
        self._stands_for: dict[jex.Var, jax.core.Atom] = {}
        self.eqns: list[jex.JaxprEqn] = []

    def read(self, atom: jax.core.Atom) -> jax.core.Atom:
        """What stands for an atom of the old jaxpr."""
        if isinstance(atom, jex.Literal):
            return atom
        return self._stands_for.get(atom, atom)

    def enter(
        self, eqn: jex.JaxprEqn, rewrite: Rewrite = lambda jaxpr: jaxpr
    ) -> jex.JaxprEqn:
        """An old equation with its operands replaced and its jaxprs rewritten."""
        eqn = map_programs(eqn, rewrite)
        invars = [self.read(atom) for atom in eqn.invars]
        if all(new is old for new, old in zip(invars, eqn.invars, strict=True)):
            return eqn
        return eqn.replace(invars=invars)

    def replace(self, var: jex.Var, atom: jax.core.Atom) -> bool:
        """From here on `atom` stands for `var`, if it is of just the same type."""
        if var.aval != atom.aval:
            return False
        self._stands_for[var] = atom
        return True

    def emit(self, eqn: jex.JaxprEqn) -> None:
        """Adds an equation, unless others stand for all that it computes."""
        if eqn.effects or not eqn.outvars or any(map(self._is_needed, eqn.outvars)):
            self.eqns.append(eqn)

    def inline(
        self,
        jaxpr: Closed,
        operands: Sequence[jax.core.Atom],
        outvars: Iterable[jex.Var],
    ) -> None:
        """Adds the equations of a jaxpr in place of the one that called it."""
        inside: dict[jex.Var, jax.core.Atom] = dict(
            zip(jaxpr.jaxpr.invars, operands, strict=True)
        )
        for var, const in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            inside[var] = jex.Literal(const, var.aval)

        def read(atom: jax.core.Atom) -> jax.core.Atom:
            return atom if isinstance(atom, jex.Literal) else inside[atom]

        for eqn in jaxpr.eqns:
            # The jaxpr may be called elsewhere, too: its variables are made anew.
            fresh = [
                var if isinstance(var, jex.DropVar) else jex.Var(var.aval)
                for var in eqn.outvars
            ]
            inside.update(zip(eqn.outvars, fresh, strict=True))
            self.eqns.append(
                eqn.replace(
                    invars=[read(atom) for atom in eqn.invars],
                    outvars=fresh,
                    effects={_rename(effect, read) for effect in eqn.effects},
                )
            )
        for var, atom in zip(outvars, jaxpr.jaxpr.outvars, strict=True):
            self._stands_for[var] = read(atom)

    def result(self) -> Closed:
        """The new jaxpr."""
        jaxpr = self._jaxpr.jaxpr
        outvars = [self.read(atom) for atom in jaxpr.outvars]
        old = [*jaxpr.eqns, *jaxpr.outvars]
        new = [*self.eqns, *outvars]
        if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
            return self._jaxpr
        jaxpr = jaxpr.replace(eqns=self.eqns, outvars=outvars)
        return jex.ClosedJaxpr(jaxpr, self._jaxpr.consts)

    def _is_needed(self, var: jex.Var) -> bool:
        return not isinstance(var, jex.DropVar) and var not in self._stands_for


def _rename(effect: Any, read: Callable[[jax.core.Atom], jax.core.Atom]) -> Any:
    """An effect on a reference names the variable that holds the reference."""
    var = getattr(effect, "input", None)
    return effect.replace(input=read(var)) if isinstance(var, jex.Var) else effect
