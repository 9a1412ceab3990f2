"""What JAX takes for the same program."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from .registry import canary

_context: Any = jax.make_user_context(None)


@canary("jax #39201")
def a_context_is_part_of_the_key_of_a_program() -> Iterator[str]:
    """`el.plans` traces jitted functions anew, in a context that is new each time.

    It puts stand-ins in (`engine/_listing.py`). If JAX took such a trace for that of
    the same function elsewhere, a later run would run the stand-ins, and a later
    listing would find nothing.
    """
    traced: list[None] = []

    @jax.jit
    def jitted(x: jax.Array) -> jax.Array:
        traced.append(None)
        return jnp.sin(x)

    for name in ("one", "other"):
        with _context(name):
            jax.make_jaxpr(jitted)(1.0)
    jax.make_jaxpr(jitted)(1.0)
    if len(traced) != 3:
        yield f"traced {len(traced)} times in two contexts and in none"

    step = lambda carry, _: (jnp.sin(carry), None)
    scan = el.Scan(step, schedule=el.StoreAll())
    loss = jax.jit(lambda x: scan(x, length=9)[0])
    gradient = jax.grad(loss)
    before = str(jax.make_jaxpr(gradient)(1.0))
    listed = [len(el.plans(gradient)(1.0)) for _ in range(2)]
    if listed != [1, 1]:
        yield f"`el.plans` lists {listed} plans of one loop"
    if str(jax.make_jaxpr(gradient)(1.0)) != before:
        yield "a program has stand-ins after `el.plans`"
