"""What differs between versions of JAX, with the version beside each line.

Nothing else in the library asks which JAX is installed.
"""

from typing import Any

import jax.core
from jax.experimental import hijax

# JAX 0.10 calls it `VJPHiPrimitive`, JAX 0.12 `HiPrim`; the methods that eqloop
# overrides have the same signatures in both.
HiPrimitive: type = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


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
