"""`ShardMap`: `jax.shard_map`, as a PyTree around its function."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import equinox as eqx
import jax
from jax.sharding import PartitionSpec

from .._arrays import as_arrays, axes_tree, hashable_axes, is_dynamic, partition
from .._calls import (
    AbstractSameCall,
    KnownAs,
    NewR,
    OpenedCall,
    R,
    argument_names,
    call_names,
    call_traced,
    check_bool,
    compiled_when,
    explained,
    setting,
    value_in_words,
)
from .._types import PyTree
from ._mesh import (
    Resolved,
    SomeMesh,
    are_movable,
    check_even,
    check_mesh,
    check_replicated,
    current_mesh,
    free_axes,
    place,
    quoted,
    resolve_specs,
)


def _can_be_moved(transform: "ShardMap[Any]", *args: PyTree) -> bool:
    return are_movable(transform.mesh or current_mesh(), (transform.f, args))


def _as_axis_names(names: Any) -> frozenset[Any] | None:
    try:
        return None if names is None else frozenset(names)
    except TypeError:
        raise TypeError(
            f"ShardMap: `axis_names` must be a set of names of axes, not "
            f"{value_in_words(names)}."
        ) from None


@final
class ShardMap(AbstractSameCall[..., R]):
    """Runs a function once on every device of a mesh, each on its parts of the arrays.

    Like `jax.shard_map`, with leaves of any kind: those that are not arrays reach `f`
    unchanged, and come back as `f` returns them. The arrays of `f` itself are whole on
    every device; their gradients are summed over the devices. Arrays that are elsewhere
    are moved to the mesh, unless they are being traced. It is compiled.

    Args:
        f: The function. In it, `jax.lax.psum(x, "name")` and the other collectives are
            over the devices along the axis of the mesh with this name.
        mesh: A `jax.sharding.Mesh`. By default that of `jax.set_mesh`.
        in_specs: How the arguments are split: one `jax.sharding.PartitionSpec` for all
            of them, or a tuple with one for each, or with trees that are prefixes of
            the arguments. An entry of it splits the axis in its place over the axes of
            the mesh that it names; `PartitionSpec()` is for arrays that are whole
            everywhere.
        out_specs: How the parts that the devices return make up the results: likewise,
            a prefix of what `f` returns.
        axis_names: The axes of the mesh that specifications and collectives use. The
            compiler handles the others. By default all of them.
        check_vma: Whether to check that results are the same along each axis of the
            mesh that `out_specs` do not name for them. If JAX cannot know it, pass
            `False` and make sure yourself.

    Raises:
        TypeError: `mesh` is not a mesh; when called, a specification is not a
            specification, or a jaxtyping annotation of `f`, which describes the parts,
            is violated.
        ValueError: `axis_names` has an axis that the mesh does not have; when called,
            there is no mesh, a specification does not fit its array, the devices do
            not divide the length of an axis, or results differ that must be the same.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((len(jax.devices()),), ("x",))
        >>> @el.ShardMap(mesh=mesh, in_specs=(P("x"), P()), out_specs=(P(), P()))
        ... def total(part, unit):
        ...     return jax.lax.psum(jnp.sum(part), "x"), unit
        >>> total(jnp.ones(3 * mesh.size), "m")[1]
        'm'

    References:
        [`jax.shard_map`](https://docs.jax.dev/en/latest/notebooks/shard_map.html).
    """

    f: Callable[..., R]
    mesh: SomeMesh | None = setting(default=None)
    in_specs: PyTree = setting(converter=hashable_axes)
    out_specs: PyTree = setting(converter=hashable_axes)
    axis_names: frozenset[Any] | None = setting(default=None, converter=_as_axis_names)
    check_vma: bool = setting(default=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[..., NewR], /) -> "ShardMap[NewR]": ...

    def __check_init__(self) -> None:
        check_mesh("ShardMap", self.mesh)
        check_bool("ShardMap", "check_vma", self.check_vma)

    @compiled_when(_can_be_moved)
    def __call__(self, *args: PyTree) -> R:
        """Runs `f` on every device.

        Args:
            *args: The arguments of `f`, whole. Each device gets its part of them.

        Returns:
            What `f` returns, put together from the parts of all devices.

        Raises:
            TypeError: If a specification is not a `PartitionSpec`.
            ValueError: If there is no mesh, or if a specification does not fit an
                array, the mesh, or what is known to be the same on all devices.
        """
        mesh = self._mesh()
        axes = self._axes(mesh)
        args = as_arrays(args)
        resolved = self._resolve(args, axes)
        check_even(resolved, mesh)
        tree = (self.f, args)
        leaves, rest = partition(tree)
        own = len(leaves) - len(resolved)
        in_specs = [PartitionSpec()] * own + [spec for _, spec in resolved.values()]
        if axes == set(mesh.axis_names):
            leaves = place(leaves, mesh, in_specs)
        names = call_names(self.f, args, {}, rest.taken)
        on_device = OpenedCall(
            rest.join,
            _call_with,
            functools.partial(self._take, axes),
            KnownAs("shard_map", self.f, names),
        )
        run = jax.shard_map(
            on_device.on_arrays,
            mesh=mesh,
            in_specs=(in_specs,),
            out_specs=axes_tree(self.out_specs),
            axis_names=axes,
            check_vma=self.check_vma,
        )
        return eqx.combine(jax.jit(run)(leaves), on_device.kept)

    def _mesh(self) -> SomeMesh:
        mesh = current_mesh() if self.mesh is None else self.mesh
        if mesh is None:
            raise ValueError(
                "ShardMap: there is no mesh. Pass `mesh=`, which `jax.make_mesh` "
                "makes, or call it within `jax.set_mesh`."
            )
        return mesh

    def _axes(self, mesh: SomeMesh) -> frozenset[Any]:
        """The axes of the mesh that are mapped, of those that are not mapped yet."""
        free = free_axes(mesh)
        axes = frozenset(free) if self.axis_names is None else self.axis_names
        if unknown := axes - set(free):
            raise ValueError(
                f"ShardMap: axis_names has {quoted(unknown)}, but the axes of the mesh "
                f"that can be mapped here are {quoted(free)}."
            )
        return axes

    def _resolve(self, args: tuple[PyTree, ...], axes: frozenset[Any]) -> Resolved:
        """How the arrays among the arguments are split."""
        specs = axes_tree(self.in_specs)
        each = isinstance(specs, tuple | list)
        if each and len(specs) != len(args):
            raise ValueError(
                f"ShardMap: in_specs has {len(specs)} entries, but f was called with "
                f"{len(args)} arguments. Give one PartitionSpec for each, or one for "
                f"all."
            )
        resolved: Resolved = {}
        for i, name in enumerate(argument_names(self.f, args)):
            spec, spec_name = (
                (specs[i], f"in_specs[{i}]") if each else (specs, "in_specs")
            )
            names = dict(tree_name=name, spec_name=spec_name)
            resolved |= resolve_specs(args[i], spec, axes, **names)
        return resolved

    def _take(self, axes: frozenset[Any], out: PyTree) -> tuple[PyTree, PyTree]:
        """The arrays that `f` returned on one device, and the rest."""
        out, specs = as_arrays(out), axes_tree(self.out_specs)
        names = dict(tree_name="out", spec_name="out_specs")
        check_replicated(resolve_specs(out, specs, axes, **names), axes)
        return eqx.partition(out, is_dynamic)


def _call_with(f: Callable[..., PyTree], args: tuple[PyTree, ...]) -> PyTree:
    with explained("ShardMap", "f on the part of one device,", {"args": args}):
        return call_traced("ShardMap", f, args, {})
