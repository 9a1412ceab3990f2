"""Our loops, standing in for those of `jax.lax` and `equinox.internal`.

A package that is imported by itself, with its parent on the path: Equinox's tests are
in a package called `tests`, too.
"""

from ._patch import STAND_INS, replaced, stand_in
from ._variants import VARIANTS, Variant

__all__ = ["STAND_INS", "VARIANTS", "Variant", "replaced", "stand_in"]
