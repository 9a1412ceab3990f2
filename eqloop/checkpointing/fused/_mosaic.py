"""Programs by the operations that Pallas's backend Mosaic GPU has.

What `_lowered.py` leaves in a program, and that backend lacks, is a function of JAX
here, of float32 and within 2 ulps or so. What is in no table is left to Triton.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._programs import Rewriter, aval_of, equations, rewrite_everywhere
from ..._types import Value
from ._lowered import lowered
from ._moves import MOVES

Rule = Callable[..., Value]

# A block is a group of four warps, with a row for each thread.
BLOCK = 128
# The most numbers of which one is chosen at a place that is known only at run time.
_MOST_CHOSEN = 256

# What moves numbers is not in a kernel, or is only what is made of selects there.
_HAS = frozenset(
    """abs add and bitcast_convert_type clz complex cond convert_element_type cos
    div dot_general dynamic_slice dynamic_update_slice eq exp exp2 ge gt imag
    integer_pow iota le log log2 lt max min mul ne neg or random_unwrap random_wrap real
    reduce_max reduce_min reduce_sum rem rsqrt scan select_n shift_left
    shift_right_arithmetic shift_right_logical sin
    sqrt sub tanh unvmap_any while xor""".split()  # noqa: SIM905
).union(MOVES)
# Of numbers of 8 bits.
_OF_BYTES = frozenset({"convert_element_type", "bitcast_convert_type", *MOVES})


def why_not(programs: Sequence[jex.ClosedJaxpr]) -> str | None:
    """Why Mosaic GPU cannot make a kernel of what is `written`, if it cannot."""
    for program in programs:
        for eqn in equations(program):
            avals = [aval_of(x) for x in (*eqn.invars, *eqn.outvars)]
            name = eqn.primitive.name
            if name not in _HAS or (name == "rem" and avals[0].dtype.kind == "f"):
                return f"it has no `{name}`"
            sizes = {a.dtype.itemsize for a in avals if _is_number(a.dtype)}
            if 8 in sizes or (1 in sizes and name not in _OF_BYTES):
                return f"it has no `{name}` of {8 * (8 if 8 in sizes else 1)} bits"
            if name == "dynamic_slice" and avals[0].size > _MOST_CHOSEN:
                return f"one of {avals[0].size} numbers is read, at a computed place"
    return None


def why_not_on_tpu(programs: Sequence[jex.ClosedJaxpr]) -> str | None:
    """Why Mosaic cannot make one for a TPU of what Mosaic GPU can, if it cannot."""
    unsigned = set[str]()
    for eqn in (eqn for program in programs for eqn in equations(program)):
        name, every = eqn.primitive.name, map(aval_of, (*eqn.invars, *eqn.outvars))
        for dtype in {a.dtype for a in every if _is_number(a.dtype)}:
            is_narrow = dtype.itemsize == 2 and name not in _OF_BYTES
            is_least = dtype == np.uint32 and name in ("max", "min")
            if dtype == np.float16 or is_narrow or is_least:
                return f"it has no `{name}` of {dtype}"
            unsigned |= {name} if dtype == np.uint32 else set()
    # The compiler makes one of the others of these.
    is_least = "select_n" in unsigned and unsigned & {"lt", "le", "gt", "ge"}
    return "it has no `min` of uint32" if is_least else None


def written(program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """A program by the operations that Mosaic GPU has, if it can be written so."""

    def level(program: jex.ClosedJaxpr, rewrite: Callable[..., Any]) -> jex.ClosedJaxpr:
        rewriter = Rewriter(program)
        for eqn in program.jaxpr.eqns:
            eqn = rewriter.enter(eqn, rewrite)
            known = [x.val for x in eqn.invars if isinstance(x, jex.Literal)]
            if eqn.primitive.name == "sub" and len(known) == 2:  # of an exponent
                (out,), value = eqn.outvars, np.subtract(*known)
                if rewriter.replace(out, jex.Literal(value, out.aval)):
                    continue
            # It has each function once, exact to some units in the last place. JAX asks
            # for the best `exp` in the derivative of `erf`.
            if eqn.params.get("accuracy") is not None:
                eqn = eqn.replace(params={**eqn.params, "accuracy": None})
            if (rule := _rule(eqn)) is None:
                rewriter.eqns.append(eqn)
                continue
            made = jax.make_jaxpr(rule)(*map(aval_of, eqn.invars))
            rewriter.inline(rewrite(lowered(made)), eqn.invars, eqn.outvars)
        return rewriter.result()

    return rewrite_everywhere(level, program)


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind in "iuf"


def _rule(eqn: jex.JaxprEqn) -> Rule | None:
    """The function of JAX in place of an operation, if that is not there itself."""
    name, params = eqn.primitive.name, eqn.params
    if name == "convert_element_type":
        return _converted(aval_of(eqn.invars[0]).dtype, params["new_dtype"])
    if name == "integer_pow" and params["y"] < -1:
        return lambda x: 1 / lax.integer_pow(x, -params["y"])
    if name == "pow":
        y = eqn.invars[1]
        return _power(float(y.val)) if isinstance(y, jex.Literal) else None
    if (rule := _RULES.get(name)) is None:
        return None
    return rule if aval_of(eqn.outvars[0]).dtype.kind in _KINDS.get(name, "f") else None


def _converted(old: Any, new: Any) -> Rule | None:
    """Flags are bits there, which it takes for the lowest ones of a number."""
    if old == new or (old.kind != "b" and new.kind != "b"):
        return None
    if new.kind == "b":
        return lambda x: x != lax.full_like(x, 0)
    wide = np.dtype("int32") if new.itemsize == 1 else new
    flags = lambda x: (lax.full_like(x, n, wide) for n in (1, 0))
    return lambda x: lax.select(x, *flags(x)).astype(new)


def _power(y: float) -> Rule | None:
    """Powers that are whole numbers or halves, of which those of a body's pull are."""
    whole, half = divmod(abs(y), 1)
    if half not in (0, 0.5) or whole > 16:
        return None

    def of(x: Value) -> Value:
        found = lax.full_like(x, 1) if whole == 0 else x
        found = lax.integer_pow(x, int(whole)) if whole > 1 else found
        # Of -0 and -inf, the root is 0 and inf here.
        root = lambda: lax.sqrt(lax.select(x == -jnp.inf, -x, x) + lax.full_like(x, 0))
        found = found * root() if half else found
        return 1 / found if y < 0 else found

    return lambda x, _: of(x)


