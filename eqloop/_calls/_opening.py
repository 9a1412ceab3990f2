"""Opens a call: from a function of any trees to a function of arrays, and back.

Users write functions of PyTrees whose leaves may be anything; JAX transforms functions
of arrays. So every transform starts by taking the arrays out of its arguments, and
hands JAX `OpenedCall.on_arrays`. That puts the arrays back where they were, calls the
user's function, and takes the arrays out of the result. It remembers the rest of the
result, from which the transform builds what it returns.

Transforms differ in which leaves they take and in what they remember: a map has axes, a
loop has a carry that must keep its type, a derivative has the arguments it is taken by.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax.experimental.hijax import HiType

from .._arrays import (
    Axis,
    Rest,
    as_arrays,
    is_weak,
    partition,
    paths,
    pick,
    resolve_axes,
    with_weak_types,
)
from .._types import PyTree, Value
from ._typecheck import enforce_annotations

_Arrays = TypeVar("_Arrays")
_Kept = TypeVar("_Kept")


class OpenedCall(Generic[_Arrays, _Kept]):
    """A call of a function of trees, to be made with any arrays in their places.

    Attributes:
        has_returned: Whether the user's function has been called and has returned.
        has_kept: Whether `kept` is there: once JAX has traced `on_arrays`, so that
            `call.kept.join(run(arrays))` reads it too early.
        kept: What it returned besides arrays.
    """

    has_returned: bool = False
    has_kept: bool = False
    kept: _Kept

    def __init__(
        self,
        join: Callable[..., Iterable[Value]],
        f: Callable[..., PyTree],
        take: Callable[[PyTree], tuple[_Arrays, _Kept]],
    ) -> None:
        """Puts the three steps together.

        Args:
            join: Turns lists of arrays into the arguments of `f`; often a `Rest.join`.
            f: The function.
            take: Splits what `f` returns into arrays, and what is to be kept.
        """
        self._join = join
        self._f = f
        self._take = take

    def on_arrays(self, *arrays: Value) -> _Arrays:
        """Calls `f` on the trees that hold these arrays, and gives those it returns."""
        out = self._f(*self._join(*arrays))
        self.has_returned = True
        taken, self.kept = self._take(out)
        self.has_kept = True
        return taken


def open_call(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, Any],
    static: Container[int] = (),
) -> tuple[OpenedCall[list[jax.Array], Rest], list[jax.Array]]:
    """Opens `f(*args, **kwargs)` for a transform that does the same to all arrays.

    Args:
        f: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        static: The positions of arguments that are passed as they are, arrays and all.

    Returns:
        The call, which keeps the result without its arrays; and the arrays of `f` and
        of the arguments.

    >>> f = lambda x, name: {name: x + 1}
    >>> call, arrays = open_call(f, (jnp.zeros(()), "y"), {})
    >>> call.on_arrays(arrays), call.kept.join(["its place"])
    ([Array(1., dtype=float32)], {'y': 'its place'})
    """
    dynamic = [None if i in static else arg for i, arg in enumerate(args)]
    arrays, rest = partition(as_arrays((f, dynamic, kwargs)))

    def call(f: Any, dynamic: Sequence[Value], kwargs: Mapping[str, Any]) -> PyTree:
        whole = [args[i] if i in static else arg for i, arg in enumerate(dynamic)]
        return enforce_annotations(f)(*whole, **kwargs)

    return OpenedCall(rest.join, call, lambda out: partition(as_arrays(out))), arrays


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the function of a loop or a map returned, without its arrays.

    Attributes:
        axes: For each of the arrays, the axis along which it is stacked; `None` if it
            is the same each time and not stacked.
        weak: Which of the arrays are weakly typed.
        names: The path of each of them.
        rest: All else.
    """

    axes: tuple[Axis, ...]
    weak: tuple[bool, ...]
    names: tuple[str, ...]
    rest: Rest

    @classmethod
    def of(
        cls,
        owner: str,
        tree: PyTree,
        out_axes: PyTree,
        *,
        name: str,
        scalars: bool = False,
    ) -> tuple[list[Value], Self]:
        """The arrays of a tree, and what else there is to it.

        Args:
            owner: The name of the transform, for error messages.
            tree: What a function returned.
            out_axes: A prefix tree of axes for it.
            name: What it is called in error messages.
            scalars: Whether Python numbers are to be arrays.

        Raises:
            TypeError: If a leaf is a traced value that is no array.
        """
        _check_arrays(owner, tree, name)
        tree = as_arrays(tree, scalars=scalars)
        axes = resolve_axes(
            owner, tree, out_axes, tree_name=name, spec_name="out_axes", new=True
        )
        arrays, rest = partition(tree)
        axes, names = pick(axes, rest.taken), pick(paths(tree, name), rest.taken)
        return arrays, cls(tuple(axes), tuple(map(is_weak, arrays)), tuple(names), rest)

    @property
    def same(self) -> list[bool]:
        """Which of the arrays are the same each time."""
        return [axis is None for axis in self.axes]

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """The axes of those that are not."""
        return tuple(axis for axis in self.axes if axis is not None)

    def check_same(self, owner: str, varying: Sequence[bool], why: str) -> None:
        """Checks that what has no axis really is the same each time.

        Args:
            owner: The name of the transform, for error messages.
            varying: Which of the arrays are not.
            why: The reason, as an error message goes on from "gives None for".

        Raises:
            ValueError: If it is not.
        """
        wrong = [
            f"  {name}"
            for name, same, varies in zip(self.names, self.same, varying, strict=True)
            if same and varies
        ]
        if wrong:
            listing = "\n".join(wrong)
            raise ValueError(
                f"{owner}: out_axes gives None for {why}:\n{listing}\nGive them an "
                f"int, the axis along which they are to be stacked."
            )

    def join(self, stacked: Sequence[Value], same: Sequence[Value]) -> PyTree:
        """The tree, with arrays that were stacked and those that are the same."""
        stacks, constants = iter(stacked), iter(same)
        arrays = [next(constants if axis is None else stacks) for axis in self.axes]
        return self.rest.join(with_weak_types(arrays, self.weak))

    def join_stacked(self, stacked: Sequence[Value], same: Sequence[Value]) -> PyTree:
        """As `join`, for arrays that were stacked along their leading axes."""
        pairs = zip(stacked, self.stacked_axes, strict=True)
        return self.join([jnp.moveaxis(y, 0, axis) for y, axis in pairs], same)


