"""Lowers programs for the device that plans are for, or for as many as they take.

What is compiled to see what it takes has to be what will run. So it is split over the
mesh that its arguments are split over, or that is set, and over those that the program
itself names (in `jax.shard_map`, in sharding constraints).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

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

from .._device import PlannedDevice, planning_device
from .._types import AnyJaxpr, Device, PyTree, Value
from ._equations import equations

# The devices of a mesh, in their order.
_Devices: TypeAlias = tuple[Device, ...]


class NoSuchDevicesError(ValueError):
    """A program is split over devices that there are none, or too few, of."""


def lowered(
    run: Callable[..., PyTree], *types: PyTree, donated: tuple[int, ...] = ()
) -> jax.stages.Lowered:
    """A program to compile for the device that plans are for, as it will run there.

    `donated` are the numbers of those flat arguments that results may overwrite.
    """
    device, (flat, tree) = planning_device(), jax.tree.flatten(types)
    # What these do not tell of how arguments are split over automatic axes is left to
    # the compiler.
    flat = list(map(_type_of, flat))
    program = lambda *flat: run(*tree.unflatten(flat))
    mesh, told = _mesh_of(flat), _of_kind(device, _told_meshes(flat))
    traced, devices = _traced(device, program, flat, mesh, told, donated)
    named = [m for m in meshes_in(traced.jaxpr) if (*m.devices.flat,) != devices]
    own = _of_kind(device, named)
    if named and not own:
        raise NoSuchDevicesError(
            f"The program names {named[0]}, which consists of devices that are no "
            f"{device.kind}, and a plan for these was asked for. Name a mesh of such "
            f"devices, of a topology of `jax.experimental.topologies` for example."
        )
    # It may be a mesh of the same devices in another order.
    if named and not mesh.empty and len(own) == mesh.size:
        traced, _ = _traced(device, program, flat, mesh, own, donated)
    # Of the devices of a mesh JAX knows only that they are GPUs. If there are none
    # here, it cannot tell whose they are.
    is_cuda = device.platform == "gpu" and not device.is_here
    with jax.default_device(device.own):
        return traced.lower(lowering_platforms=("cuda",) if is_cuda else None)


def _traced(
    device: PlannedDevice,
    program: Callable[..., PyTree],
    types: list[Value],
    mesh: AbstractMesh,
    devices: _Devices,
    donated: tuple[int, ...],
) -> tuple[Any, _Devices]:
    """A program that is traced for a mesh, or without one for a single device.

    `devices` are those of the mesh, if they are known; they are returned as well.
    """
    if mesh.empty:  # Or on the devices of the meshes that it names.
        devices, alone = (), SingleDeviceSharding(device.own)
        types = [_placed(x, alone if _is_on_host(x) else None) for x in types]
    else:
        devices = devices or device.alike(mesh.size)
        if len(devices) < mesh.size:
            raise NoSuchDevicesError(
                f"it is split over {mesh.size} devices, and of {device.kind} there "
                f"are {len(devices)}"
            )
        concrete = _mesh_like(mesh, devices)
        if manual := mesh.manual_axes:  # of a `jax.shard_map` around it
            program, types = _on_all_devices(program, types, concrete, manual)
        # What is not used either says for which devices it is.
        everywhere = NamedSharding(concrete, PartitionSpec())
        mark = jax.ShapeDtypeStruct((), np.dtype(bool), sharding=everywhere)
        types, mesh = [*_spread(types, concrete), mark], concrete.abstract_mesh
    unmarked = lambda *flat: program(*flat[: len(flat) - (not mesh.empty)])
    # A program may be asked for while another one is traced, for another mesh.
    with jax.sharding.use_abstract_mesh(mesh), jax.default_device(device.own):
        return jax.jit(unmarked, donate_argnums=donated).trace(*types), devices


# Meshes.


def meshes_in(program: AnyJaxpr) -> list[Mesh]:
    """The meshes of devices that are named in a program."""
    params = (value for eqn in equations(program) for value in eqn.params.values())
    return list(dict.fromkeys(mesh for value in params for mesh in _meshes(value)))


def _meshes(param: Any) -> Iterator[Mesh]:
    if type(param) in (tuple, list):
        for entry in param:
            yield from _meshes(entry)
    found = param.mesh if isinstance(param, NamedSharding) else param
    if isinstance(found, Mesh) and not found.empty:
        yield found


def _of_kind(device: PlannedDevice, meshes: Iterable[object]) -> _Devices:
    """The devices of the first mesh that is one of this kind; none if there is none."""
    for mesh in meshes:
        if isinstance(mesh, Mesh) and not mesh.empty:
            own, *_ = devices = tuple(mesh.devices.flat)
            if own.client is device.own.client and own.device_kind == device.kind:
                return devices
    return ()


def _mesh_like(abstract: AbstractMesh, devices: _Devices) -> Mesh:
    """A mesh of the first of some devices, without manual axes."""
    automatic = {AxisType.Manual: AxisType.Auto}
    types = tuple(automatic.get(kind, kind) for kind in abstract.axis_types)
    grid = np.array(devices[: abstract.size]).reshape(abstract.axis_sizes)
    return Mesh(grid, abstract.axis_names, axis_types=types)


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
    is_set = jax.sharding.get_abstract_mesh()
    mesh = next((mesh for mesh in _told_meshes(types) if not mesh.empty), is_set)
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def _told_meshes(types: list[Value]) -> list[Mesh | AbstractMesh]:
    return [aval.sharding.mesh for aval in types if _spec_of(aval) is not None]


def _spec_of(aval: Value) -> PartitionSpec | None:
    """How arrays of a type are split, if that is known."""
    sharding = aval.sharding if _is_type(aval) else None
    if not isinstance(sharding, NamedSharding):
        return None
    # Of automatic axes, a type knows nothing, unless it was made to tell.
    is_told = isinstance(aval, jax.ShapeDtypeStruct) or _is_explicit(sharding.mesh)
    return sharding.spec if is_told else None


def _spread(types: list[Value], mesh: Mesh) -> list[Value]:
    """Types with the devices of a mesh, as far as it is known which have what."""
    # Where axes are automatic, the compiler decides on arrays of which nothing is
    # known, as it does within a program.
    unknown = None if not _is_explicit(mesh) else PartitionSpec()
    specs = [unknown if (spec := _spec_of(aval)) is None else spec for aval in types]
    placed = lambda spec: None if spec is None else NamedSharding(mesh, spec)
    return [_placed(x, placed(spec)) for x, spec in zip(types, specs, strict=True)]


def _placed(aval: Value, sharding: Any) -> Value:
    """A type with the devices that arrays of it are on, if that is decided."""
    if not _is_type(aval):
        return aval
    if _is_on_host(aval) and sharding is not None:
        sharding = sharding.with_memory_kind("pinned_host")
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def _is_on_host(aval: Value) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


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
