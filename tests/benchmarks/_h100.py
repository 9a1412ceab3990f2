"""What a compiler for an H100 makes of a program, on a machine that has none.

Nothing is run. The memory is what XLA assigns, and the kernels are those that it would
start. It needs no device, but the compiler: `pip install 'eqloop[targets]'`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import eqloop as el
from eqloop._known_devices import compile_only_device
from eqloop._programs import lowered

from ..targets._hlo import Optimised


@dataclasses.dataclass(frozen=True)
class ForH100:
    """What became of a program.

    Attributes:
        temp_bytes: What it allocates besides its arguments and results.
        kernels: How many kernels it starts. Those of a loop count as often as it runs,
            or once, if that is not known.
    """

    temp_bytes: int
    kernels: int


def compiled_for_h100(fn: Callable[..., Any], *args: Any) -> ForH100 | None:
    """Compiles a function; `None` where there is no compiler for it."""
    try:
        device = compile_only_device("h100")
    except Exception:  # It may be installed, and not work.
        return None
    with el.planning_for(device):
        program = lowered(fn, *args).compile()
    memory: Any = program.memory_analysis()
    return ForH100(memory.temp_size_in_bytes, kernels_of(program.as_text() or ""))


def kernels_of(text: str) -> int:
    """How many kernels a compiled program starts, with its loops multiplied out."""
    return sum(one.times for one in Optimised(text).started())
