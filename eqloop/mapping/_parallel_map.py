"""`ParallelMap`: `jax.vmap` with its rows on the devices of a mesh."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, final

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from .._arrays import hashable_axes
from .._calls import NewP, NewR, P, R, compiled_when, setting, value_in_words
from .._types import PyTree, Value
from ..checkpointing import Budget
from ._abstract_map import AbstractAxesMap
from ._mesh import SomeMesh, are_movable, check_mesh, current_mesh, free_axes, quoted
from ._open_map import as_chunk_size, open_arguments
from ._split_rows import SplitRows


def _as_devices(devices: Iterable[Any] | None) -> tuple[Any, ...] | None:
    if devices is None:
        return None
    devices = tuple(devices) if isinstance(devices, Iterable) else (devices,)
    for device in devices:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"ParallelMap: `devices` must be a sequence of devices from "
                f"`jax.devices()`, and {device!r}, of type {type(device).__name__}, "
                f"is none."
            )
    if not devices:
        raise ValueError("ParallelMap: `devices` is empty. Leave it out to use all.")
    if len(set(devices)) < len(devices):
        listing = ", ".join(map(str, devices))
        raise ValueError(f"ParallelMap: `devices` has a device twice: {listing}.")
    return devices


def _as_share_size(size: SupportsIndex | Budget | None) -> int | Budget | None:
    if size is None:
        return None
    what = "the number of rows that a device maps at once, or a `Budget`"
    return as_chunk_size("ParallelMap", what, size)


def _can_move(
    transform: "ParallelMap[..., Any]", *args: PyTree, **kwargs: PyTree
) -> bool:
    return are_movable(transform._mesh(), (transform.f, args, kwargs))


@final
class ParallelMap(AbstractAxesMap[P, R]):
    """Vectorises a function over rows that are split over many devices.

    Like `equinox.filter_vmap`, with the rows of the arguments split evenly over the
    devices along one axis of a mesh. The results are split in the same way: each row
    stays where it was computed. Everything else, including the arrays of `f`, is whole
    on every device, and its gradients are summed over the devices. Arrays that are
    elsewhere are moved, unless they are being traced. To make an ensemble on the
    devices where it will run, write `ParallelMap(make)(keys)`.

    The number of rows need not be a multiple of the number of devices. Devices that
    would idle evaluate the last row once more, which counts once in the results and
    their derivatives, and `f` is never called with rows that are not in its arguments.
    The results are then on all of the devices.

    In `f`, `jax.lax.psum(x, axis_name)` and the other collectives are over all rows, as
    under `jax.vmap`, for any number of rows on a device. With one row on each device,
    they are collectives of the devices, as under `jax.pmap`. With several, there is one
    program for all rows, which XLA splits; where XLA does not know how, as for matrix
    factorisations, it gathers the rows. Collectives need all rows at once, and equally
    many on each device.

    Args:
        mesh: A `jax.sharding.Mesh` to run on. By default that of `jax.set_mesh`; if
            there is none either, all devices, those of all processes.
        devices: The devices to run on, in place of a mesh.
        axis_name: The axis of the mesh, if it has several; the others are left to the
            compiler. It is also what the collectives in `f` call the rows. Without a
            mesh, it is `"rows"` by default.
        chunk_size: How many rows a device maps at once, as for
            [`ChunkedVmap`][eqloop.ChunkedVmap]. By default all that it has.

    Raises:
        TypeError: `mesh` is not a mesh, or one of `devices` is not a device; when
            called, as `ChunkedVmap`.
        ValueError: Both `mesh` and `devices` are given, or no devices, or one twice;
            when called, the mesh has no such axis, or several and none is named, or a
            map around this one has split it already; `f` has collectives, and the
            devices do not divide the number of rows, or do not map all of theirs at
            once; or as `ChunkedVmap`.

    Examples:
        An ensemble: each member is made, and then trained, on a device of its own.

        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> make = lambda key: eqx.nn.Linear(3, 2, key=key)
        >>> keys = jax.random.split(jax.random.key(0), len(jax.devices()))
        >>> ensemble = el.ParallelMap(make)(keys)
        >>> len(ensemble.weight.sharding.device_set) == len(jax.devices())
        True
        >>> predict = lambda member, x: member(x)
        >>> axes = {"x": None}
        >>> y = el.ParallelMap(predict, in_axes=axes)(ensemble, jnp.ones(3))
        >>> y.shape == (len(jax.devices()), 2)
        True

    References:
        [`jax.pmap`](https://docs.jax.dev/en/latest/_autosummary/jax.pmap.html), which
        maps one row a device.
    """

    f: Callable[P, R]
    mesh: SomeMesh | None = setting(default=None)
    devices: Sequence[Value] | None = setting(default=None, converter=_as_devices)
    axis_name: str | None = setting(default=None)
    in_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    out_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    chunk_size: int | Budget | None = setting(default=None, converter=_as_share_size)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "ParallelMap[NewP, NewR]": ...

    def __check_init__(self) -> None:
        if not isinstance(self.axis_name, str | None):
            raise TypeError(
                f"ParallelMap: `axis_name` must be a string, the name of an axis of "
                f"the mesh, or None, not {value_in_words(self.axis_name)}."
            )
        check_mesh("ParallelMap", self.mesh)
        if self.devices is not None and self.mesh is not None:
            raise ValueError(
                "ParallelMap: give a mesh or devices, not both. A mesh has its "
                "devices: `jax.make_mesh(..., devices=...)`."
            )

    @compiled_when(_can_move)
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f` on every row of its arguments, each device on its share of them.

        Args:
            *args: The arguments of `f`, with their rows along the axes of `in_axes`.
            **kwargs: Those that are given by keyword: along axis 0, unless `in_axes`
                names them.

        Returns:
            What `f` returns, with its arrays stacked along the axes of `out_axes`: the
            rows are on the devices that computed them.

        Raises:
            TypeError: If an axis is neither an int nor `None`, or a jaxtyping
                annotation of `f` is violated.
            ValueError: If nothing is mapped, if axes do not fit or differ in length, or
                if `axis_name` is not a free axis of the mesh.
        """
        mesh = self._mesh()
        axis = self._axis(mesh)
        arguments = open_arguments(
            "ParallelMap", self.f, args, kwargs, in_axes=self.in_axes
        )
        call = SplitRows(
            self.f,
            arguments,
            self.in_axes,
            self.out_axes,
            self.chunk_size,
            mesh,
            axis,
        )
        return call.run()

    def _mesh(self) -> SomeMesh:
        if self.mesh is not None:
            return self.mesh
        current = None if self.devices else current_mesh()
        if current is not None:
            return current
        devices = np.array(self.devices or jax.devices())
        return Mesh(devices, ("rows" if self.axis_name is None else self.axis_name,))

    def _axis(self, mesh: SomeMesh) -> Hashable:
        """The axis of the mesh that the rows are split over."""
        if self.axis_name is not None and self.axis_name not in mesh.axis_names:
            raise ValueError(
                f"ParallelMap: axis_name={self.axis_name!r} is not an axis of the "
                f"mesh, whose axes are {quoted(mesh.axis_names)}."
            )
        free = free_axes(mesh)
        choice = [axis for axis in free if self.axis_name in (None, axis)]
        if not choice:
            raise ValueError(
                "ParallelMap: a map around this one has split its rows over the same "
                "devices. Use `Vmap` or `ChunkedVmap` here, or another axis of the "
                "mesh."
            )
        if len(choice) > 1:
            raise ValueError(
                f"ParallelMap: the mesh has the axes {quoted(free)}. Pass `axis_name=`"
                f" to say over which of them to split the rows."
            )
        (axis,) = choice
        return axis
