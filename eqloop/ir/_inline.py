"""Calls of compiled functions, replaced by what they call."""

from collections.abc import Callable

import jax
import jax.extend.core as jex
from jax.experimental.layout import Layout

from .._programs import inlined
from ._atoms import of_closed


@of_closed
def inline_jit(
    jaxpr: jex.ClosedJaxpr,
    condition: Callable[[jex.JaxprEqn], bool] = lambda eqn: True,
) -> jex.ClosedJaxpr:
    """Puts the equations of functions under `jax.jit` in place of their calls.

    A call stays if it says where its operands or results are stored, or if it may reuse
    the memory of its operands, because its equations could not say that.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.
        condition: Which calls to replace, given their equations; `eqn.params["name"]`
            is the name of the function. By default all.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr, or `condition` is not a function.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(jax.jit(jnp.sin))(1.0)
        >>> ir.inline_jit(jaxpr, lambda eqn: eqn.params["name"] == "sin")
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    if not callable(condition):
        raise TypeError(
            f"inline_jit: `condition` must be a function of an equation, such as "
            f"`lambda eqn: eqn.params['name'] == 'silu'`, but it is {condition!r}."
        )

    return inlined(jaxpr, lambda eqn: _is_plain_call(eqn) and condition(eqn))


def _is_plain_call(eqn: jex.JaxprEqn) -> bool:
    # An unspecified sharding is `None` or an object of JAX's own, and no `Sharding`.
    if eqn.primitive.name != "jit" or any(eqn.params["donated_invars"]):
        return False
    placed = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")
    return not any(
        isinstance(place, jax.sharding.Sharding | Layout)
        for name in placed
        for place in eqn.params[name]
    )
