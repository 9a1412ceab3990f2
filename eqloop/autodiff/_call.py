"""Opens a call, to a function of the arrays that it is differentiated by.

Every transform here differentiates `Call.run`, which is a function of a list of arrays,
and puts what comes of it back into trees. `None` stands in these trees for the leaves
that have no derivative.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import (
    Arrays,
    Rest,
    as_array,
    as_arrays,
    describe,
    is_dynamic,
    is_inexact,
    is_inexact_scalar,
    is_scalar,
    partition,
    paths,
    pick,
)
from .._calls import OpenedCall, enforce_annotations
from .._types import PyTree, Value
from ._argnums import Argnum, find_arguments


@dataclasses.dataclass
class Call:
    """A call `f(*args, **kwargs)`.

    Attributes:
        owner: The name of the transform, for error messages.
        places: Where those arguments are that are differentiated.
        several: Whether the results are to be tuples, with an entry for each of them.
        has_aux: Whether `f` returns a pair of its value and of anything else.
        arrays: The arrays to differentiate with respect to.
        names: The path of each of them.
        selected: All else that is in these arguments.
        checks: Called with the value of `f` before it is differentiated.
    """

    owner: str
    f: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, Any]
    places: tuple[Argnum, ...]
    several: bool
    has_aux: bool
    arrays: list[jax.Array]
    names: list[str]
    selected: Rest
    checks: list[Callable[["Call", PyTree], None]]
    opened: OpenedCall[tuple[Arrays, Arrays], "_Returned"] = dataclasses.field(
        init=False
    )

    def __post_init__(self) -> None:
        self.opened = OpenedCall(self.selected.join, self._call, self._take)

    def run(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        """The inexact arrays of the value of `f`, and the other arrays it returns."""
        return self.opened.on_arrays(arrays)

    def push(self, direction: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """What `run` returns, with the tangents of the value in between."""
        return jax.jvp(self.run, (self.arrays,), (direction,), has_aux=True)

    def gradient(self, leaves: Arrays) -> PyTree:
        """A tree as that of the differentiated arguments, with these for the arrays."""
        arguments = _blank(self.selected).join(leaves)
        return tuple(arguments) if self.several else arguments[0]

    def jacobian(self, leaves: list[Value]) -> PyTree:
        """A tree as that of the value, with these in place of its inexact arrays."""
        return self.opened.kept.like_value(leaves)

    def close(self, outs: Arrays, others: Arrays) -> tuple[PyTree, PyTree]:
        """The value of `f`, and what else it returned, from their arrays."""
        return self.opened.kept.join(outs, others)

    def _call(self, *values: PyTree) -> PyTree:
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, value in zip(self.places, values, strict=True):
            (args if isinstance(place, int) else kwargs)[place] = value  # pyright: ignore
        return enforce_annotations(self.f)(*args, **kwargs)

    def _take(self, out: PyTree) -> tuple[tuple[Arrays, Arrays], "_Returned"]:
        value, aux = self._pair(out) if self.has_aux else (out, None)
        value, aux = as_arrays(value, scalars=True), as_arrays(aux)
        for check in self.checks:
            check(self, value)
        return _Returned.of(value, aux)

    def _pair(self, out: PyTree) -> PyTree:
        if not isinstance(out, tuple | list) or len(out) != 2:
            raise TypeError(
                f"{self.owner}: with `has_aux=True` f must return a pair `(value, aux)`"
                f", but it returned {eqx.tree_pformat(out)}."
            )
        return out


@dataclasses.dataclass(frozen=True)
class _Returned:
    """What `f` returned, without its arrays.

    Attributes:
        value: The tree of the value, from which what has a derivative was taken first.
        rest: The leaves of it that have none, and what is beside it.
    """

    value: Rest
    rest: Rest

    @classmethod
    def of(
        cls, value: PyTree, aux: PyTree
    ) -> tuple[tuple[Arrays, Arrays], "_Returned"]:
        outs, left = partition(value, is_differentiable)
        others, rest = partition((left.leaves, aux))
        return (outs, others), cls(_blank(left), rest)

    def join(self, outs: Arrays, others: Arrays) -> tuple[PyTree, PyTree]:
        leaves, aux = self.rest.join(others)
        return dataclasses.replace(self.value, leaves=leaves).join(outs), aux

    def like_value(self, leaves: list[Value]) -> PyTree:
        return self.value.join(leaves)


def open_derivative(
    owner: str,
    f: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
    argnums: PyTree,
    has_aux: bool,
    check: Callable[[Call, PyTree], None],
) -> Call:
    """Opens the call `f(*args, **kwargs)`."""
    found = find_arguments(owner, f, args, kwargs, argnums)
    arguments = [
        _as_argument(owner, name, args[at] if isinstance(at, int) else kwargs[at])
        for name, at in found.items()
    ]
    arrays, selected = partition(arguments, is_differentiable)
    if not arrays:
        _check_nothing(owner, dict(zip(found, arguments, strict=True)))
    names = [
        path
        for name, argument in zip(found, arguments, strict=True)
        for path in paths(argument, name)
    ]
    return Call(
        owner=owner,
        f=f,
        args=args,
        kwargs=kwargs,
        places=tuple(found.values()),
        several=isinstance(argnums, tuple),
        has_aux=has_aux,
        arrays=list(map(as_array, arrays)),
        names=pick(names, selected.taken),
        selected=selected,
        checks=[check],
    )


def is_differentiable(leaf: object) -> bool:
    """Whether a leaf is an array that has a derivative."""
    return is_dynamic(leaf) and is_inexact(leaf)


def _as_argument(owner: str, name: str, argument: PyTree) -> PyTree:
    # In a tree, a Python number is a setting; alone, `jax.grad` differentiates it.
    if is_inexact_scalar(argument):
        return jnp.asarray(argument)
    is_number = is_scalar(argument) or is_dynamic(argument)
    if is_number and not is_differentiable(argument):
        raise TypeError(
            f"{owner}: cannot differentiate with respect to {name}, which is "
            f"{describe(argument)}: only floating-point and complex arrays have "
            f"derivatives. Choose another argument with `argnums`, or make it one."
        )
    return argument


def _check_nothing(owner: str, arguments: dict[str, Any]) -> None:
    # A layer without parameters is fine, but a tree of numbers is likely a mistake.
    leaves = jax.tree.leaves(list(arguments.values()))
    if any(is_dynamic(leaf) or is_scalar(leaf) for leaf in leaves):
        listing = "\n".join(
            f"  {name}: {eqx.tree_pformat(value)}" for name, value in arguments.items()
        )
        raise TypeError(
            f"{owner}: there is nothing to differentiate, as none of these leaves is a "
            f"floating-point or complex array:\n{listing}\nTurn numbers that are to "
            f"be differentiated into arrays, with `jnp.asarray`."
        )


def _blank(rest: Rest) -> Rest:
    return dataclasses.replace(rest, leaves=(None,) * len(rest.leaves))
