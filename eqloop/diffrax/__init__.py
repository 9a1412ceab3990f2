"""Adjoints for [Diffrax](https://docs.kidger.site/diffrax/) that run on our loops.

They are in `_adjoint.py` and `_reversible.py`, for `diffrax.diffeqsolve(...,
adjoint=...)`; `_undone.py` finds where a step has come from, and `_on_devices.py` has
what they need in a `jax.shard_map`. This room is imported by name, `import
eqloop.diffrax`, as Diffrax need not be installed otherwise.
"""

try:
    import diffrax as _diffrax
except ImportError:
    raise ImportError(
        "eqloop.diffrax: Diffrax is not installed. To install it: `python -m pip "
        "install diffrax`."
    ) from None

from ._adjoint import CheckpointedAdjoint
from ._reversible import ReversibleAdjoint

__all__ = ["CheckpointedAdjoint", "ReversibleAdjoint"]
