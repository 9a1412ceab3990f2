"""Opens a call: from a function of any trees to a function of arrays, and back.

Users write functions of PyTrees whose leaves may be anything; JAX transforms functions
of arrays. So every transform starts by taking the arrays out of its arguments, and
hands JAX `OpenedCall.on_arrays`. That puts the arrays back where they were, calls the
user's function, and takes the arrays out of the result. It remembers the rest of the
result, from which the transform builds what it returns.

Transforms differ in which leaves they take and in what they remember: a map has axes, a
loop has a carry that must keep its type, a derivative has the arguments it is taken by.

The functions that users hand to a transform are called through `enforce_annotations`,
so that their jaxtyping annotations hold although they were not decorated: jaxtyping and
beartype check them. It happens while tracing; compiled code checks nothing.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jaxtyping
from jax.experimental.hijax import HiType
from jaxtyping import jaxtyped

from .._arrays import (
    Axis,
    Rest,
    as_arrays,
    is_inexact,
    is_inexact_scalar,
    is_scalar,
    is_typed,
    is_weak,
    listing,
    partition,
    paths,
    pick,
    resolve_axes,
    with_weak_types,
)
from .._signatures import check_fits
from .._types import PyTree, Value
from ._arguments import check_takes
from ._changes import unchanged
from ._names import KnownAs, argument_names, call_names

_Arrays = TypeVar("_Arrays")
_Kept = TypeVar("_Kept")


class OpenedCall(Generic[_Arrays, _Kept]):
    """A call of a function of trees, to be made with any arrays in their places.

    Attributes:
        has_returned: Whether the user's function has been called and has returned.
        known_as: What JAX is to call it in its errors.
        has_kept: Whether `kept` is there: once JAX has traced `on_arrays`, so that
            `call.kept.join(run(arrays))` reads it too early.
    """

    has_returned: bool = False
    has_kept: bool = False
    kept: _Kept

    def __init__(
        self,
        join: Callable[..., Iterable[Value]],
        f: Callable[..., PyTree],
        take: Callable[[PyTree], tuple[_Arrays, _Kept]],
        known_as: KnownAs | None = None,
    ) -> None:
        """Puts the three steps together."""
        self._join = join
        self._f = f
        self._take = take
        self.known_as = known_as

    @property
    def on_arrays(self) -> Callable[..., _Arrays]:
        """Calls `f` on the trees that hold some arrays, and gives those it returns."""
        return self.known_as.name(self._run) if self.known_as else self._run

    def _run(self, *arrays: Value) -> _Arrays:
        out = self._f(*self._join(*arrays))
        self.has_returned = True
        taken, self.kept = self._take(out)
        self.has_kept = True
        return taken


def open_call(
    owner: str,
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, Any],
    static: Container[int] = (),
    *,
    kind: str = "jit",
) -> tuple[OpenedCall[list[jax.Array], Rest], list[jax.Array]]:
    """Opens `f(*args, **kwargs)` for a transform that does the same to all arrays.

    >>> f = lambda x, name: {name: x + 1}
    >>> call, arrays = open_call("Fit", f, (jnp.zeros(()), "y"), {})
    >>> call.on_arrays(arrays), call.kept.join(["its place"])
    ([Array(1., dtype=float32)], {'y': 'its place'})
    """
    # Arguments at the `static` positions are passed as they are, arrays and all.
    dynamic = [None if i in static else arg for i, arg in enumerate(args)]
    arrays, rest = partition(as_arrays((f, dynamic, kwargs)))

    def call(f: Any, dynamic: Sequence[Value], kwargs: Mapping[str, Any]) -> PyTree:
        whole = [args[i] if i in static else arg for i, arg in enumerate(dynamic)]
        return call_traced(owner, f, whole, kwargs)

    def take(out: PyTree) -> tuple[list[jax.Array], Rest]:
        return partition(as_arrays(out))

    names = call_names(f, dynamic, kwargs, rest.taken)
    return OpenedCall(rest.join, call, take, KnownAs(kind, f, names)), arrays


def open_gradient(*parts: PyTree) -> tuple[list[Value], Rest]:
    """Takes apart the arguments of a call whose gradient is planned.

    >>> taken, rest = open_gradient(jnp.zeros(2), 0.5)
    >>> taken, rest.join(["its place"])
    ([Array([0., 0.], dtype=float32)], ('its place', 0.5))
    >>> open_gradient("name", 0.5)[0]
    [Array(0.5, dtype=float32, weak_type=True)]
    """
    # Numbers of Python stay what they are, as in the call. If nothing else can be
    # differentiated, they are taken for arrays, as `jax.grad` takes them.
    taken, rest = partition(parts, is_typed)
    if any(map(is_inexact, taken)):
        return taken, rest
    as_traced = lambda leaf: jnp.asarray(leaf) if is_inexact_scalar(leaf) else leaf
    return partition(jax.tree.map(as_traced, parts), is_typed)


def floats_left(
    f: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """The floats of Python by which `jax.grad` differentiates, and no plan does.

    >>> floats_left(lambda w, x: w * x, (0.5, jnp.ones(2)), {})
    ('w',)
    """
    if not any(map(is_inexact, partition((f, args, kwargs), is_typed)[0])):
        return ()
    found: list[str] = []
    for name, argument in zip(argument_names(f, args), args, strict=True):
        leaves = jax.tree.leaves(argument, is_leaf=lambda x: x is None)
        # A tree with a function in it, a module, is nothing that `jax.grad` takes.
        if all(leaf is None or is_scalar(leaf) or is_typed(leaf) for leaf in leaves):
            found += pick(paths(argument, name), list(map(is_inexact_scalar, leaves)))
    return tuple(found)


def says_floats_left(names: Sequence[str]) -> list[str]:
    """A line for the end of a plan that leaves some floats of Python out."""
    numbers = "a Python number" if len(names) == 1 else "Python numbers"
    pass_arrays = "`jax.grad` would; pass arrays, to plan for that"
    line = f"not differentiated: {', '.join(names)} ({numbers}; {pass_arrays})"
    return [line] if names else []


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What the function of a loop or a map returned, without its arrays.

    Attributes:
        axes: For each of the arrays, the axis along which it is stacked; `None` if it
            is the same each time and not stacked.
        weak: Which of the arrays are weakly typed.
        names: The path of each of them.
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
        """The arrays of a tree, and what else there is to it."""
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
        """Checks that what has no axis really is the same each time."""
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


def _check_arrays(owner: str, tree: PyTree, name: str) -> None:
    """Checks that no traced value of a `hijax` type, which has no rows, is returned."""
    is_traced = lambda x: isinstance(x, jax.core.Tracer)
    is_wrong = lambda x: is_traced(x) and isinstance(jax.typeof(x), HiType)
    if found := listing(tree, name, is_wrong, lambda x: str(jax.typeof(x))):
        raise TypeError(
            f"{owner}: only arrays can be stacked, but f returned values of these "
            f"types of `hijax`:\n{found}\nReturn the arrays that they are made of, "
            f"and make them again outside."
        )


# Types of the functions of users.


def enforce_annotations(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `f` and enforces its jaxtyping annotations.

    >>> import jax.numpy as jnp
    >>> from jaxtyping import Array, Float
    >>> def double(x: Float[Array, "n"]) -> Float[Array, "n"]:
    ...     return jnp.concatenate([x, x])
    >>> enforce_annotations(double)(jnp.ones(3))
    Traceback (most recent call last):
    jaxtyping.TypeCheckError: Type-check error whilst checking the return value ...
    """
    # In one call the names of axes bind across arguments and results. Annotations that
    # hold no jaxtyping type are not enforced: a `float` in a signature often is an
    # array by the time that it is traced. Those that cannot be resolved are not either.
    if isinstance(f, types.FunctionType):
        return _enforced(f)
    if isinstance(f, functools.partial | eqx.Partial):
        inner = enforce_annotations(f.func)
        if inner is f.func:
            return f
        return functools.partial(inner, *f.args, **f.keywords)
    bound_to = getattr(f, "__self__", None)
    function = getattr(f, "__func__", None)
    if bound_to is None or function is None:
        bound_to, function = f, type(f).__call__
    if not isinstance(function, types.FunctionType):
        return f
    inner = _enforced(function)
    return f if inner is function else functools.partial(inner, bound_to)