def _floor(x: Value) -> Value:
    near = x.astype(np.int32).astype(x.dtype)
    low = jnp.where(near > x, near - 1, near)
    return jnp.where((jnp.abs(x) < 2**23) & (near != x), low, x)


def _log1p(x: Value) -> Value:
    """Kahan's: the rounding of `1 + x` is made up for."""
    u = 1 + x
    found = jnp.log(u) * (x / (u - 1))
    return jnp.where(u == 1, x, jnp.where(u == jnp.inf, u, found))


# 1/2, 1/3!, 1/4!, and so on.
_SERIES = [1 / math.factorial(k) for k in range(2, 13)]


def _expm1(x: Value) -> Value:
    series = lax.full_like(x, _SERIES[-1])
    for c in _SERIES[-2::-1]:
        series = series * x + lax.full_like(x, c)
    return jnp.where(jnp.abs(x) < 1, x + x * x * series, jnp.exp(x) - 1)


def _signed(of: Rule) -> Rule:
    """An odd function, of what it is for numbers above zero."""

    def odd(x: Value) -> Value:
        found = of(jnp.abs(x))
        return jnp.where(x < 0, -found, jnp.where(x == 0, x, found))

    return odd


def _sinh(x: Value) -> Value:
    t, half = jnp.expm1(x), jnp.exp(0.5 * x)
    return jnp.where(x < 80, 0.5 * (t + t / (t + 1)), 0.5 * half * half)


