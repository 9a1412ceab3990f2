"""Algebraic identities that hold to the last bit, for every value of the operands.

So `x + 0.0` stays, as it makes 0.0 of -0.0; `x * 0.0` stays, as it makes NaN of NaN and
infinity; and of complex numbers, whose products mix the parts, only signs are combined.
(The sign of one is a quotient, which is rounded again each time.) One thing is left to
the device: whether numbers so small that it takes them for zero survive a `x * 1.0`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from .._arrays import is_complex
from .._programs import Rewriter, literal_value
from ._atoms import Definitions, by_equation, dtype_of, is_array, jaxpr_pass

# What stands for the result: an atom; a new equation; or nothing that is simpler.
_Rule: TypeAlias = Callable[[jex.JaxprEqn, Definitions], Any]


@by_equation
def _simplify(
    rewriter: Rewriter, eqn: jex.JaxprEqn, definitions: dict[Any, Any]
) -> jex.JaxprEqn:
    rule = _RULES_BY_NAME.get(eqn.primitive.name)
    if rule is not None and all(map(is_array, [*eqn.invars, *eqn.outvars])):
        simpler = rule(eqn, definitions)
        if isinstance(simpler, jex.JaxprEqn):
            eqn = simpler
        elif simpler is not None:
            rewriter.replace(eqn.outvars[0], simpler)
    definitions.update((var, eqn) for var in eqn.outvars)
    return eqn


@jaxpr_pass(_simplify)
def simplify_algebra(jaxpr: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Applies identities such as `x * 1 = x` and `--x = x`.

    It applies only identities that change no bit of any result. Signed zeros, NaNs and
    infinities stay the same, and so do dtypes and weak types.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.

    Returns:
        A closed jaxpr of the same meaning and signature.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x / 1.0) + 0.0)(1.0)
        >>> print(ir.simplify_algebra(jaxpr))
        { lambda ; a:f32[]. let b:f32[] = sin a; c:f32[] = add b 0.0:f32[] in (c,) }
    """
    ...


# What is known of operands.


def _uniform(atom: Any, definitions: Definitions) -> Any:
    """The number that every element of an operand is, or `None` if not known."""
    eqn = _definition(atom, definitions, "broadcast_in_dim")
    if eqn is not None:
        atom = eqn.invars[0]
    if not isinstance(atom, jex.Literal) or is_complex(atom.aval):
        return None
    values = np.ravel(literal_value(atom))
    # Compared as bytes, where -0.0 does not equal 0.0.
    return values[0] if len({value.tobytes() for value in values}) == 1 else None


def _is(atom: Any, number: float, definitions: Definitions) -> bool:
    value = _uniform(atom, definitions)
    if value is None or value != number:
        return False
    return bool(np.signbit(float(value)) == np.signbit(float(number)))


def _definition(atom: Any, definitions: Definitions, name: str) -> jex.JaxprEqn | None:
    """The equation that computes an operand, if it is of that primitive."""
    eqn = None if isinstance(atom, jex.Literal) else definitions.get(atom)
    return eqn if eqn is not None and eqn.primitive.name == name else None


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(dtype_of(atom), jnp.floating)


# The rules.


