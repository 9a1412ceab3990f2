"""Which operations can make a number that is not finite from numbers that are."""

import jax.extend.core as jex
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from .._arrays import has_dtype, is_inexact, is_key
from .._programs import is_ref
from .._types import Aval


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# The very same numbers in other places: their least and greatest stay the same.
SAME_NUMBERS = _named(
    """broadcast_in_dim copy expand_dims known_cast optimization_barrier pcast pvary
    reshape rev sharding_constraint squeeze stop_gradient transpose"""
)

# Some of the numbers of one or several arrays, perhaps with another sign.
_MOVED = _named(
    """abs all_gather all_to_all argmax argmin bitcast_convert_type ceil clamp
    concatenate conj cummax cummin device_put dynamic_slice dynamic_update_slice
    empty floor get imag iota max min neg pad pmax pmin ppermute real reduce_max
    reduce_min round select_n sign slice sort split swap top_k"""
)

# The numbers of other devices are checked there.
_ELSEWHERE = _named("psum psum_invariant reduce_scatter unreduced_psum")

# The result lies between bounds for every operand.
_BOUNDED = _named("atan atan2 erf erfc logistic random_bits tanh")

_SAFE = SAME_NUMBERS | _MOVED | _ELSEWHERE | _BOUNDED


def can_fail(eqn: jex.JaxprEqn) -> bool:
    """Whether to check the results of an equation."""
    if not any(is_inexact(out.aval) for out in eqn.outvars if holds_numbers(out.aval)):
        return False
    match eqn.primitive.name:
        case "gather":  # out of bounds it may give NaN
            return eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP
        case "convert_element_type":
            (operand,) = eqn.invars
            return _greatest(operand.aval) > _greatest(eqn.outvars[0].aval)
        case name:
            return name not in _SAFE


def holds_numbers(aval: Aval) -> bool:
    """Whether values of a type are arrays of numbers. Keys and references are not."""
    return has_dtype(aval) and not is_ref(aval) and not is_key(aval)


def _greatest(aval: Aval) -> float:
    if aval.dtype == bool:
        return 1.0
    info = jnp.finfo if is_inexact(aval) else jnp.iinfo
    return float(info(aval.dtype).max)
