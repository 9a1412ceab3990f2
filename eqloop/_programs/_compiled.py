"""How much memory a program takes, found by compiling it; nothing is run."""

import os
from collections.abc import Callable
from typing import Any

from .._device import planning_device
from .._types import PyTree
from ._lowering import lowered

# XLA assigns memory before it generates code, so this code need not be fast. On the
# CPU, this pass makes one function of a whole loop, and LLVM takes long to compile that
# even if it optimises nothing. The pass itself changes no memory.
_LEFT_OUT, _SLOW_PASS = "xla_disable_hlo_passes", "small-while-loop-hoisting"


def temporary_bytes(run: Callable[..., PyTree], *types: PyTree) -> int | None:
    """The bytes that a program allocates besides its inputs and outputs.

    They are those of one of the devices that it is split over.

    Args:
        run: The program, a function of arrays.
        types: The types of its arguments.

    Returns:
        The number, or `None` if the program cannot be compiled by itself, such as one
        with an axis of a `vmap` around it.
    """
    device = planning_device()
    options = _quick_options() if device.platform == "cpu" else None
    try:
        compiled = lowered(run, *types).compile(options)
        analysis = compiled.memory_analysis()
    except Exception:
        return None
    return None if analysis is None else analysis.temp_size_in_bytes


def _quick_options() -> dict[str, Any]:
    options: dict[str, Any] = {"xla_backend_optimization_level": "0"}
    # The option takes the place of that in `XLA_FLAGS`, which memory may depend on.
    if _LEFT_OUT not in os.environ.get("XLA_FLAGS", ""):
        options[_LEFT_OUT] = _SLOW_PASS
    return options
