"""Products that are known where a step is linearised, as it has been run before.

Where the steps of a block are reversed together, they have just been run one after the
other, since their carries were not known. What takes time in most steps are products
of matrices, whose values take little room. So these are kept for the block, and the
steps are linearised without multiplying again: the values are given to a step behind
its `x`, and their derivatives are products of derivatives and factors, as always.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.core
import jax.extend.core as jex
from jax.custom_derivatives import SymbolicZero

from ...._arrays import Arrays, Flags, is_symbolic, pick, put
from ...._programs import aval_of, pruned, run
from ...._types import Aval, Index, Value
from .._loop import element, nbytes, part
from .._step import Step

if TYPE_CHECKING:
    from .._backward_step import BackwardStep

# A sum of fewer terms is quickly computed again.
_LEAST_TERMS = 16
# These may make one array of several products, which takes no more than they do.
_LINEAR = frozenset({"add", "sub", "transpose", "reshape"})


@dataclasses.dataclass(frozen=True)
class Products:
    """The products of a step.

    Attributes:
        program: From consts, carry and `x` to their values.
        step: The step, given the values behind `x`.
    """

    program: jex.ClosedJaxpr
    step: Step

    @property
    def types(self) -> list[Aval]:
        """The types of the values."""
        return list(self.program.out_avals)


@dataclasses.dataclass(frozen=True)
class KnownProducts:
    """What is known of the last steps of a loop: their products.

    Attributes:
        rows: The products, of a step in each row.
        first: The position of the step whose products are in the first row.
        step: The step, which gets its products behind its `x`.
        back: What is done to such a step, if it can be given them, too.
    """

    rows: Arrays
    first: int
    step: Step
    back: "BackwardStep | None"

    def of_step(self, position: Index) -> list[Value]:
        """The products of the step at a position."""
        return [element(row, position - self.first) for row in self.rows]

    def of_block(self, position: Index, count: int) -> list[Value]:
        """The products of so many steps from a position on."""
        return [part(row, position - self.first, count) for row in self.rows]


@functools.lru_cache(maxsize=128)
def products_of(step: Step, chosen: Flags | None = None) -> Products | None:
    """The products of a step that may be worth keeping, if there are any.

    Args:
        step: The step.
        chosen: Which of these to keep; all of them by default.
    """
    jaxpr = step.jaxpr.jaxpr
    groups = _groups(jaxpr, jaxpr.invars[step.num_consts :])
    if chosen is not None:
        groups = dict(pick(list(groups.items()), chosen))
    if not groups:
        return None
    within = {id(eqn) for group in groups.values() for eqn in group}
    eqns, values = list[jex.JaxprEqn](), list[jex.Var]()
    for eqn in jaxpr.eqns:
        group = groups.get(eqn.outvars[0])
        if group is not None:
            eqn, value = _known_value(group)
            values.append(value)
        elif id(eqn) in within:
            continue
        eqns.append(eqn)
    close = lambda jaxpr: jex.ClosedJaxpr(jaxpr, step.jaxpr.consts)
    unnamed = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    bare = jaxpr.replace(outvars=list(groups), debug_info=unnamed)
    invars = [*jaxpr.invars, *values]
    given = jaxpr.replace(invars=invars, eqns=eqns, debug_info=unnamed)
    return Products(pruned(close(bare)), dataclasses.replace(step, jaxpr=close(given)))


def _groups(
    jaxpr: jex.Jaxpr, varying: Sequence[jex.Var]
) -> dict[jax.core.Atom, list[jex.JaxprEqn]]:
    """What may be kept, with the equations that compute it from factors.

    Args:
        jaxpr: The program of a step.
        varying: Its inputs that differ from step to step.

    Returns:
        The equations of each value, in the order in which the values are computed.
    """
    read = [var for eqn in jaxpr.eqns for var in eqn.invars] + list(jaxpr.outvars)
    times = Counter(var for var in read if isinstance(var, jex.Var))
    varies, found = set(varying), dict[jax.core.Atom, list[jex.JaxprEqn]]()
    is_free = lambda x: isinstance(x, jex.Var) and times[x] == 1 and x in found
    for eqn in jaxpr.eqns:
        if varies.isdisjoint(v for v in eqn.invars if isinstance(v, jex.Var)):
            continue
        varies.update(eqn.outvars)
        out, name = eqn.outvars[0], eqn.primitive.name
        if name == "dot_general" and _has_many_terms(eqn):
            found[out] = [eqn]
        elif (
            name in _LINEAR
            and all(map(is_free, eqn.invars))
            and nbytes([aval_of(out)]) <= nbytes(map(aval_of, eqn.invars))
        ):
            found[out] = [e for var in eqn.invars for e in found.pop(var)] + [eqn]
    return found


def _has_many_terms(eqn: jex.JaxprEqn) -> bool:
    """Whether each number of a product is a sum of many."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    sizes = [aval_of(eqn.invars[0]).shape[axis] for axis in contracted]
    return any(map(is_symbolic, sizes)) or math.prod(sizes) >= _LEAST_TERMS


def _known_value(group: list[jex.JaxprEqn]) -> tuple[jex.JaxprEqn, jex.Var]:
    """An equation in place of some that compute a value, and the variable of that.

    Its result is the value that it is given. Its derivative is that of the equations.
    """
    out, own = group[-1].outvars[0], {eqn.outvars[0] for eqn in group}
    read = [v for eqn in group for v in eqn.invars if isinstance(v, jex.Var)]
    factors = list(dict.fromkeys(var for var in read if var not in own))
    empty = jax.make_jaxpr(lambda: ())().jaxpr
    unnamed = empty.debug_info._replace(arg_names=None, result_paths=None)
    program = jex.ClosedJaxpr(
        empty.replace(invars=factors, eqns=group, outvars=[out], debug_info=unnamed), []
    )

    @jax.custom_jvp
    def given(value: Value, *factors: Value) -> Value:
        return value

    def push(
        primals: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[Value, Value]:
        (value, *factors), (_, *dots) = primals, tangents
        moves = [not isinstance(dot, SymbolicZero) for dot in dots]
        of_moving = lambda *moving: run(program, *put(factors, moves, moving))[0]
        _, dot = jax.jvp(of_moving, pick(factors, moves), pick(dots, moves))
        return value, dot

    given.defjvp(push, symbolic_zeros=True)
    # Traced, the equation has the form that this version of JAX gives it.
    template = jax.make_jaxpr(given)(aval_of(out), *map(aval_of, factors)).jaxpr
    (eqn,), (value, *_) = template.eqns, template.invars
    place = group[-1].source_info
    return eqn.replace(
        invars=[value, *factors], outvars=[out], source_info=place
    ), value
