"""Devices that are known by name: what they do in a second, and their compilers.

The compiler of a device does not need the device. JAX's plug-ins for GPUs and TPUs
contain it, and `jax.experimental.topologies` makes devices of it that compile programs
and cannot run them.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import jax

from ._types import Device


@dataclasses.dataclass(frozen=True)
class DeviceRates:
    """What a device does in a second, at best: by data sheets, and nothing is measured.

    Attributes:
        float32: Floating-point operations per second in products of matrices of
            float32, at the precision that JAX has by default: TF32 on GPUs, and
            bfloat16 on TPUs.
        bfloat16: The same for bfloat16.
        memory: Bytes per second that it reads from its memory, or writes there.
        to_host: Bytes per second to the memory of its host, or from there.
        start: Seconds that it takes to start a kernel.
    """

    float32: float
    bfloat16: float
    memory: float
    to_host: float
    start: float


_CUDA_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


@dataclasses.dataclass(frozen=True)
class _Gpu:
    """A card, in the words in which its compiler wants to know of it."""

    platform: ClassVar[str] = "gpu"
    kind: str
    capability: int
    cores: int
    fpus_per_core: int
    shared_memory: int
    bandwidth: int
    cache: int
    clock: float
    memory: int

    @property
    def package(self) -> str:
        return next(filter(_is_installed, _CUDA_PLUGINS), _CUDA_PLUGINS[0])

    def devices(self) -> list[Device]:
        _have_cuda_registered(self.package)
        # Eight of them, for programs that are split over several.
        eight = "1x1x8"
        return _topology(
            eight, "cuda", topology=eight, target_config=self._described()
        ).devices

    def _described(self) -> str:
        # Each card since the A100 has the same limits. A block may have all of the
        # shared memory of its core but a KiB.
        return f"""
            gpu_device_info {{
                threads_per_warp: 32
                threads_per_block_limit: 1024
                threads_per_core_limit: 2048
                registers_per_block_limit: 65536
                registers_per_core_limit: 65536
                block_dim_limit_x: 2147483647
                block_dim_limit_y: 65535
                block_dim_limit_z: 65535
                shared_memory_per_block: 49152
                shared_memory_per_block_optin: {self.shared_memory - 1024}
                shared_memory_per_core: {self.shared_memory}
                core_count: {self.cores}
                fpus_per_core: {self.fpus_per_core}
                clock_rate_ghz: {self.clock}
                l2_cache_size: {self.cache}
                memory_bandwidth: {self.bandwidth}
                device_memory_size: {self.memory}
                cuda_compute_capability {{ major: {self.capability} minor: 0 }}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 8 }}
            runtime_version {{ major: 12 minor: 9 }}
            device_description_str: "{self.kind}"
        """


def _have_cuda_registered(package: str) -> None:
    """Has the plug-in for CUDA known to JAX, also where no GPU could be used."""
    # JAX starts all plug-ins. Where it may run programs on GPUs, this one fails if
    # libraries are missing that only running takes, such as cuDNN, and then JAX does
    # not know it as a compiler either.
    jax.devices()  # Backends start here, so that none is looked for later on.
    try:
        _topology("", "cuda")
    except NotImplementedError:  # No plug-in of this name.
        with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            importlib.import_module(package).initialize()
    except Exception:
        pass  # It is known, and this topology has no name.


@dataclasses.dataclass(frozen=True)
class _Tpu:
    """A TPU, and the smallest part of a pod with eight devices or more."""

    platform: ClassVar[str] = "tpu"
    package: ClassVar[str] = "libtpu"
    kind: str
    topology: str
    # Whether JAX has one device for the two cores of a chip, and has to be told so.
    megacore: bool = False

    def devices(self) -> list[Device]:
        # Nothing is run, so nobody has to be asked where this machine is in a pod, and
        # other processes may compile as well.
        with _environment(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"):
            settings = {"chip_config_name": "megacore"} if self.megacore else {}
            return _topology(self.topology, "tpu", **settings).devices


def _topology(*args: Any, **settings: Any) -> Any:
    # JAX's module takes a while to import, and few programs need it.
    from jax.experimental import topologies

    return topologies.get_topology_desc(*args, **settings)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """A context in which variables of the environment are set, unless they were."""
    new = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)


@dataclasses.dataclass(frozen=True)
class KnownDevice:
    """A kind of device that has a name here.

    Attributes:
        sign: What is in the name that JAX has for devices of this kind.
        compiler: Where programs for it are compiled.
        rates: What it does in a second.
    """

    sign: str
    compiler: _Gpu | _Tpu
    rates: DeviceRates


# Descriptions of cards: as XLA has them, https://github.com/openxla/xla, in
# `xla/backends/gpu/target_config/specs`. Rates: NVIDIA's data sheets, without sparsity,
# and https://cloud.google.com/tpu/docs, for each device of JAX: half a chip of TPU7x.
# To start a kernel takes a few microseconds. On a TPU, all of a program is one kernel,
# and its operations follow each other faster.
# fmt: off
KNOWN = {
    "a100": KnownDevice(
        "A100",
        _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 167_936, 2_039_040_000_000,
             41_943_040, 1.41, 85_100_068_864),
        DeviceRates(156e12, 312e12, 2.04e12, 25e9, 3e-6),
    ),
    "h100": KnownDevice(
        "H100",
        _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 233_472, 3_352_320_000_000,
             52_428_800, 1.98, 84_978_434_048),
        DeviceRates(495e12, 989e12, 3.35e12, 50e9, 2.5e-6),
    ),
    "h200": KnownDevice(
        "H200",
        _Gpu("NVIDIA H200 141GB HBM3e", 9, 132, 128, 233_472, 4_800_000_000_000,
             52_428_800, 1.98, 151_397_597_184),
        DeviceRates(495e12, 989e12, 4.8e12, 50e9, 2.5e-6),
    ),
    "b200": KnownDevice(
        "B200",
        _Gpu("NVIDIA B200", 10, 148, 128, 233_472, 7_672_320_000_000,
             132_644_864, 1.965, 191_514_411_008),
        DeviceRates(1.1e15, 2.25e15, 7.7e12, 50e9, 2.5e-6),
    ),
    "v4": KnownDevice(
        "TPU v4",
        _Tpu("TPU v4", "v4:2x2x2", megacore=True),
        DeviceRates(275e12, 275e12, 1.23e12, 12e9, 5e-7),
    ),
    "v5e": KnownDevice(
        "TPU v5 lite",
        _Tpu("TPU v5 lite", "v5e:2x4"),
        DeviceRates(197e12, 197e12, 0.82e12, 12e9, 5e-7),
    ),
    "v5p": KnownDevice(
        "TPU v5",
        _Tpu("TPU v5", "v5p:2x2x2"),
        DeviceRates(459e12, 459e12, 2.77e12, 12e9, 5e-7),
    ),
    "v6e": KnownDevice(
        "TPU v6 lite",
        _Tpu("TPU v6 lite", "v6e:2x4"),
        DeviceRates(918e12, 918e12, 1.64e12, 25e9, 5e-7),
    ),
    "tpu7x": KnownDevice(
        "TPU7x",
        _Tpu("TPU7x", "tpu7x:2x2x1"),
        DeviceRates(1.15e15, 1.15e15, 3.69e12, 25e9, 5e-7),
    ),
}
# fmt: on

# For what is not in that table. A CPU's are those of two cores; see `CPU` in
# `planning/_work.py`, which is measured.
_RATES_OF_PLATFORM = {
    "cpu": DeviceRates(1e11, 1e11, 2e10, 2e10, 2e-8),
    "gpu": KNOWN["a100"].rates,
    "tpu": KNOWN["v5e"].rates,
}


def known_name(platform: str, kind: str) -> str | None:
    """The name of a kind of device, if it has one here."""
    fitting = [
        name
        for name, known in KNOWN.items()
        if known.compiler.platform == platform and known.sign in kind
    ]
    # "TPU v5" is in "TPU v5 lite", too.
    return max(fitting, key=lambda name: len(KNOWN[name].sign), default=None)


def rates_of(platform: str, kind: str) -> DeviceRates:
    """What a kind of device does in a second; if it is not known, others like it."""
    name = known_name(platform, kind)
    if name is not None:
        return KNOWN[name].rates
    return _RATES_OF_PLATFORM.get(platform, _RATES_OF_PLATFORM["gpu"])


@functools.cache
def compile_only_device(name: str) -> Device:
    """A device of a name in `KNOWN` that compiles programs, and cannot run them."""
    compiler = KNOWN[name].compiler
    if not _is_installed(compiler.package):
        raise ImportError(
            f"planning_for: to plan for {name!r}, its compiler is needed, and "
            f"`{compiler.package}` is not installed. Install the compilers of JAX's "
            f"devices, no device and no driver, by `pip install "
            f"'jax[cuda12-local,tpu]' nvidia-cuda-nvcc-cu12`, which are the extra "
            f"`targets` of this library. A plan for the device that is here tells "
            f"already what is stored and how often steps are run."
        )
    return compiler.devices()[0]