def _neutral(*, right: Callable[[bool], float], commutes: bool = True) -> _Rule:
    """`x op neutral = x`. The neutral number may differ between floats and others."""

    def rule(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
        x, y = eqn.invars
        number = right(_is_float(eqn.outvars[0]))
        if _is(y, number, definitions):
            return x
        if commutes and _is(x, number, definitions):
            return y
        return None

    return rule


def _inverse(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    """`f(f(x)) = x`."""
    before = _definition(eqn.invars[0], definitions, eqn.primitive.name)
    if before is None or before.params != eqn.params:
        return None
    return before.invars[0]


def _idempotent(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    """`f(f(x)) = f(x)`."""
    if eqn.primitive.name == "sign" and is_complex(eqn.outvars[0].aval):
        return None
    before = _definition(eqn.invars[0], definitions, eqn.primitive.name)
    same = before is not None and before.params == eqn.params
    return eqn.invars[0] if same else None


def _same_twice(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    """`x op x = x`."""
    x, y = eqn.invars
    return x if x is y else None


def _first_power(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    if eqn.primitive.name == "integer_pow":
        return eqn.invars[0] if eqn.params["y"] == 1 else None
    x, y = eqn.invars
    return x if _is_float(x) and _is(y, 1, definitions) else None


def _part_of_complex(position: int) -> _Rule:
    """`real(complex(x, y)) = x` and `imag(complex(x, y)) = y`."""

    def rule(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
        made = _definition(eqn.invars[0], definitions, "complex")
        return None if made is None else made.invars[position]

    return rule


def _selected(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    which, *cases = eqn.invars
    index = _uniform(which, definitions)
    if index is not None:
        # Beyond the last case there is a value, that of the last, but no gradient.
        return cases[int(index)] if 0 <= int(index) < len(cases) else None
    is_in_range = dtype_of(which) == np.bool_
    same = is_in_range and all(case is cases[0] for case in cases)
    return cases[0] if same else None


def _two_transposes(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    before = _definition(eqn.invars[0], definitions, "transpose")
    if before is None:
        return None
    inner = before.params["permutation"]
    permutation = tuple(inner[i] for i in eqn.params["permutation"])
    return eqn.replace(
        invars=before.invars, params=dict(eqn.params, permutation=permutation)
    )


def _two_reshapes(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    before = _definition(eqn.invars[0], definitions, "reshape")
    settings = ("dimensions", "sharding")
    if before is None or any(
        e.params[name] is not None for e in (eqn, before) for name in settings
    ):
        return None
    return eqn.replace(invars=before.invars)


def _two_conversions(eqn: jex.JaxprEqn, definitions: Definitions) -> Any:
    """By way of a wider type is the same as directly."""
    before = _definition(eqn.invars[0], definitions, "convert_element_type")
    if before is None or before.params["sharding"] != eqn.params["sharding"]:
        return None
    first, between = before.invars[0], before.outvars[0]
    if not _holds_all_of(dtype_of(between), dtype_of(first)):
        return None
    # Denormal numbers may be lost on the way, which only this one would notice.
    if _is_float(first) and dtype_of(eqn.outvars[0]) == np.bool_:
        return None
    if first.aval == eqn.outvars[0].aval:
        return first
    return eqn.replace(invars=before.invars)


def _holds_all_of(wide: Any, narrow: Any) -> bool:
    """Whether one dtype has every value of another of its kind."""
    # It is read off their limits: under strict promotion there is no order among them.
    for kind in (jnp.signedinteger, jnp.unsignedinteger):
        if jnp.issubdtype(wide, kind) and jnp.issubdtype(narrow, kind):
            return jnp.iinfo(wide).bits >= jnp.iinfo(narrow).bits
    if not (
        jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(narrow, jnp.floating)
    ):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    # Those of 8 bits and fewer lack infinities or signs, and XLA saturates some of
    # them: what they become depends on the way.
    return b.bits >= 16 and a.nmant >= b.nmant and a.nexp >= b.nexp


_SHIFTS = "shift_left", "shift_right_arithmetic", "shift_right_logical"
_RULES_BY_NAME: dict[str, _Rule] = {
    **dict.fromkeys(("abs", "ceil", "floor", "sign", "stop_gradient"), _idempotent),
    **dict.fromkeys(("and", "max", "min", "or"), _same_twice),
    **dict.fromkeys(("conj", "neg", "not", "rev"), _inverse),
    **dict.fromkeys((*_SHIFTS, "sub"), _neutral(right=lambda _: 0, commutes=False)),
    "add": _neutral(right=lambda is_float: -0.0 if is_float else 0),
    "convert_element_type": _two_conversions,
    "div": _neutral(right=lambda _: 1, commutes=False),
    "imag": _part_of_complex(1),
    "integer_pow": _first_power,
    "mul": _neutral(right=lambda _: 1),
    "pow": _first_power,
    "real": _part_of_complex(0),
    "reshape": _two_reshapes,
    "select_n": _selected,
    "transpose": _two_transposes,
    "xor": _neutral(right=lambda _: 0),
}
