"""The arguments of a map: which of their arrays are mapped, and along which axes."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._axes import AlongAxes, Axis, axes_tree, axis_sizes, common_length, resolve_axes
from .._effects import refuse_refs
from .._opening import argument_names
from .._partition import (
    as_arrays,
    describe,
    is_dynamic,
)

_DEFAULT_AXES = eqx.if_array(0)


def open_arguments(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    in_axes: Any,
    size: int | None = None,
) -> AlongAxes:
    """Takes the arguments of the call `f(*args, **kwargs)` of a map apart.

    Args:
        name: The name of the transform, for error messages.
        f: The function that is mapped.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        in_axes: As `eqx.filter_vmap` has it, see `_argument_axes`.
        size: How many rows there are, if that was asked for.
    """
    args, kwargs = as_arrays((args, kwargs))
    names = argument_names(f, args)
    for argument, value in (*zip(names, args, strict=True), *kwargs.items()):
        refuse_refs(name, value, argument)
    specs = _argument_axes(name, names, kwargs, axes_tree(in_axes))
    arguments = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    axes: dict[str, list[Axis]] = {}
    sizes = {} if size is None else {"axis_size": size}
    for argument, value in arguments:
        if _is_split(argument, value, kwargs, specs):
            continue
        spec, spec_name = specs[argument]
        found = resolve_axes(name, value, spec, tree_name=argument, spec_name=spec_name)
        axes[argument] = found
        sizes |= axis_sizes(value, argument, found)
    if not sizes:
        raise ValueError(_nothing_to_map(name, arguments))
    size = common_length(name, sizes)
    if "key" in kwargs and "key" not in axes:
        kwargs, axes["key"] = kwargs | {"key": _split(name, kwargs["key"], size)}, [0]
    all_axes = [axis for argument, _ in arguments for axis in axes[argument]]
    return AlongAxes.of((args, kwargs), all_axes, size)


def _is_split(
    argument: str, value: Any, kwargs: dict[str, Any], specs: dict[str, Any]
) -> bool:
    """Whether an argument is one key, of which every row is to get one of its own."""
    if argument != "key" or "key" not in kwargs or not is_dynamic(value):
        return False
    is_typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    is_one = value.ndim == 0 if is_typed else _is_legacy_key(value)
    return is_one and specs["key"][0] is not None


def _is_legacy_key(value: jax.Array) -> bool:
    return value.dtype == jnp.uint32 and value.ndim == 1


def _split(name: str, key: jax.Array, size: int) -> jax.Array:
    try:
        return jax.random.split(key, size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}: `key` must be a PRNG key, as `jax.random.key(0)` makes it, or an "
            f"array of one key for each row, not {describe(key)}."
        ) from error


def _argument_axes(
    name: str, names: list[str], kwargs: dict[str, Any], in_axes: Any
) -> dict[str, tuple[Any, str]]:
    """For every argument the prefix tree of its axes, and what that is called.

    A dictionary has the axes of arguments by name, a tuple or list those of the
    positional arguments in turn; arguments that neither mentions have the default.
    Anything else holds for all arguments.
    """
    known = [*names, *kwargs]
    if isinstance(in_axes, dict):
        if unknown := [repr(key) for key in in_axes if key not in known]:
            raise ValueError(
                f"{name}: in_axes names {', '.join(unknown)}, but f was called with "
                f"these arguments: {', '.join(known)}."
            )
        given = {key: (spec, f"in_axes[{key!r}]") for key, spec in in_axes.items()}
    elif isinstance(in_axes, tuple | list):
        if len(in_axes) != len(names):
            raise ValueError(
                f"{name}: in_axes has {len(in_axes)} entries, but f was called with "
                f"{len(names)} positional arguments: {', '.join(names)}. Give one "
                f"entry for each, one axis for all, or a dictionary of axes by name."
            )
        given = {
            key: (spec, f"in_axes[{i}]")
            for i, (key, spec) in enumerate(zip(names, in_axes, strict=True))
        }
    else:
        return dict.fromkeys(known, (in_axes, "in_axes"))
    return dict.fromkeys(known, (_DEFAULT_AXES, "in_axes")) | given


def _nothing_to_map(name: str, arguments: list[tuple[str, Any]]) -> str:
    listing = "\n".join(
        f"  {argument}: {eqx.tree_pformat(value)}" for argument, value in arguments
    )
    return (
        f"{name}: there is nothing to map over, as in_axes gives no array of these "
        f"arguments an axis:\n{listing or '  (none)'}\nMap an array, or call f itself."
    )
