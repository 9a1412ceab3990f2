"""Whether a row of a batch can see the batch: the other rows, or how many there are.

Most programs do the same for a row whatever else is in the batch. Some do not:

- the generators `rbg` and `unsafe_rbg`, which draw the numbers of a batch from the key
  of its first row (JAX's own documentation warns of it), and generators of others;
- a `jax.custom_batching.custom_vmap`, whose rule may mix rows, as that of `unvmap`;
- primitives and callbacks of others, whose rules may do anything;
- collectives over the axis of the batch.

Such a program must not be run again in another batch than before: what is run again
would give other numbers, and a derivative would belong to another function than the
value beside it. So whoever makes batches or chunks that the user did not write asks
`sees_batch` first.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
from jax.extend.core import primitives

from .._arrays import has_dtype
from .._compat import maps_in_sequence
from .._types import AnyJaxpr
from ._calculus import has_backward_rules, jvp_of, rules_in, uses_of_rule, vjp_of
from ._effects import axes_named
from ._equations import aval_of, equations, programs_in

# Of all generators, this one alone draws the numbers of each row by itself. This is the
# type of its keys.
_THREEFRY = "key<fry>"
# These move keys or the numbers in them, and draw nothing.
_MOVES_KEYS = frozenset({"random_clone", "random_seed", "random_unwrap", "random_wrap"})
# Primitives of Equinox and Lineax that do the same for each row as for one alone.
ROW_BY_ROW = frozenset(
    {
        "linear_solve",
        "maybe_set",
        "nondifferentiable",
        "nondifferentiable_backward",
    }
)
_GENERATORS = frozenset({"rng_bit_generator", "rng_uniform"})
_CALLBACKS = frozenset({"ffi_call", "pure_callback"})
_KNOWN = frozenset(x for x in vars(primitives).values() if isinstance(x, jex.Primitive))
# JAX's own that are not in that list, and have no implementation either.
_UNLISTED = frozenset({"shard_map", "zeros_like"})


@functools.lru_cache(maxsize=512)
def sees_batch(program: AnyJaxpr, trusted: frozenset[str] = ROW_BY_ROW) -> bool:
    """Whether a row of a batch can see the batch, under a `vmap` without a name.

    This holds for the program and for its first and second derivatives.
    """
    # The rules of custom derivatives are asked as well, and the rules in these. Nothing
    # that is not known is taken to be harmless.
    if any(_sees(eqn, trusted) for eqn in _visible_equations(program)):
        return True
    return any(_rule_sees(rule, trusted) for rule in rules_in(program))


def has_collectives(program: AnyJaxpr) -> bool:
    """Whether there is a collective over a named axis, other than that of a mesh.

    JAX notes the axes that an equation uses among its effects.
    """
    effects = (effect for eqn in equations(program) for effect in eqn.effects)
    return bool(axes_named(effects) - {*jax.sharding.get_abstract_mesh().axis_names})


def _visible_equations(program: AnyJaxpr) -> Iterator[jex.JaxprEqn]:
    # A Pallas kernel is batched as a whole, by one more axis of its grid.
    is_kernel = lambda eqn: eqn.primitive.name == "pallas_call"
    return equations(program, lambda eqn: [] if is_kernel(eqn) else programs_in(eqn))


def _sees(eqn: jex.JaxprEqn, trusted: frozenset[str]) -> bool:
    """Whether a row can see its batch in an equation, apart from programs in it."""
    name, params = eqn.primitive.name, eqn.params
    if name == "custom_vmap_call":
        return not maps_in_sequence(eqn)
    if name in _CALLBACKS:
        return not str(params.get("vmap_method")).startswith("sequential")
    if name.startswith("random_") and name not in _MOVES_KEYS:
        types = map(aval_of, eqn.invars)
        dtypes = [str(aval.dtype) for aval in types if has_dtype(aval)]
        return any(d.startswith("key<") and d != _THREEFRY for d in dtypes)
    return name in _GENERATORS or _is_foreign(eqn, trusted)


def _is_foreign(eqn: jex.JaxprEqn, trusted: frozenset[str]) -> bool:
    """Whether a rule of another library batches the equation: it may do anything."""
    # JAX does not expose batching rules. The module of the implementation tells which
    # library the primitive comes from.
    name, made = eqn.primitive.name, eqn.primitive.impl
    if (hijax := eqn.params.get("_prim")) is not None:
        made = type(hijax)
    elif isinstance(made, types.MethodType):  # there is none
        return eqn.primitive not in _KNOWN and name not in _UNLISTED
    library = library_of(made)
    if library in ("equinox", "lineax"):
        return name not in trusted
    return library not in ("jax", "eqloop")


def library_of(made: Any) -> str:
    """The library that a function, a partial of one, or a class is from."""
    function = made.func if isinstance(made, functools.partial) else made
    return (getattr(function, "__module__", None) or "jax").split(".")[0]


def _rule_sees(rule: jex.ClosedJaxpr, trusted: frozenset[str], orders: int = 2) -> bool:
    """Whether a row can see its batch in the rule of a custom derivative.

    `rule` is a program that calls the function with the rule, and does nothing else.
    """
    # The equations of a rule show only where it is used.
    derivative = vjp_of if has_backward_rules(rule) else jvp_of
    uses = uses_of_rule(rule, lambda *marks: derivative(rule, *((x,) for x in marks)))
    used = [program for program in uses if program is not None]
    eqns = (eqn for program in used for eqn in _visible_equations(program))
    if any(_sees(eqn, trusted) for eqn in eqns):
        return True
    inner = (rule for program in used for rule in rules_in(program))
    # Rules often call their own function, so there is no end to this.
    return orders > 1 and any(_rule_sees(rule, trusted, orders - 1) for rule in inner)
