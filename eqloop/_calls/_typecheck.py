"""Types at the border: jaxtyping and beartype, and what their errors say.

Public calls are decorated with `typed`. The functions that users hand to a loop are
called through `enforce_annotations`, so that their jaxtyping annotations hold although
they were not decorated. All of it happens while tracing; compiled code checks nothing.
"""

import contextlib
import functools
import inspect
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import equinox as eqx
import jaxtyping
from jaxtyping import jaxtyped

_Function = TypeVar("_Function", bound=Callable[..., Any])


def typed(fn: _Function) -> _Function:
    """Checks the annotations of a public call.

    The check is made at the first call, since importing beartype takes longer than
    importing all of this library.
    """
    signature = inspect.signature(fn)

    @functools.cache
    def checked() -> Callable[..., Any]:
        from beartype import beartype

        return jaxtyped(typechecker=beartype)(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            # jaxtyping's own error does not say what was called.
            raise TypeError(f"{_as_called(fn, args)}: {error}.") from None
        return checked()(*args, **kwargs)

    return typing.cast(_Function, call)


def _as_called(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """A function and its parameters, as whoever calls it sees them."""
    signature = without_annotations(inspect.signature(fn))
    parameters = list(signature.parameters.values())
    if not (args and parameters and parameters[0].name == "self"):
        return f"{fn.__qualname__}{signature}"
    method = "" if fn.__name__ == "__call__" else f".{fn.__name__}"
    signature = signature.replace(parameters=parameters[1:])
    return f"{type(args[0]).__name__}{method}{signature}"


def enforce_annotations(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `f` and enforces its jaxtyping annotations.

    In one call the names of axes bind across arguments and results. Annotations that
    hold no jaxtyping type are not enforced: a `float` in a signature often is an array
    by the time that it is traced. Those that cannot be resolved are not either.

    Args:
        f: A function, a bound method, a partial of these (of `functools` or Equinox),
            or an object whose class defines `__call__`.

    >>> import jax.numpy as jnp
    >>> from jaxtyping import Array, Float
    >>> def double(x: Float[Array, "n"]) -> Float[Array, "n"]:
    ...     return jnp.concatenate([x, x])
    >>> enforce_annotations(double)(jnp.ones(3))
    Traceback (most recent call last):
    jaxtyping.TypeCheckError: Type-check error whilst checking the return value ...
    """
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
def explained(owner: str, what: str) -> Iterator[None]:
    """Adds to the errors of a user's code that it was being traced.

    Args:
        owner: The name of the transform that traces it.
        what: What is traced, with its arguments.
    """
    note = f"This was raised while {owner} traced {what}"
    try:
        yield
    except Exception as error:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


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
    return typed(call)


def without_annotations(signature: inspect.Signature) -> inspect.Signature:
    """A signature for error messages, in which only the names are of interest."""
    empty = inspect.Signature.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=empty)


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
