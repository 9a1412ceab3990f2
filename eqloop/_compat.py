"""What differs between versions of JAX, with the version beside each line.

Nothing else in the library asks which JAX is installed.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax import lax
from jax.experimental import hijax


def _without_literals(expand: Callable[..., Any]) -> Callable[..., Any]:
    """Stages what is a literal: JAX 0.10 cannot lower it as the output of a primitive.

    An example is the cotangent 1.0 that a loop hands through from its end to its start.
    """

    def stage(x: Any) -> Any:
        return x if isinstance(x, jax.Array) else lax.optimization_barrier(x)

    @functools.wraps(expand)
    def staged(self: Any, *args: Any) -> Any:
        return jax.tree.map(stage, expand(self, *args))

    return staged


_VJPHiPrimitive: Any = getattr(hijax, "VJPHiPrimitive", object)


class _HiPrimitive(_VJPHiPrimitive):
    """As JAX 0.10 calls it, for an `expand` that returns literals as they came."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "expand" in vars(cls):
            cls.expand = _without_literals(cls.expand)


# JAX 0.12 has `HiPrim`; the methods that eqloop overrides have the same signatures.
HiPrimitive: type = getattr(hijax, "HiPrim", _HiPrimitive)


def identity(x: Any) -> Any:
    """What is the same object for two tracers if they stand for the same value.

    A program that is being lowered makes a new tracer each time it reads a variable
    (JAX 0.10 to 0.12). Should they cease to have this attribute, no two are the same.
    """
    return getattr(x, "val", x) if isinstance(x, jax.core.Tracer) else x


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` equation are its constants, and its carry."""
    if "ft_in" in params:  # JAX 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]
