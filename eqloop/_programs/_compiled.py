"""How much memory a program takes, found by compiling it; nothing is run."""

import os
from collections.abc import Callable
from typing import Any

import jax

from .._types import PyTree

# XLA assigns memory before it generates code, so this code need not be fast. On the
# CPU, this pass makes one function of a whole loop, and LLVM takes long to compile that
# even if it optimises nothing. The pass itself changes no memory.
_LEFT_OUT, _SLOW_PASS = "xla_disable_hlo_passes", "small-while-loop-hoisting"


def temporary_bytes(run: Callable[..., PyTree], *types: PyTree) -> int | None:
    """The bytes that a program allocates besides its inputs and outputs.

    Args:
        run: The program, a function of arrays.
        types: The types of its arguments.

    Returns:
        The number, or `None` if the program cannot be compiled by itself: one with a
        collective cannot be compiled outside of its mesh.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": "0"}
    # The option takes the place of that in `XLA_FLAGS`, which memory may depend on.
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() == "cpu" and _LEFT_OUT not in flags:
        options[_LEFT_OUT] = _SLOW_PASS
    try:
        analysis = jax.jit(run).lower(*types).compile(options).memory_analysis()
    except Exception:
        return None
    return None if analysis is None else analysis.temp_size_in_bytes