# What the arguments of a call are called.

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def parameters_of(f: Callable[..., PyTree]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function; none for a built-in function that hides them.

    >>> list(parameters_of(eqx.Partial(lambda a, b, *, c: a, 1)))
    ['b', 'c']
    """
    if isinstance(f, eqx.Partial):
        f = functools.partial(f.func, *f.args, **f.keywords)
    try:
        return inspect.signature(f).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(f: Callable[..., PyTree]) -> list[str]:
    """The names of the parameters that may be given by position.

    >>> positional_names(lambda a, b=1, *rest, c: a)
    ['a', 'b']
    """
    return [p.name for p in parameters_of(f).values() if p.kind in _POSITIONAL]


def argument_names(f: Callable[..., PyTree], args: Sequence[PyTree]) -> list[str]:
    """What positional arguments are called, as far as they have names.

    >>> argument_names(lambda a, *rest: a, [1, 2])
    ['a', 'args[1]']
    """
    names = positional_names(f)
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(len(args))]


def _check_arrays(owner: str, tree: PyTree, name: str) -> None:
    """Checks that no traced value of a `hijax` type, which has no rows, is returned."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    is_traced = lambda x: isinstance(x, jax.core.Tracer)
    wrong = [is_traced(x) and isinstance(jax.typeof(x), HiType) for x in leaves]
    if not any(wrong):
        return
    pairs = zip(pick(paths(tree, name), wrong), pick(leaves, wrong), strict=True)
    raise TypeError(
        f"{owner}: only arrays can be stacked, but f returned values of these types "
        "of `hijax`:\n"
        + "\n".join(f"  {path}: {jax.typeof(leaf)}" for path, leaf in pairs)
        + "\nReturn the arrays that they are made of, and make them again outside."
    )