def _cosh(x: Value) -> Value:
    e, half = jnp.exp(jnp.abs(x)), jnp.exp(0.5 * jnp.abs(x))
    return jnp.where(jnp.abs(x) < 80, 0.5 * e + 0.5 / e, 0.5 * half * half)


def _asinh(x: Value) -> Value:
    near = jnp.log1p(x + x * x / (1 + jnp.sqrt(x * x + 1)))
    return jnp.where(x < 1e9, near, jnp.log(x) + math.log(2))


def _acosh(x: Value) -> Value:
    t = x - 1
    near = jnp.log1p(t + jnp.sqrt(t) * jnp.sqrt(t + 2))
    return jnp.where(x < 1e9, near, jnp.log(x) + math.log(2))


def _cbrt(x: Value) -> Value:
    y = jnp.exp(jnp.log(x) / 3)
    found = y - (y * y * y - x) / (3 * y * y)
    return jnp.where(x == jnp.inf, x, found)


# Cephes, atanf.c.
_ATAN = (8.05374449538e-2, -1.38776856032e-1, 1.99777106478e-1, -3.33329491539e-1)


def _atan(x: Value) -> Value:
    """Of numbers above zero."""
    is_far, is_near = x > math.tan(3 * math.pi / 8), x <= math.tan(math.pi / 8)
    low = jnp.where(is_far, math.pi / 2, jnp.where(is_near, 0.0, math.pi / 4))
    t = jnp.where(is_far, -1 / x, jnp.where(is_near, x, (x - 1) / (x + 1)))
    z = t * t
    y = lax.full_like(x, _ATAN[0])
    for c in _ATAN[1:]:
        y = y * z + lax.full_like(x, c)
    return low + (t + t * z * y)


def _atan2(y: Value, x: Value) -> Value:
    is_below = lambda x: lax.bitcast_convert_type(x, np.int32) < 0
    a, b = jnp.abs(y), jnp.abs(x)
    # Of two zeros, and of two infinities, the ratio is 0 and 1.
    ratio = jnp.where(a == 0, 0.0, jnp.where((a == b) & (a == jnp.inf), 1.0, a / b))
    found = jnp.arctan(jnp.where(jnp.isnan(x) | jnp.isnan(y), x + y, ratio))
    found = jnp.where(is_below(x), math.pi - found, found)
    return jnp.where(is_below(y), -found, found)


def _bits_set(x: Value) -> Value:
    of = lambda n: lax.full_like(x, n)
    x = x - (lax.shift_right_logical(x, of(1)) & of(0x55555555))
    x = (x & of(0x33333333)) + (lax.shift_right_logical(x, of(2)) & of(0x33333333))
    x = (x + lax.shift_right_logical(x, of(4))) & of(0x0F0F0F0F)
    return lax.shift_right_logical(x * of(0x01010101), of(24))


_RULES: dict[str, Rule] = {
    "add_any": lax.add,
    "not": lambda x: x ^ (lax.full_like(x, True if x.dtype == bool else -1)),
    "population_count": _bits_set,
    "floor": _floor,
    "ceil": lambda x: -jnp.floor(-x),
    "log1p": _log1p,
    "expm1": _expm1,
    "tan": lambda x: jnp.sin(x) / jnp.cos(x),
    "atan": _signed(_atan),
    "atan2": _atan2,
    "asin": lambda x: jnp.arctan(x / jnp.sqrt((1 - x) * (1 + x))),
    "acos": lambda x: 2 * jnp.arctan(jnp.sqrt((1 - x) / (1 + x))),
    "sinh": _signed(_sinh),
    "cosh": _cosh,
    "asinh": _signed(_asinh),
    "acosh": _acosh,
    "atanh": _signed(lambda x: 0.5 * jnp.log1p(2 * x / (1 - x))),
    "cbrt": _signed(_cbrt),
}
# Of which kinds of numbers, if not of floats alone.
_KINDS = {"add_any": "biuf", "not": "biu", "population_count": "iu"}
