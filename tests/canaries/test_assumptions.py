"""What JAX does not promise, and what would go wrong in silence without it.

Most of what the library takes from JAX fails aloud once it is gone. Here is the rest:
names that it compares, texts that it reads, and keys that it takes to differ.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.experimental import checkify, io_callback
from jax.extend.core import primitives

from eqloop._programs import axes_named, digest_of, equations, has_io
from eqloop._programs._effects import has_checks
from eqloop._programs._formula import Formula
from eqloop._programs._places import loop_name, loop_scope
from eqloop._programs._reaching import reached
from eqloop._programs._seen_batches import library_of
from eqloop._programs._small_equations import constant_p

_X = jax.ShapeDtypeStruct((3,), jnp.float32)
_FLAG = jax.ShapeDtypeStruct((), jnp.bool_)


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Those that programs are searched for, and that JAX exports. Of more, an operation that
# is not known costs time or memory, and makes no number wrong.
_EXPECTED_NAMES = _named(
    """add_any broadcast_in_dim cond conv_general_dilated custom_jvp_call
    custom_vjp_call dot_general dynamic_slice dynamic_update_slice gather jit name pmax
    pmin psum remat2 rng_bit_generator rng_uniform scan scatter scatter-add slice
    while"""
)


def _effects() -> Iterator[str]:
    """`_effects.py` tells effects apart by the names of their classes."""
    for ordered in (False, True):
        call = lambda x, ordered=ordered: io_callback(print, None, x, ordered=ordered)
        if not has_io(_jaxpr_of(call).effects):
            yield f"the effect of an `io_callback` with `ordered={ordered}`"
    check = lambda flag: checkify.check(flag, "")
    if not has_checks(_jaxpr_of(check, _FLAG).effects):
        yield "the effect of a `checkify.check`"


def _primitive_names() -> Iterator[str]:
    """Equations are told apart by the names of their primitives, in every room."""
    found = (p for p in vars(primitives).values() if isinstance(p, jex.Primitive))
    if missing := _EXPECTED_NAMES - {p.name for p in found}:
        yield f"the names of the primitives {', '.join(sorted(missing))}"
    custom = custom_vmap(lax.sin)
    custom.def_vmap(lambda size, is_batched, x: (x, True))
    traced = {
        "custom_vmap_call": custom,
        "optimization_barrier": lax.optimization_barrier,
        "pure_callback": lambda x: jax.pure_callback(abs, _X, x),
        "debug_callback": lambda x: jax.debug.callback(print, x),
        "io_callback": lambda x: io_callback(print, None, x),
        "call_hi_primitive": _Nothing(),
    }
    for name, f in traced.items():
        found = {eqn.primitive.name: eqn.params for eqn in equations(_jaxpr_of(f))}
        if name not in found:
            yield f"the name of the primitive {name}"
        elif name.endswith("_callback") and "callback" not in found[name]:
            yield f"the parameters of the primitive {name}"
    # With JAX's flag `jax_remat3`, a name is a primitive of another kind.
    (naming,) = _jaxpr_of(lambda x: checkpoint_name(x, "a")).eqns
    if type(naming.params.get("_prim")).__name__ != "CheckpointName" and (
        naming.primitive.name != "name" or naming.params.get("name") != "a"
    ):
        yield "the primitive that `checkpoint_name` makes"


def _inner_programs() -> Iterator[str]:
    """`_equations.py` finds the programs in equations, `_reaching.py` reads them."""
    jvp, vjp = jax.custom_jvp(lax.sin), jax.custom_vjp(lax.sin)
    jvp.defjvp(lambda x, t: (lax.sin(x[0]), t[0]))
    vjp.defvjp(lambda x: (lax.sin(x), None), lambda _, ct: (ct,))
    kinds = {"rule": jvp, "backward rule": vjp, "remat": jax.checkpoint(lax.sin)}
    for name, f in kinds.items():
        program = _jaxpr_of(f)
        # Flags of JAX make `hijax` primitives of these, which are found by their class.
        is_plain = not any("_prim" in eqn.params for eqn in program.eqns)
        if is_plain and "sin" not in _primitives_in(program):
            yield f"the program in the equation of a function with a {name}"
    # Here `x` comes to be in `a` and, an iteration later, in `b`; `y` is by itself.
    step = lambda x, a, b, y: (x * 2, x, a, y)
    again = lambda c: step(*c)
    loops: dict[str, Callable[..., Any]] = {
        "scan": lambda _, *c: lax.scan(lambda c, _: (again(c), None), c, None, 9)[0],
        "while": lambda flag, *c: lax.while_loop(lambda c: flag, again, c),
        "jit": lambda _, *c: jax.jit(again)(c),
        "cond": lambda flag, *c: lax.cond(flag, step, lambda *c: c, *c),
    }
    for name, f in loops.items():
        program = _jaxpr_of(f, _FLAG, _X, _X, _X, _X)
        wanted = True, True, name in ("scan", "while"), False
        if name not in _primitives_in(program) or "mul" not in _primitives_in(program):
            yield f"the program in the equation of a `{name}`"
        elif reached(program, (False, True, False, False, False)) != wanted:
            yield f"the parameters of the equation of a `{name}`"


def _checks() -> Iterator[str]:
    """`checkify` looks into formulas, see `_expandable.py`."""
    checked = checkify.checkify(_Nothing(), errors=checkify.nan_checks)
    if "sin" not in _primitives_in(_jaxpr_of(lambda x: checked(x)[1])):
        yield "how `checkify` looks into an equation"


def _collectives() -> Iterator[str]:
    """The axis of a collective is among its parameters, and its effects name it."""
    axis = "eqloop's own"
    f = lambda x: lax.psum(x, axis) + lax.pmax(x, axis) + lax.pmin(x, axis)
    program = jax.make_jaxpr(f, axis_env=[(axis, 2)])(_X)
    over = [eqn for eqn in program.eqns if eqn.params.get("axes") == (axis,)]
    if len(over) != 3:
        yield "the parameters of `psum`, `pmax` and `pmin`"
    if axis not in axes_named(program.effects):
        yield "the effect of a collective"


def _digests() -> Iterator[str]:
    """Programs that say the same are planned as one (`planning/_alike.py`)."""

    def digest(factor: float, held: float, reverse: bool) -> str:
        array = np.array([1, held, 1], np.float32)
        f = jax.jit(lambda x: lax.cumsum(x * factor + array, reverse=reverse))
        loop = lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2)
        return digest_of(_jaxpr_of(loop))

    cases = [(2, 1, False), (3, 1, False), (2, 0, False), (2, 1, True), (2, 1, False)]
    if len({digest(*case) for case in cases}) != 4:
        yield "where a jaxpr has its parameters and its constants"


def _name_stacks() -> Iterator[str]:
    """Loops are found by their scopes, and derivatives by what is around these."""

    def f(x: jax.Array) -> jax.Array:
        with loop_scope("Scan"):
            return lax.sin(x)

    program = _jaxpr_of(lambda x: jax.vjp(f, x)[1](x))
    stacks = [eqn.source_info.name_stack for eqn in program.eqns]
    if {loop_name(stack) for stack in stacks} != {"Scan"}:
        yield "the name stack of an equation in a `jax.named_scope`"
    texts = " ".join(map(str, stacks))
    if "jvp(" not in texts or "transpose(" not in texts:
        yield "the name stack of an equation of a derivative"


def _key_types() -> Iterator[str]:
    """What kind of generator a key is for is in the text of its type."""
    for implementation, text in (("threefry2x32", "key<fry>"), ("rbg", "key<rbg>")):
        make = lambda x, impl=implementation: jax.random.key(0, impl=impl)
        if str(_jaxpr_of(make).out_avals[0].dtype) != text:
            yield f"the type of a `{implementation}` key"


def _makers() -> Iterator[str]:
    """`_seen_batches.py` asks which library has made a primitive."""
    made = primitives.sin_p.impl, constant_p.impl
    if list(map(library_of, made)) != ["jax", "eqloop"]:
        yield "the implementation of a primitive"


class _Nothing(Formula):
    """A formula that is here to be found."""

    def __init__(self) -> None:
        (self.out_aval,) = self.in_avals = tuple(_jaxpr_of(lambda x: x).in_avals)
        self.params = {}
        super().__init__()

    def expand(self, x: jax.Array) -> jax.Array:
        return lax.sin(x)


def _jaxpr_of(f: Callable[..., Any], *types: Any) -> jex.ClosedJaxpr:
    return jax.make_jaxpr(f)(*types or (_X,))


def _primitives_in(program: jex.ClosedJaxpr) -> set[str]:
    return {eqn.primitive.name for eqn in equations(program)}


_CHECKS = [
    _effects,
    _primitive_names,
    _inner_programs,
    _checks,
    _collectives,
    _digests,
    _name_stacks,
    _key_types,
    _makers,
]


@pytest.mark.parametrize("check", _CHECKS)
def test_jax_is_as_it_is_taken_to_be(check: Callable[[], Iterator[str]]):
    assert list(check()) == []
