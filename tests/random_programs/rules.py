"""Functions with derivatives of their own, of every kind that a user can write.

A rule is *honest* if it gives the function's true derivatives, of every order. JAX's
own control flow gives those in any case; of rules that are not honest its second
derivatives are not always those of the program written out, so they stay outside it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Rule:
    f: Callable[..., Any]
    is_honest: bool
    is_forward: bool  # whether it has a derivative in forward mode


@jax.custom_jvp
def keeps(x: Any) -> Any:
    """A straight-through estimator whose rule calls it."""
    return jnp.round(3 * x) / 3


@keeps.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return keeps(primals[0]), tangents[0]


@jax.custom_jvp
def leaves(x: Any) -> Any:
    """One whose rule leaves it."""
    return jnp.round(3 * x) / 3


leaves.defjvp(lambda p, t: (jnp.round(3 * p[0]) / 3, t[0]))


@jax.custom_jvp
def own_primal(x: Any) -> Any:
    """Its rule gives another primal than it does itself."""
    return jnp.sin(x)


own_primal.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * jnp.cos(p[0])))


@jax.custom_jvp
def wave(x: Any) -> Any:
    return jnp.sin(x)


wave.defjvp(lambda p, t: (wave(p[0]), t[0] * jnp.cos(p[0])))


@jax.custom_jvp
def product(x: Any, y: Any) -> Any:
    """Of two arguments, with a rule for each."""
    return x * y


product.defjvps(lambda t, out, x, y: t * y, lambda t, out, x, y: x * t)


@jax.custom_jvp
def symbolic(x: Any) -> Any:
    return jnp.tanh(x)


def _symbolic_jvp(primals: Any, tangents: Any) -> Any:
    out, (t,) = jnp.tanh(primals[0]), tangents
    if isinstance(t, jax.custom_derivatives.SymbolicZero):
        return out, t
    return out, t * (1 - out * out)


symbolic.defjvp(_symbolic_jvp, symbolic_zeros=True)


@jax.custom_vjp
def damped(x: Any) -> Any:
    """An identity whose cotangent is bounded."""
    return x * 1


damped.defvjp(lambda x: (x * 1, None), lambda _, ct: (jnp.tanh(ct),))


@jax.custom_vjp
def residual(x: Any) -> Any:
    """Residuals of several dtypes."""
    return jnp.sin(x) * jnp.where(x > 0, 1, 2)


residual.defvjp(
    lambda x: (residual(x), (jnp.cos(x), x > 0, jnp.sum(x > 0, dtype=jnp.int32))),
    lambda res, ct: (
        ct * res[0] * jnp.where(res[1], 1, 2) + 0 * ct * jnp.where(res[2] > 3, 1, 2),
    ),
)


@jax.custom_vjp
def wave_vjp(x: Any) -> Any:
    return jnp.sin(x)


wave_vjp.defvjp(lambda x: (wave_vjp(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_vjp
def vjp_of_jvp(x: Any) -> Any:
    """One that calls a function with a rule for forward mode, in each of its parts."""
    return wave(x) * x


vjp_of_jvp.defvjp(
    lambda x: (wave(x) * x, x), lambda x, ct: (ct * (wave(x) + keeps(x)),)
)


@jax.custom_jvp
def jvp_of_jvp(x: Any) -> Any:
    return wave(x) + leaves(x)


jvp_of_jvp.defjvp(lambda p, t: (jvp_of_jvp(p[0]), t[0] * wave(p[0])))


@jax.custom_jvp
def jvp_of_vjp(x: Any) -> Any:
    return wave_vjp(x)


jvp_of_vjp.defjvp(lambda p, t: (wave_vjp(p[0]), t[0] * jnp.cos(p[0])))


@jax.custom_vjp
def symbolic_vjp(x: Any, y: Any) -> Any:
    return x * y, jnp.sin(x)


def _symbolic_vjp_forward(x: Any, y: Any) -> Any:
    return symbolic_vjp(x.value, y.value), (x.value, y.value)


def _symbolic_vjp_backward(res: Any, cts: Any) -> Any:
    (x, y), zero = res, jax.custom_derivatives.SymbolicZero
    one, other = (jnp.zeros_like(x) if isinstance(c, zero) else c for c in cts)
    return one * y + other * jnp.cos(x), one * x


symbolic_vjp.defvjp(_symbolic_vjp_forward, _symbolic_vjp_backward, symbolic_zeros=True)


def _optimized_for_remat() -> Callable[..., Any]:
    f = jax.custom_vjp(jnp.sin)
    backward = lambda x, ct: (ct * jnp.cos(x),)
    f.defvjp(lambda x: (jnp.sin(x), x), backward, optimize_remat=True)
    return f


RULES = {
    "keeps": Rule(keeps, is_honest=False, is_forward=True),
    "leaves": Rule(leaves, is_honest=False, is_forward=True),
    "own_primal": Rule(own_primal, is_honest=False, is_forward=True),
    "jvp_of_jvp": Rule(jvp_of_jvp, is_honest=False, is_forward=True),
    "wave": Rule(wave, is_honest=True, is_forward=True),
    "product": Rule(lambda x: product(x, jnp.cos(x)), is_honest=True, is_forward=True),
    "symbolic": Rule(symbolic, is_honest=True, is_forward=True),
    "jvp_of_vjp": Rule(jvp_of_vjp, is_honest=True, is_forward=True),
    "damped": Rule(damped, is_honest=False, is_forward=False),
    "residual": Rule(residual, is_honest=True, is_forward=False),
    "wave_vjp": Rule(wave_vjp, is_honest=True, is_forward=False),
    "vjp_of_jvp": Rule(vjp_of_jvp, is_honest=False, is_forward=False),
    "symbolic_vjp": Rule(lambda x: symbolic_vjp(x, x)[0], True, is_forward=False),
    "remat_vjp": Rule(_optimized_for_remat(), is_honest=True, is_forward=False),
}
