"""Functions of complex numbers, by those of their two parts (`_formulas.py`)."""

import functools
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import lax

from ..._types import Value
from ._formulas import Params, Rule, bits_of, is_nan, top_of


def _times(a: Value, b: Value, c: Value, d: Value) -> tuple[Value, Value]:
    return a * c - b * d, a * d + b * c


def _over(a: Value, b: Value, c: Value, d: Value) -> tuple[Value, Value]:
    """Smith, Algorithm 116, 1962: nothing overflows that the result does not."""
    swaps = jnp.abs(c) < jnp.abs(d)
    big, small = jnp.where(swaps, d, c), jnp.where(swaps, c, d)
    ratio = small / big
    scale = big + small * ratio
    first, second = jnp.where(swaps, b, a), jnp.where(swaps, a, b)
    re = (first + second * ratio) / scale
    im = (second - first * ratio) / scale
    re, im = re, jnp.where(swaps, -im, im)
    # By zero, and infinities, as in C (annex G).
    inf, zero = lax.full_like(a, jnp.inf), lax.full_like(a, 0)
    finite = lambda x: jnp.abs(x) < inf
    is_inf = lambda x: jnp.abs(x) == inf
    one_of = lambda x: jnp.where(
        is_inf(x), _signed(lax.full_like(x, 1), x), _signed(zero, x)
    )
    by_zero = (c == zero) & (d == zero) & (~is_nan(a) | ~is_nan(b))
    of_inf = (is_inf(a) | is_inf(b)) & finite(c) & finite(d)
    by_inf = finite(a) & finite(b) & (is_inf(c) | is_inf(d))
    u, v = one_of(a), one_of(b)
    s, t = one_of(c), one_of(d)
    is_lost = is_nan(re) & is_nan(im)
    for is_so, x, y in (
        (by_inf, zero * (a * s + b * t), zero * (b * s - a * t)),
        (of_inf, inf * (u * c + v * d), inf * (v * c - u * d)),
        (by_zero, _signed(inf, c) * a, _signed(inf, c) * b),
    ):
        re, im = jnp.where(is_so & is_lost, x, re), jnp.where(is_so & is_lost, y, im)
    return re, im


def _signed(x: Value, like: Value) -> Value:
    """The size of a number with the sign of another one."""
    bits = (bits_of(x) ^ top_of(bits_of(x))) | top_of(bits_of(like))
    return lax.bitcast_convert_type(bits, x.dtype)


def _power(p: Params, a: Value, b: Value) -> tuple[Value, Value]:
    one = jnp.ones_like(a), jnp.zeros_like(b)
    found = one
    for _ in range(abs(p["y"])):
        found = _times(*found, a, b) if found is not one else (a, b)
    return found if p["y"] >= 0 else _over(*one, *found)


def _exp(a: Value, b: Value) -> tuple[Value, Value]:
    size = jnp.exp(a)
    return size * jnp.cos(b), jnp.where(b == 0, b, size * jnp.sin(b))


def _size(a: Value, b: Value) -> Value:
    a, b = jnp.abs(a), jnp.abs(b)
    big, small = lax.max(a, b), lax.min(a, b)
    ratio = small / jnp.where(big == 0, jnp.ones_like(big), big)
    found = big * jnp.sqrt(1 + ratio * ratio)
    is_inf = (a == jnp.inf) | (b == jnp.inf)
    return jnp.where(is_inf, lax.full_like(a, jnp.inf), found)


# From the parts of the operands, one after the other, to the parts of the result.
_COMPLEX: dict[str, Rule] = {
    "add": lambda p, a, b, c, d: (a + c, b + d),
    "add_any": lambda p, a, b, c, d: (a + c, b + d),
    "sub": lambda p, a, b, c, d: (a - c, b - d),
    "neg": lambda p, a, b: (-a, -b),
    "mul": lambda p, a, b, c, d: _times(a, b, c, d),
    "div": lambda p, a, b, c, d: _over(a, b, c, d),
    "square": lambda p, a, b: ((a - b) * (a + b), 2 * a * b),
    "integer_pow": _power,
    "exp": lambda p, a, b: _exp(a, b),
    "abs": lambda p, a, b: _size(a, b),
    "eq": lambda p, a, b, c, d: (a == c) & (b == d),
    "ne": lambda p, a, b, c, d: (a != c) | (b != d),
}


def _by_parts(rule: Rule, p: Params, *xs: Value) -> Value:
    """A function of complex numbers, by a rule for their parts."""
    found = rule(p, *(part for x in xs for part in (lax.real(x), lax.imag(x))))
    return lax.complex(*found) if isinstance(found, tuple) else found


def _converted(p: Params, x: Value) -> Value:
    """Complex numbers of, or as, others: of a real one only the first part is kept."""
    to = p["new_dtype"]
    re, im = (
        (lax.real(x), lax.imag(x)) if jnp.iscomplexobj(x) else (x, jnp.zeros_like(x))
    )
    if not jnp.issubdtype(to, jnp.complexfloating):
        return re != 0 if to.kind == "b" else re.astype(to)
    part = jax.eval_shape(lax.real, jax.ShapeDtypeStruct((), to)).dtype
    return lax.complex(re.astype(part), im.astype(part))


def of_complex(eqn: jex.JaxprEqn) -> Rule | None:
    name, p = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return functools.partial(_converted, p)
    if name == "conj":
        return _conjugate
    if name == "reduce_sum":
        of = lambda x: jnp.sum(x, p["axes"])
        return lambda x: lax.complex(of(lax.real(x)), of(lax.imag(x)))
    if name == "dot_general":
        return functools.partial(_complex_product, p)
    rule = _COMPLEX.get(name)
    return rule and functools.partial(_by_parts, rule, p)


def _conjugate(x: Value) -> Value:
    if not jnp.iscomplexobj(x):
        return lax.complex(x, jnp.zeros_like(x))
    return lax.complex(lax.real(x), -lax.imag(x))


def _complex_product(p: dict[str, Any], x: Value, y: Value) -> Value:
    numbers, precision = p["dimension_numbers"], p["precision"]
    dot = lambda x, y: lax.dot_general(x, y, numbers, precision=precision)
    a, b, c, d = (f(z) for z in (x, y) for f in (lax.real, lax.imag))
    return lax.complex(dot(a, c) - dot(b, d), dot(a, d) + dot(b, c))
