"""The device that plans are made for.

It may be here, or it may be one that only its compiler knows. Whoever asks which
device, platform or backend it is asks `planning_device`.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeAlias, TypeVar

import jax
import jax.core
import jax.stages
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

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

# What a user may say to name a device.
DeviceLike: TypeAlias = Device | Mesh | str


class TooFewDevicesError(ValueError):
    """A program is split over more devices than there are of a kind."""


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

    def lower(self, run: Callable[..., PyTree], *types: PyTree) -> jax.stages.Lowered:
        """A program to compile for this device, or for as many as it is split over.

        That is how the types of its arguments are split over a mesh, if they are, or
        the mesh that is set. Which devices that mesh consists of makes no difference:
        it is made of devices of this kind.

        Args:
            run: The program, a function of arrays.
            types: Its arguments, or their types.

        Raises:
            TooFewDevicesError: If there are too few devices of this kind.
        """
        flat, tree = jax.tree.flatten(jax.tree.map(_type_of, types))
        program = lambda *flat: run(*tree.unflatten(flat))
        split_over = _mesh_of(flat)
        if split_over.empty:
            alone = SingleDeviceSharding(self.own)
            flat = [_placed(aval, alone) for aval in flat]
        else:
            mesh = self._mesh_like(split_over)
            manual = _manual_axes(split_over)
            if manual:
                program, flat = _on_all_devices(program, flat, mesh, manual)
            flat = _spread(flat, mesh)
            split_over = mesh.abstract_mesh
        # A program may be asked for while another one is traced, for another mesh.
        with jax.sharding.use_abstract_mesh(split_over):
            traced: Any = jax.jit(program).trace(*flat)
            lowered = traced.lower(lowering_platforms=self._lowered_for)
        return lowered

    @property
    def _lowered_for(self) -> tuple[str, ...] | None:
        # Of the devices of a mesh JAX knows only that they are GPUs. If there are none
        # here, it cannot tell whose they are.
        return ("cuda",) if self.platform == "gpu" and not self.is_here else None

    def _mesh_like(self, abstract: AbstractMesh) -> Mesh:
        """A mesh of devices of this kind, without manual axes."""
        every = self.own.client.devices()
        alike = [device for device in every if device.device_kind == self.kind]
        # A process compiles for devices of its own, as far as they go.
        alike.sort(key=lambda device: device.process_index != self.own.process_index)
        if len(alike) < abstract.size:
            raise TooFewDevicesError(
                f"it is split over {abstract.size} devices, and of {self.kind} there "
                f"are {len(alike)}"
            )
        automatic = {AxisType.Manual: AxisType.Auto}
        types = tuple(automatic.get(kind, kind) for kind in abstract.axis_types)
        devices = np.array(alike[: abstract.size]).reshape(abstract.axis_sizes)
        return Mesh(devices, abstract.axis_names, axis_types=types)


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
    `plan`, [`plans`][eqloop.plans] and [`frontier`][eqloop.frontier] also see on which
    device their arguments are.

    Args:
        device: A `jax.Device`, also one of `jax.experimental.topologies`; a
            `jax.sharding.Mesh`, for one of its devices; or a name: `"a100"`, `"h100"`,
            `"h200"`, `"b200"`, `"v4"`, `"v5e"`, `"v5p"`, `"v6e"`, `"tpu7x"` or `"cpu"`.
            Names of devices that are not here need their compilers, which
            `pip install 'eqloop[targets]'` installs.

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


def planning_for_call(
    device: DeviceLike | None, *args: PyTree
) -> contextlib.AbstractContextManager[None]:
    """`planning_for` a device, or else for that of the arguments of a call.

    Args:
        device: The device, if one was asked for.
        args: Arrays, or their types, among other things. Those that were put on a
            device are computed with there.
    """
    if device is None and _chosen.value is None:
        found = next(filter(None, map(_device_put_on, jax.tree.leaves(args))), None)
        # Which one of several alike makes no difference.
        if found is not None and found.device_kind != planning_device().kind:
            device = found
    return contextlib.nullcontext() if device is None else planning_for(device)


def _device_put_on(x: Value) -> Device | None:
    """One of the devices that an array was put on, or that a type of one says."""
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


def remembered_per_device(
    maxsize: int,
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """`functools.lru_cache` for what depends on the device that plans are for."""

    def decorate(f: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @functools.lru_cache(maxsize=maxsize)
        def of_device(device: PlannedDevice, *args: Any, **kwargs: Any) -> _Result:
            return f(*args, **kwargs)

        @functools.wraps(f)
        def of_this_device(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            return of_device(planning_device(), *args, **kwargs)

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
    if device not in ("cpu", *KNOWN):
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
    if device == "cpu":
        return jax.local_devices(backend="cpu")[0]
    for found in _local_devices(KNOWN[device].compiler.platform):
        if known_name(found.platform, found.device_kind) == device:
            return found
    return compile_only_device(device)


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


# Types of arrays that are split over the devices of a mesh.


def _is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether types say how arrays are split over a mesh."""
    return AxisType.Explicit in mesh.axis_types


