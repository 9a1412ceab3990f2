"""What differs between versions of JAX, with the version beside each line.

Nothing else in the library asks which JAX is installed.
"""

from jax.experimental import hijax

# JAX 0.10 calls it `VJPHiPrimitive`, JAX 0.12 `HiPrim`; the methods that eqloop
# overrides have the same signatures in both.
HiPrimitive: type = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
