"""Which derivatives there are where arrays are complex: those that JAX has."""

from typing import Any

import jax
import jax.numpy as jnp

from .._arrays import describe, flatten, is_complex, paths
from .._types import PyTree
from ._call import Call, is_differentiable


def common_dtype(*dtypes: PyTree) -> Any:
    """The dtype to compute in with all of these, however strict promotion is."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def check_some_value(call: Call, value: object) -> None:
    """Raises if the value has nothing that could be differentiated."""
    if not _outputs(value):
        types = jax.tree.map(describe, value)
        raise TypeError(
            f"{call.owner}: there is nothing to differentiate in what f returned, as "
            f"it has no floating-point or complex array: {types}."
        )


def check_reverse(call: Call, value: object, *, holomorphic: bool) -> None:
    """Raises unless reverse mode can differentiate this value."""
    if holomorphic:
        return _check_complex(call, value)
    for name, leaf in _outputs(value):
        if is_complex(leaf):
            raise TypeError(
                f"{call.owner}: f returned {name}, which is {describe(leaf)}, but "
                f"reverse mode differentiates real values only. Return its real and "
                f"its imaginary part, or pass `holomorphic=True` if f is holomorphic."
            )


def check_forward(call: Call, value: object, *, holomorphic: bool) -> None:
    """Raises unless forward mode can differentiate by these arguments."""
    if holomorphic:
        return _check_complex(call, value)
    for name, array in zip(call.names, call.arrays, strict=True):
        if is_complex(array):
            raise TypeError(
                f"{call.owner}: {name} is {describe(array)}, but forward mode "
                f"differentiates by real arrays only. Pass its real and its imaginary "
                f"part, or pass `holomorphic=True` if f is holomorphic."
            )


def _check_complex(call: Call, value: object) -> None:
    arguments = list(zip(call.names, call.arrays, strict=True))
    for name, leaf in [*arguments, *_outputs(value)]:
        if not is_complex(leaf):
            raise TypeError(
                f"{call.owner}: with `holomorphic=True` everything that is "
                f"differentiated must be complex, but {name} is {describe(leaf)}."
            )


def _outputs(value: object) -> list[tuple[str, jax.Array]]:
    named = zip(paths(value, "out"), flatten(value)[0], strict=True)
    return [(name, leaf) for name, leaf in named if is_differentiable(leaf)]
