"""Our loops, standing in for those of `jax.lax` and `equinox.internal`.

A package that is imported by itself, with its parent on the path: Equinox's tests are
in a package called `tests`, too.
"""

from ._patch import replaced
from ._variants import VARIANTS, Variant

__all__ = ["VARIANTS", "Variant", "replaced"]
