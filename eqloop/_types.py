"""Types for annotations where neither Python nor JAX has one that fits.

A tree of a user is a `PyTree`, as everywhere in the field. What is traced has the types
of `jax.core` and `jax.extend.core`; those are incomplete where a program's values and
their types are concerned, and here is what stands for these.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.extend.core as jex
import numpy as np
from jaxtyping import Array, Key, UInt32

PRNGKey = Key[Array, "..."] | UInt32[Array | np.ndarray, "..."]

# Type checkers cannot tell what these are in JAX and jaxtyping.
if TYPE_CHECKING:
    PyTree: TypeAlias = Any
    ShapeDtypeStruct: TypeAlias = Any
    Device: TypeAlias = Any
else:
    from jax import Device as Device
    from jax import ShapeDtypeStruct as ShapeDtypeStruct
    from jaxtyping import PyTree as PyTree

# What a variable of a program stands for: an array, a tracer, a PRNG key, a reference,
# and among tangents a symbolic zero. They have no base class; JAX calls them
# `jax.core.Value`, which is `Any`, too.
Value: TypeAlias = Any

# The type of a value: `jax.core.ShapedArray` nearly always. JAX annotates it with
# `jax.core.AbstractValue`, which has neither shape nor dtype.
Aval: TypeAlias = Any

# An integer that may be computed in the program.
Index: TypeAlias = int | jax.Array

# A program in an equation, which may lack its constants (see `_compat.py`).
AnyJaxpr: TypeAlias = jex.ClosedJaxpr | jex.Jaxpr


class BatchAxis(Protocol):
    """The axis that a batch rule is called for, as JAX describes it."""

    @property
    def name(self) -> Hashable: ...

    @property
    def size(self) -> int: ...

    @property
    def spmd_name(self) -> Hashable: ...

    @property
    def explicit_mesh_axis(self) -> Hashable: ...

    def __hash__(self) -> int: ...
