"""Jaxprs from equations."""

from collections.abc import Sequence
from typing import Any

import jax.core
import jax.extend.core as jex

from .._calls import typed
from .._programs import jaxpr_of


@typed
def eqns_to_jaxpr(
    eqns: Sequence[jex.JaxprEqn],
    invars: Sequence[jex.Var] | None = None,
    outvars: Sequence[jax.core.Atom] | None = None,
    constvars: Sequence[jex.Var] = (),
) -> jex.Jaxpr:
    """Makes a jaxpr from equations, for instance from some of those of another jaxpr.

    Args:
        eqns: The equations, in an order in which they can be run.
        invars: The inputs. By default the variables that are read and not computed, in
            the order in which they are read, except for the `constvars`.
        outvars: The outputs. By default the variables that are computed and not read.
        constvars: The variables that hold constants.

    Returns:
        A jaxpr.

    Raises:
        TypeError: Among `eqns` is something else.
        ValueError: A variable is read and neither computed before nor an input, or
            computed twice, or an output that is not computed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(1.0)
        >>> ir.eqns_to_jaxpr(jaxpr.eqns[1:])
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    read, computed = _reads_and_computes(eqns)
    if invars is None:
        given = {*computed, *constvars}
        invars = [var for var in read if var not in given]
    if outvars is None:
        outvars = [var for var in computed if var not in read]
    _check_known(eqns, [*constvars, *invars], outvars)
    return jaxpr_of(eqns, invars, outvars, constvars)


@typed
def eqns_to_closed_jaxpr(
    eqns: Sequence[jex.JaxprEqn],
    invars: Sequence[jex.Var] | None = None,
    outvars: Sequence[jax.core.Atom] | None = None,
    constvars: Sequence[jex.Var] = (),
    consts: Sequence[Any] = (),
) -> jex.ClosedJaxpr:
    """Makes a closed jaxpr from equations, which can be evaluated.

    Args:
        eqns: As for `eqns_to_jaxpr`, as are `invars`, `outvars` and `constvars`.
        invars: The inputs.
        outvars: The outputs.
        constvars: The variables that hold constants.
        consts: The values of `constvars`, as many.

    Returns:
        A closed jaxpr.

    Raises:
        TypeError: Among `eqns` is something else.
        ValueError: As `eqns_to_jaxpr`, or there are more or fewer `consts` than
            `constvars`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(1.0)
        >>> first = ir.eqns_to_closed_jaxpr(jaxpr.eqns[:1])
        >>> float(jax.core.eval_jaxpr(first.jaxpr, first.consts, 0.0)[0])
        1.0
    """
    if len(consts) != len(constvars):
        raise ValueError(
            f"eqns_to_closed_jaxpr: there are {len(constvars)} `constvars` but "
            f"{len(consts)} `consts`, and each needs its value."
        )
    jaxpr = eqns_to_jaxpr(eqns, invars, outvars, constvars)
    return jex.ClosedJaxpr(jaxpr, list(consts))


def _reads_and_computes(
    eqns: Sequence[jex.JaxprEqn],
) -> tuple[dict[jex.Var, None], dict[jex.Var, None]]:
    """The variables in order; dictionaries stand for ordered sets."""
    read: dict[jex.Var, None] = {}
    computed: dict[jex.Var, None] = {}
    for i, eqn in enumerate(eqns):
        if not isinstance(eqn, jex.JaxprEqn):
            raise TypeError(
                f"eqns_to_jaxpr: `eqns[{i}]` is a {type(eqn).__name__}, not an "
                f"equation: those of a jaxpr are `jaxpr.eqns`."
            )
        read.update((a, None) for a in eqn.invars if isinstance(a, jex.Var))
        for var in eqn.outvars:
            if isinstance(var, jex.DropVar):
                continue
            if var in computed:
                raise ValueError(
                    f"eqns_to_jaxpr: `eqns[{i}]`, {eqn.primitive}, computes a variable "
                    f"that an equation before it has computed: is it given twice?"
                )
            computed[var] = None
    return read, computed


def _check_known(
    eqns: Sequence[jex.JaxprEqn],
    inputs: Sequence[jex.Var],
    outvars: Sequence[jax.core.Atom],
) -> None:
    known = set(inputs)
    for i, eqn in enumerate(eqns):
        for j, atom in enumerate(eqn.invars):
            if isinstance(atom, jex.Var) and atom not in known:
                raise ValueError(
                    f"eqns_to_jaxpr: operand {j} of `eqns[{i}]`, {eqn.primitive}, is "
                    f"neither computed before it nor among `invars` and `constvars`: "
                    f"add its equation before this one, or add it to `invars`."
                )
        known.update(eqn.outvars)
    for i, atom in enumerate(outvars):
        if isinstance(atom, jex.Var) and atom not in known:
            raise ValueError(
                f"eqns_to_jaxpr: `outvars[{i}]` is neither computed by an equation nor "
                f"an input: add the equation that computes it."
            )
