"""Asks the compiler of another device."""

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqloop.checkpointing.planning._memory as planning

# The packages with the compilers.
NEEDED = {"h100": "jax_plugins.xla_cuda12", "v5e": "libtpu"}

# What a compiler has to know of a card, with the names that XLA has for it.
_CARD = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "memory_bandwidth": 3_352_320_000_000,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84_978_434_048,
}
_VERSIONS = """
    cuda_compute_capability { major: 9 minor: 0 }
"""
_LIBRARIES = """
    platform_name: "CUDA"
    dnn_version_info { major: 9 minor: 8 }
    runtime_version { major: 12 minor: 9 }
    device_description_str: "NVIDIA H100 80GB HBM3"
"""


def is_installed(kind: str) -> bool:
    """Whether the compiler for a kind of device is here."""
    try:
        return importlib.util.find_spec(NEEDED[kind]) is not None
    except ModuleNotFoundError:
        return False


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


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiles for one device of a kind."""

    kind: str

    @property
    def platform(self) -> str:
        """Its name, as JAX has it."""
        return "gpu" if self.kind == "h100" else "tpu"

    def __call__(self, f: Callable[..., Any], *args: Any) -> Compiled:
        """Compiles a function of arrays, or of their types."""
        done = self._compile(f, args)
        memory = done.memory_analysis()
        return Compiled(
            memory.temp_size_in_bytes,
            memory.host_temp_size_in_bytes,
            "_xla_compute_type" in done.as_text(),
        )

    def plan_here(self) -> None:
        """Has plans made for this device from now on, in this process."""

        def temporary_bytes(run: Callable[..., Any], *types: Any) -> int | None:
            try:
                return self._compile(run, types).memory_analysis().temp_size_in_bytes
            except Exception:
                return None

        planning.temporary_bytes = temporary_bytes
        jax.default_backend = lambda: self.platform

    def _compile(self, f: Callable[..., Any], args: Any) -> Any:
        mesh = Mesh(self._devices[:1], ("device",))
        there = NamedSharding(mesh, PartitionSpec())
        type_of = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
        return jax.jit(f).lower(*jax.tree.map(type_of, args)).compile()

    @property
    def _devices(self) -> Any:
        if self.kind != "h100":
            name = f"{self.kind}:2x2"
            return topologies.get_topology_desc(name, "tpu").devices
        numbers = " ".join(f"{name}: {value}" for name, value in _CARD.items())
        info = f"gpu_device_info {{ {numbers} {_VERSIONS} }} {_LIBRARIES}"
        described = topologies.get_topology_desc(
            "1x1x1", "cuda", target_config=info, topology="1x1x1"
        )
        return described.devices