def _is_type(aval: object) -> bool:
    return isinstance(aval, jax.core.ShapedArray | jax.ShapeDtypeStruct)


def _type_of(x: Value) -> Value:
    """The type of an array, with its sharding; anything else as it is."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _mesh_of(types: list[Value]) -> AbstractMesh:
    """The mesh that types are split over, or else the one that is set, if any is."""
    shardings = [aval.sharding for aval in types if _spec_of(aval)]
    meshes = [sharding.mesh for sharding in shardings]
    found = [mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh for mesh in meshes]
    is_set = jax.sharding.get_abstract_mesh()
    return next((mesh for mesh in found if not mesh.empty), is_set)


def _manual_axes(mesh: AbstractMesh) -> tuple[str, ...]:
    """The axes of a `jax.shard_map` that is around a program."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == AxisType.Manual)


def _spec_of(aval: Value) -> PartitionSpec | None:
    """How arrays of a type are split, if that is known."""
    sharding = aval.sharding if _is_type(aval) else None
    if not isinstance(sharding, NamedSharding):
        return None
    # Of automatic axes, a type knows nothing, unless it was made to tell.
    is_told = isinstance(aval, jax.ShapeDtypeStruct) or _is_explicit(sharding.mesh)
    return sharding.spec if is_told else None


def _spread(types: list[Value], mesh: Mesh) -> list[Value]:
    """Types with the devices of a mesh.

    Where axes are automatic, the compiler decides on arrays of which nothing is known,
    as it does within a program. If nothing is known of any, each device has all.
    """
    specs = list(map(_spec_of, types))
    is_automatic = not _is_explicit(mesh) and any(spec is not None for spec in specs)
    placed = lambda spec: NamedSharding(mesh, spec or PartitionSpec())
    leaves_open = lambda spec: spec is None and is_automatic
    return [
        _placed(aval, None if leaves_open(spec) else placed(spec))
        for aval, spec in zip(types, specs, strict=True)
    ]


def _placed(aval: Value, sharding: Any) -> Value:
    """A type with the devices that arrays of it are on, if that is decided."""
    if not _is_type(aval):
        return aval
    is_on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
    if is_on_host and sharding is not None:
        sharding = sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _on_all_devices(
    program: Callable[..., PyTree],
    types: list[Value],
    mesh: Mesh,
    axes: tuple[str, ...],
) -> tuple[Callable[..., PyTree], list[Value]]:
    """The program of each device as one of all devices, with its types.

    An array that differs between devices has one more axis in front, for these.
    """
    varying = [tuple(sorted(aval.manual_axis_type.varying)) for aval in types]
    # Without any, the types may be from a `shard_map` that does not check them.
    is_checked = any(varying)

    def of_one_device(*flat: Value) -> list[Value]:
        own = [
            x[0] if own_axes else x for x, own_axes in zip(flat, varying, strict=True)
        ]
        results = jax.tree.leaves(program(*own))
        if is_checked:
            results = [_varying(x, axes) for x in results]
        return [x[None] for x in results]

    stacked, specs = [], []
    for aval, axes_of in zip(types, varying, strict=True):
        rows = (math.prod(mesh.shape[axis] for axis in axes_of),) if axes_of else ()
        specs.append(PartitionSpec(*([axes_of] if axes_of else [])))
        spec = PartitionSpec(*specs[-1], *(_spec_of(aval) or ()))
        stacked.append(
            jax.ShapeDtypeStruct(
                (*rows, *aval.shape), aval.dtype, sharding=NamedSharding(mesh, spec)
            )
        )
    of_all = jax.shard_map(
        of_one_device,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(axes),
        axis_names=set(axes),
        check_vma=is_checked,
    )
    return of_all, stacked


def _varying(x: Value, axes: tuple[str, ...]) -> Value:
    """An array as one that differs between devices along all of these axes."""
    missing = set(axes) - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x
