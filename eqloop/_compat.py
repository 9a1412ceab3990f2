"""The differences between versions of JAX, with the version beside each line.

Nothing else in the library asks which JAX is installed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.custom_derivatives
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import hijax

from ._types import AnyJaxpr, PyTree, Value


def jax_version() -> str:
    """The version itself ("0.12.0" for JAX 0.12.0), to be written down with results."""
    return jax.__version__


def _without_literals(expand: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Stages what is a literal: JAX 0.10 cannot lower it as the output of a primitive.

    An example is the cotangent 1.0 that a loop hands through from its end to its start.
    """

    def stage(x: Value) -> Value:
        return x if isinstance(x, jax.Array) else lax.optimization_barrier(x)

    @functools.wraps(expand)
    def staged(self: Any, *args: PyTree) -> Value:
        return jax.tree.map(stage, expand(self, *args))

    return staged


# JAX 0.12 has `HiPrim`, JAX 0.10 `VJPHiPrimitive`; of what eqloop overrides, both have
# the same methods. A version that has neither is to fail here, and not later.
_HAS_HIPRIM = hasattr(hijax, "HiPrim")
_VJPHiPrimitive: Any = object if _HAS_HIPRIM else hijax.VJPHiPrimitive


class _HiPrimitive(_VJPHiPrimitive):
    """As JAX 0.10 calls it, for an `expand` that returns literals as they came."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "expand" in vars(cls):
            cls.expand = _without_literals(cls.expand)


# JAX 0.10 needs the class above; JAX 0.12 can lower literals.
HiPrimitive: type = getattr(hijax, "HiPrim", _HiPrimitive)


# JAX 0.10 makes a tangent for each output of a `hijax` primitive that is linearized,
# whatever the primitive says, and then asks for the derivatives of all that is computed
# from it. JAX 0.12 takes the word of the primitive.
_ALL_MOVE = not _HAS_HIPRIM


def linearization(
    outputs: PyTree, residuals: PyTree, moves_out: PyTree
) -> tuple[PyTree, ...]:
    """What `lin` and `vjp_fwd` of a `hijax` primitive return.

    JAX 0.12 is told which outputs move, JAX 0.10 takes it that all of them do.

    Args:
        outputs: The outputs.
        residuals: What the rule that follows is to get.
        moves_out: Which of the outputs have a tangent.
    """
    result = outputs, residuals
    return result if _ALL_MOVE else (*result, moves_out)


def linear_outputs(tangents: PyTree) -> PyTree:
    """What `linearized` returns, from tangents with symbolic zeros among them.

    JAX 0.10 takes arrays alone.
    """
    if not _ALL_MOVE:
        return tangents
    is_zero = lambda x: isinstance(x, hijax.Zero)
    return jax.tree.map(hijax.instantiate_zeros, tangents, is_leaf=is_zero)


def with_symbolic_zeros(
    moves_out: Callable[[list[bool]], list[bool]],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
) -> list[Value]:
    """The outputs of a primitive, so that those without a tangent are known to be.

    JAX 0.12 knows it from `linearization`, JAX 0.10 from a custom derivative.

    Args:
        moves_out: Which outputs have a tangent, if these inputs have one.
        inputs: The inputs.
        outputs: The outputs.
    """
    if not _ALL_MOVE:
        return list(outputs)
    # Each by itself: where JAX 0.10 leaves out unused outputs of a custom derivative
    # with symbolic zeros, the others get wrong tangents.
    inputs = tuple(inputs)
    return [_through(moves_out, i, inputs, output) for i, output in enumerate(outputs)]


def is_through(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is that of `with_symbolic_zeros`, and so no user's rule.

    JAX 0.10 alone has any.
    """
    if eqn.primitive.name != "custom_jvp_call":
        return False
    info = eqn.params["call_jaxpr"].jaxpr.debug_info
    return info.func_src_info.startswith("_through ") and __file__ in info.func_src_info


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _through(
    moves_out: PyTree, place: int, inputs: tuple[Value, ...], output: Value
) -> Value:
    del moves_out, place, inputs
    return output


@functools.partial(_through.defjvp, symbolic_zeros=True)
def _through_jvp(
    moves_out: PyTree, place: int, primals: PyTree, tangents: PyTree
) -> PyTree:
    (_, output), (dots_in, dot) = primals, tangents
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    if moves_out([not is_zero(dot) for dot in dots_in])[place]:
        return output, dot
    aval = jax.typeof(output).to_tangent_aval()
    return output, jax.custom_derivatives.SymbolicZero(aval)


def batching_rule(eqn: jex.JaxprEqn) -> Any:
    """The function that a user has given a `custom_vmap` as its rule, if it shows.

    JAX wraps it (0.10 to 0.12). Where the function has been differentiated, the rule is
    one of JAX's own, and so it is where JAX made it.
    """
    return getattr(eqn.params["rule"], "__wrapped__", None)


def maps_in_sequence(eqn: jex.JaxprEqn) -> bool:
    """Whether a `custom_vmap` is a `sequential_vmap`, which runs row by row."""
    name = getattr(batching_rule(eqn), "__qualname__", "")
    return name.startswith("sequential_vmap.")


def identity(x: object) -> object:
    """What is the same object for two tracers if they stand for the same value.

    A program that is being lowered makes a new tracer each time it reads a variable
    (JAX 0.10 to 0.12). Should they cease to have this attribute, no two are the same.
    """
    return getattr(x, "val", x) if isinstance(x, jax.core.Tracer) else x


# The equations that run a program once, and the parameter that holds it.
CALLS: dict[str, str] = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    # Of a scan inside `jax.checkpoint`, and of custom derivatives.
    "closed_call": "call_jaxpr",  # JAX 0.10
    "eval_jaxpr": "call_jaxpr",  # JAX 0.12
}


def is_open(program: AnyJaxpr) -> bool:
    """Whether a program lacks the values of its constants: never so in JAX 0.12."""
    is_closed = isinstance(program, jex.ClosedJaxpr)  # JAX 0.12: the same as `Jaxpr`
    return isinstance(program, jex.Jaxpr) and not is_closed


def close(program: Any) -> jex.ClosedJaxpr:
    """A program in an equation, which has no constants if it is open (JAX 0.10).

    It is the same object each time, so that what is called twice stays shared.
    """
    return _close_open(program) if is_open(program) else program


@functools.lru_cache(maxsize=1024)
def _close_open(program: jex.Jaxpr) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(program, ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` equation are its constants, and its carry."""
    if "ft_in" in params:  # JAX 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def drops_barriers() -> bool:
    """Whether XLA removes `optimization_barrier` before it decides what is copied.

    On the CPU, JAX 0.10 to 0.11 does. What is read before a barrier may then be read
    behind it, and a buffer that is written there is copied first.
    """
    return jax.__version_info__ < (0, 12) and jax.default_backend() == "cpu"


def is_widened(dtype: np.dtype) -> bool:
    """Whether XLA computes slices of such arrays in a wider type.

    On the CPU, JAX 0.10 to 0.11 converts all of the array for each slice that is read
    or written (bfloat16, 8-bit floats). It moves the conversion of what a loop only
    reads out of the loop, which takes twice the memory of the array; what the loop
    writes to is converted there and back at every step. JAX 0.12 no longer does this.
    """
    return (
        jax.__version_info__ < (0, 12)
        and jax.default_backend() == "cpu"
        and jnp.issubdtype(dtype, jnp.floating)
        and dtype.itemsize < 4
        and dtype != jnp.float16
    )