@contextlib.contextmanager
def explained(owner: str, what: str, shown: Mapping[str, PyTree]) -> Iterator[None]:
    """Adds to the errors of a user's code that it was being traced, and with what."""
    # Large trees take long to print: that is done for an error alone. What the user's
    # code has changed by then is shown as it was given.
    leaves, structure = jax.tree.flatten(list(shown.values()))
    try:
        yield
    except Exception as error:
        trees = zip(shown, structure.unflatten(leaves), strict=True)
        lines = [f"\n  {name} = {eqx.tree_pformat(tree)}" for name, tree in trees]
        what = "".join([what, " with" * bool(lines), *lines])
        note = f"This was raised while {owner} traced {what}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def call_traced(
    owner: str,
    f: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    given: Sequence[str] | None = None,
    *,
    word: str = "f",
    instead: str = "",
    apart: Callable[[], str] | None = None,
) -> Any:
    """Calls a user's function while it is traced, and explains what goes wrong."""
    # `given` is what the arguments are called, by default what `f` calls them.
    # `instead` says where to put what `f` changes, and `apart` what may be wrong if it
    # takes something apart that has other parts.
    with unchanged(owner, word, f, instead):
        try:
            return enforce_annotations(f)(*args, **kwargs)
        except (TypeError, ValueError) as error:
            # Not before the call: a signature need not tell the truth.
            if isinstance(error, TypeError):
                given = argument_names(f, args) if given is None else given
                check_takes(owner, word, f, given, keywords=list(kwargs))
            if _UNPACKING.match(str(error)):
                raise type(error)(
                    f"{owner}: {word} takes something apart that has other parts: "
                    f"{error}. {apart() if apart else _COMPARE}"
                ) from error
            raise


