"""What a compiler for an H100 makes of a program, on a machine that has none.

Nothing is run. The memory is what XLA assigns, and the kernels are those that it would
start. It needs no device, but JAX's plugin for CUDA and the compiler in a wheel:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

# What XLA says of this card.
_CONFIG = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

_STARTED = frozenset(
    {
        "copy",
        "copy-start",
        "convolution",
        "custom-call",
        "dot",
        "dynamic-slice",
        "dynamic-update-slice",
        "fusion",
        "gather",
        "reduce",
        "scatter",
        "sort",
        "transpose",
    }
)
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_OPERATION = re.compile(r"(?:ROOT )?%?[\w.\-]+ = .*? ([\w\-]+)\(")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


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
    if (sharding := _sharding()) is None:
        return None
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    program = jax.jit(fn).lower(*types).compile()
    size = program.memory_analysis().temp_size_in_bytes
    return ForH100(size, kernels_of(program.as_text() or ""))


@functools.cache
def _sharding() -> jax.sharding.Sharding | None:
    """One device of this kind, if programs can be compiled for it."""
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=_CONFIG,
            topology_name="1x1x1",
            topology="1x1x1",
        )
    except Exception:
        return None
    mesh = jax.sharding.Mesh(found.devices[:1], ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def kernels_of(text: str) -> int:
    """How many kernels a compiled program starts, with its loops multiplied out."""
    programs, entry, lines = dict[str, list[str]](), "", list[str]()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            lines = programs.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("  "):
            lines.append(line.strip())
    return _count(programs, programs[entry])


def _count(programs: Mapping[str, Sequence[str]], lines: Sequence[str]) -> int:
    total = 0
    for line in lines:
        found = _OPERATION.match(line)
        operation = found[1] if found else ""
        if operation == "while":
            trips = _TRIPS.search(line)
            times = int(trips[1]) if trips else 1
            total += times * _count(programs, programs[_called("body", line)])
        elif operation == "conditional":
            # What all branches would start: which of them runs is not known.
            for names in re.findall(r"branch_computations=\{([^}]*)\}", line):
                total += sum(
                    _count(programs, programs[name.strip().lstrip("%")])
                    for name in names.split(",")
                )
        elif operation == "call":
            total += _count(programs, programs[_called("to_apply", line)])
        else:
            total += operation in _STARTED
    return total


def _called(role: str, line: str) -> str:
    """The name of a computation that a line of a program refers to."""
    found = re.search(rf"{role}=%?([\w.\-]+)", line)
    assert found is not None
    return found[1]
