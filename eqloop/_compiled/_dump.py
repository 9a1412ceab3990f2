"""Has XLA write down a program that it compiles, and reads that."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.stages

from .._programs import quick_options
from ._program import CompiledProgram

# Of what XLA writes: the program whose memory has been assigned. Its compilers put
# other words in front.
_ASSIGNED = "*after_optimizations.hlo.pb"
# It changes nothing but what JAX's cache of compiled programs knows a program by.
_UNIQUE = "xla_debug_buffer_assignment_show_max"
_LIMIT = "jax_traceback_in_locations_limit"


def compiled(
    lowered: jax.stages.Lowered,
) -> tuple[CompiledProgram, jax.stages.Compiled]:
    """Compiles a program, and reads what its compiler decided."""
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            **quick_options(),
            "xla_dump_to": folder,
            "xla_dump_hlo_as_proto": True,
        }
        # What JAX finds in a cache on disk is not compiled, and nothing is written.
        for more in ({}, {_UNIQUE: time.time_ns() % 2**31}):
            done = lowered.compile(options | more)
            if found := programs_in(folder):
                return max(found, key=lambda one: len(one.instructions)), done
    raise RuntimeError(
        "memory_profile: the compiler for this device does not write down which memory "
        "it assigns. Pass `device=` for one whose compiler does, such as 'h100'."
    )


def programs_in(folder: str) -> list[CompiledProgram]:
    """The programs that XLA has written into a folder."""
    files = sorted(Path(folder).glob(_ASSIGNED))
    read = (CompiledProgram.of(file.read_bytes()) for file in files)
    return [program for program in read if program is not None]


@contextlib.contextmanager
def with_all_frames() -> Iterator[None]:
    """Lowers programs with all lines of Python that their operations come from."""
    config: Any = jax.config
    before = config.jax_traceback_in_locations_limit
    jax.config.update(_LIMIT, -1)
    try:
        yield
    finally:
        jax.config.update(_LIMIT, before)