_COMPARE = "Compare it with the arguments below."
# What Python and JAX say where `a, b = c` fails.
_UNPACKING = re.compile(
    r"(too many|not enough) values to unpack|cannot unpack non-iterable|"
    r"iteration over a 0-d array"
)


# A value must not refer to its key, or neither would ever be freed: so where there is
# nothing to enforce, it is `None` instead of the function.
_cache: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any] | None]
_cache = weakref.WeakKeyDictionary()


def _enforced(fn: types.FunctionType) -> Callable[..., Any]:
    if fn.__globals__.get("__name__", "").startswith("jaxtyping."):
        return fn  # a wrapper of `jaxtyped`: what it wraps is checked already
    if fn not in _cache:
        _cache[fn] = _enforce(fn)
    return _cache[fn] or fn


def _enforce(fn: types.FunctionType) -> Callable[..., Any] | None:
    hints = {
        name: hint
        for name, annotation in getattr(fn, "__annotations__", {}).items()
        if _mentions_jaxtyping(hint := _evaluate_hint(annotation, fn))
    }
    if not hints:
        return None
    weak = weakref.ref(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return weak()(*args, **kwargs)  # pyright: ignore

    del call.__wrapped__
    signature = inspect.signature(fn)
    call.__signature__ = signature.replace(  # pyright: ignore
        parameters=[
            parameter.replace(annotation=hints.get(name, Any))
            for name, parameter in signature.parameters.items()
        ],
        return_annotation=hints.get("return", inspect.Signature.empty),
    )
    return _checked(call)


def _checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the jaxtyping annotations of a function, from its first call on."""
    # Importing beartype takes longer than importing all of this library.

    @functools.cache
    def checked() -> Callable[..., Any]:
        from beartype import beartype

        return jaxtyped(typechecker=beartype)(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # jaxtyping's own error does not say what was called.
        check_fits(fn, args, kwargs)
        return checked()(*args, **kwargs)

    return call


def _evaluate_hint(annotation: Any, fn: types.FunctionType) -> Any:
    # One by one, so that one that names something local does not spoil the others.
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        hints = typing.get_type_hints(holder, fn.__globals__, include_extras=True)
    except Exception:
        return None
    return hints["hint"]


def _mentions_jaxtyping(hint: object) -> bool:
    if inspect.isclass(hint) and issubclass(
        hint, jaxtyping.AbstractArray | jaxtyping.PyTree
    ):
        return True
    return any(map(_mentions_jaxtyping, typing.get_args(hint)))
