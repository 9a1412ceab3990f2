"""The device that plans are made for.

It may be here, or it may be one that only its compiler knows. Whoever asks which
device, platform or backend it is asks `planning_device`.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.core
import jax.stages
from jax.sharding import Mesh, NamedSharding

from ._known_devices import (
    KNOWN,
    DeviceRates,
    compile_only_device,
    known_name,
    rates_of,
)
from ._types import Device, PyTree, Value

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# What XLA is told by the environment, and those settings of JAX that it is not told.
_FLAGS = "XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "NPROC"
_NO_FLAG = re.compile(
    "cache|check|color|debug|default_device|devices$|disable_jit|dump|error|guard|log|"
    "numpy|platform|source|timeout|trace|tracing|transfer|transport|^jax_mtls"
)

# What a user may say to name a device.
DeviceLike: TypeAlias = Device | Mesh | str


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """A device that plans are made for.

    Attributes:
        own: The device as JAX has it. Others of its kind that work with it are known by
            its client.
    """

    own: Device

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return self.own.platform

    @property
    def kind(self) -> str:
        """What it is called, such as `"NVIDIA H100 80GB HBM3"`."""
        return self.own.device_kind

    @property
    def is_here(self) -> bool:
        """Whether this process can run programs on it."""
        return self.own in _local_devices(self.platform)

    @property
    def key(self) -> str:
        """What it is remembered by, the same in every process."""
        version = self.own.client.platform_version
        return f"{self.platform} {self.kind} {version}"

    @property
    def rates(self) -> DeviceRates:
        """What it does in a second, at best."""
        return rates_of(self.platform, self.kind)

    def alike(self, size: int) -> tuple[Device, ...]:
        """So many devices of this kind that work together, or all there are."""
        every = self.own.client.devices()
        alike = [device for device in every if device.device_kind == self.kind]
        # A process compiles for devices of its own, as far as they go.
        alike.sort(key=lambda device: device.process_index != self.own.process_index)
        return tuple(alike[:size])


# The key of JAX's caches contains the device: what was traced for one is traced again
# for another.
_chosen: Any = jax.make_user_context(None)


@contextlib.contextmanager
def planning_for(device: DeviceLike) -> Iterator[None]:
    """A context in which loops are planned for a device, which need not be here.

    Plans are made while a program is traced, so trace it in this context: compile it
    ahead of time for the device, or ask for its plans. JAX's caches know the context: a
    function that was traced outside of it is traced again.

    A device that is not here compiles the programs that a plan needs, and runs nothing.
    So memory is known exactly, on the device and on its host, and times are estimated.

    Without this context, plans are for the device that a program will run on: that of
    the mesh that is set (`jax.set_mesh`), of `jax.default_device`, or else JAX's first.
    `plan`, `frontier` and [`plans`][eqloop.plans] also see on which
    device their arguments are.

    Args:
        device: A `jax.Device`, also one of `jax.experimental.topologies`; a
            `jax.sharding.Mesh`, for one of its devices; or a name: `"a100"`, `"h100"`,
            `"h200"`, `"b200"`, `"v4"`, `"v5e"`, `"v5p"`, `"v6e"`, `"tpu7x"` or `"cpu"`,
            also in capitals. Names of devices that are not here need their compilers:
            `pip install 'jax[cuda12-local,tpu]' nvidia-cuda-nvcc-cu12`.

    Returns:
        A context manager, which can also decorate a function.

    Raises:
        TypeError: If it is none of these.
        ValueError: If no device has that name.
        ImportError: If the compiler for it is not installed.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.CheckpointedScan(lambda h, x: (jnp.sin(h + x), None))
        >>> with el.planning_for(jax.devices("cpu")[0]):
        ...     plan = scan.plan(jnp.zeros(64), jnp.zeros((4096, 64)))
        >>> plan.levels
        ((16, 16, 16),)
    """
    if device is None:
        raise TypeError("planning_for: `device` must be a device, and not None.")
    check_device("planning_for", device)
    with _chosen(PlannedDevice(_device_of(device))):
        yield


@contextlib.contextmanager
def as_by_jit() -> Iterator[None]:
    """A context in which programs are traced, compiled and tried as `jit` does it.

    Without `jit`, JAX writes loops out: that is another program, of other bytes.
    """
    # What a user looks for with these settings is looked for where programs run.
    with (
        jax.disable_jit(False),
        jax.check_tracer_leaks(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
    ):
        yield


@contextlib.contextmanager
def planning_for_call(device: DeviceLike | None, *args: PyTree) -> Iterator[None]:
    """`planning_for` a device, or else for that of the arguments of a call."""
    # What was put on a device is computed with there.
    if device is None and _chosen.value is None:
        own = next(filter(None, map(_device_put_on, jax.tree.leaves(args))), None)
        # Which one of several alike makes no difference.
        if own is not None and own.device_kind != planning_device().kind:
            device = own
    found = contextlib.nullcontext() if device is None else planning_for(device)
    with as_by_jit(), found:
        yield


def _device_put_on(x: Value) -> Device | None:
    """One of the devices that an array was put on, or that a type or a mesh says."""
    if isinstance(x, Mesh):
        return _device_of(x)
    is_type = isinstance(x, jax.ShapeDtypeStruct)
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    if not (is_type or (is_array and x.committed)) or x.sharding is None:
        return None
    if isinstance(x.sharding, NamedSharding) and not isinstance(x.sharding.mesh, Mesh):
        return None
    own = jax.process_index()
    return min(x.sharding.device_set, key=lambda d: (d.process_index != own, d.id))


def planning_device() -> PlannedDevice:
    """The device that a plan is for that is made now."""
    return _chosen.value or PlannedDevice(_device_of_runs())


def compiler_settings() -> tuple[Any, ...]:
    """What a compiled program depends on, besides itself, its device and versions."""
    config: Any = jax.config  # its settings have no types
    # As it is here: a context may have another value than all others.
    told = [
        (name, getattr(config, name, value))
        for name, value in config.values.items()
        if _is_told(name)
    ]
    return (*map(os.environ.get, _FLAGS), *told)


@functools.cache
def _is_told(setting: str) -> bool:
    return not _NO_FLAG.search(setting)


def remembered_per_device(
    maxsize: int,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """`functools.lru_cache` for what depends on the device that plans are for.

    And on the settings of JAX with which programs are compiled.
    """

    def decorate(f: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @functools.lru_cache(maxsize=maxsize)
        def of_device(about: tuple[Any, ...], *args: Any, **kwargs: Any) -> _Result:
            return f(*args, **kwargs)

        @functools.wraps(f)
        def of_this_device(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            about = planning_device(), compiler_settings()
            return of_device(about, *args, **kwargs)

        wrapped: Any = of_this_device
        wrapped.cache_clear = of_device.cache_clear
        return of_this_device

    return decorate


def check_device(owner: str, device: object) -> None:
    """Checks that something, if it is given, is a device that plans can be for."""
    is_mesh = isinstance(device, Mesh) and device.size
    if is_mesh or device is None or isinstance(device, Device):
        return
    if not isinstance(device, str):
        raise TypeError(
            f"{owner}: `device` must be a jax.Device, a jax.sharding.Mesh that "
            f"has devices, or a name such as 'h100', not {device!r} of type "
            f"{type(device).__name__}."
        )
    if device.lower() not in ("cpu", *KNOWN):
        names = ", ".join(map(repr, ("cpu", *KNOWN)))
        raise ValueError(
            f"{owner}: `device={device!r}` is no name of a device that is known. There "
            f"are {names}. For others, pass a jax.Device, such as one of "
            f"`jax.experimental.topologies.get_topology_desc`."
        )


def _device_of(device: DeviceLike) -> Device:
    if isinstance(device, Mesh):
        return device.devices.flat[0]
    if isinstance(device, Device):
        return device
    if (name := device.lower()) == "cpu":
        return jax.local_devices(backend="cpu")[0]
    for found in _local_devices(KNOWN[name].compiler.platform):
        if known_name(found.platform, found.device_kind) == name:
            return found
    return compile_only_device(name)


def _device_of_runs() -> Device:
    """The device on which a program will run that is traced now."""
    # Under `jit`, JAX tells the kind of the devices of a mesh, and not which they are.
    on_mesh: Any = jax.sharding.get_abstract_mesh().abstract_device
    if on_mesh is not None:
        for found in _local_devices(on_mesh.platform):
            if found.device_kind == on_mesh.device_kind:
                return found
        name = known_name(on_mesh.platform, on_mesh.device_kind)
        if name is not None:
            return compile_only_device(name)
    config: Any = jax.config
    default = config.jax_default_device
    if isinstance(default, Device):
        return default
    return jax.local_devices(backend=default)[0]  # of the platform named, if one is


def _local_devices(platform: str) -> list[Device]:
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError:  # JAX has no such platform.
        return []
