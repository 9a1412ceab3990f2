"""How much memory a program takes, found by compiling it; nothing is run."""

from collections.abc import Callable
from typing import Any

import jax

from .._types import PyTree


def temporary_bytes(run: Callable[..., PyTree], *types: PyTree) -> int | None:
    """The bytes that a program allocates besides its inputs and outputs.

    Args:
        run: The program, a function of arrays.
        types: The types of its arguments.

    Returns:
        The number, or `None` if the program cannot be compiled by itself: one with a
        collective cannot be compiled outside of its mesh.
    """
    # XLA assigns memory before it generates code, so this code need not be fast.
    options: dict[str, Any] = {"xla_backend_optimization_level": "0"}
    try:
        analysis = jax.jit(run).lower(*types).compile(options).memory_analysis()
    except Exception:
        return None
    return None if analysis is None else analysis.temp_size_in_bytes
