"""Asks the compiler of another device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import eqloop as el
from eqloop._known_devices import compile_only_device
from eqloop._programs import lowered


def is_installed(kind: str) -> bool:
    """Whether the compiler for a kind of device is here."""
    try:
        compile_only_device(kind)
    except ImportError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program.

    Attributes:
        temp: The bytes on the device, besides inputs and outputs.
        host: The bytes on its host.
        computes_on_host: Whether the processor of the host computes anything.
    """

    temp: int
    host: int
    computes_on_host: bool


def compiled_for(kind: str, f: Callable[..., Any], *args: Any) -> Compiled:
    """Compiles a function of arrays, or of their types, for one device of a kind.

    Its loops are planned for that device, if it is traced within `el.planning_for`.
    """
    with el.planning_for(compile_only_device(kind)):
        done = lowered(f, *args).compile()
    memory: Any = done.memory_analysis()
    return Compiled(
        memory.temp_size_in_bytes,
        memory.host_temp_size_in_bytes,
        "_xla_compute_type" in str(done.as_text()),
    )
