"""`Trace`: the jaxpr of a function, and what becomes of the arrays it is given."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, final

import jax
import jax.extend.core as jex

from .._arrays import StaticTree, as_arrays, flatten, is_typed
from .._calls import AbstractSameCall, KnownAs, call_names, enforce_annotations
from .._programs import with_parts
from .._types import PyTree, Value
from ._usage import Usage, leaf_usage


class Traced(NamedTuple):
    """A traced function.

    Attributes:
        jaxpr: The program. Its inputs are the arrays of the arguments, and its consts
            the arrays of the function itself and those that it closes over.
        out: The result, with a `jax.ShapeDtypeStruct` for each array.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> jaxpr, out = el.Trace(jnp.sin)(jnp.zeros(3))
        >>> out
        ShapeDtypeStruct(shape=(3,), dtype=float32)
    """

    jaxpr: jex.ClosedJaxpr
    out: PyTree


@final
class Trace(AbstractSameCall[..., PyTree]):
    """The jaxpr of a function, with the structure of what it returns.

    A function is traced once for arguments of the same types and static leaves, and the
    jaxpr is cached, as for a compiled function. So `f` should depend only on its
    arguments.

    Args:
        f: The function.

    Returns:
        When called like `f`, with arrays or `jax.ShapeDtypeStruct`s: a pair
        `(jaxpr, out)`. The inputs of the jaxpr are the arrays of the arguments, in
        the order of `jax.tree.leaves((args, kwargs))`; its outputs are those of `out`.

    Raises:
        TypeError: When called, if a static leaf is not hashable.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> trace = el.Trace(lambda x, name: {name: jnp.sin(x)})
        >>> jaxpr, out = trace(jax.ShapeDtypeStruct((3,), jnp.float32), "y")
        >>> jaxpr
        { lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }
        >>> out
        {'y': ShapeDtypeStruct(shape=(3,), dtype=float32)}

        Which of the arrays matter:

        >>> f = lambda state, x: {"n": state["n"] + 1, "w": state["w"]}
        >>> el.Trace(f).leaf_usage({"n": jnp.ones(()), "w": jnp.ones(2)}, jnp.ones(3))
        {"state['n']": 'read', "state['w']": 'passed', 'x': 'unused'}
    """

    f: Callable[..., PyTree]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Traced:
        """Traces `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`; arrays may be `jax.ShapeDtypeStruct`s.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            The program, and the types of what it returns.

        Raises:
            TypeError: If a leaf that is not an array is not hashable.
        """
        call = RememberedCall.of("Trace", self.f, args, kwargs)
        count = sum(map(is_typed, flatten(self.f)[0]))
        traced = call.trace()
        jaxpr = traced.jaxpr.jaxpr
        # The arrays of `f` were inputs, so the trace also holds for other arrays of
        # the same types.
        variables = [*jaxpr.constvars, *jaxpr.invars[:count]]
        arrays = [*traced.jaxpr.consts, *call.arrays[:count]]
        constants = dict(zip(variables, arrays, strict=True))
        program = with_parts(
            traced.jaxpr, invars=jaxpr.invars[count:], constants=constants
        )
        return Traced(program, traced.out)

    def leaf_usage(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Usage]:
        """What `f(*args, **kwargs)` does with each array that it is given.

        This is read from the jaxpr, including its loops, branches, calls and custom
        derivatives.

        Args:
            *args: As for the call.
            **kwargs: As for the call.

        Returns:
            For the path of each array, those of `f` itself included:

            - `"read"`: what `f` returns, or prints, may depend on its value;
            - `"passed"`: `f` only returns it, as it came;
            - `"unused"`: neither.
        """
        call = RememberedCall.of("Trace", self.f, args, kwargs)
        return dict(zip(call.names, leaf_usage(call.trace().jaxpr), strict=True))


@dataclasses.dataclass(frozen=True)
class RememberedCall:
    """A call `f(*args, **kwargs)` whose trace is cached.

    Attributes:
        names: What each of them is called.
    """

    f: Callable[..., PyTree]
    arrays: list[Value]
    names: list[str]
    static: StaticTree

    @classmethod
    def of(
        cls, owner: str, f: PyTree, args: tuple[PyTree, ...], kwargs: dict[str, Any]
    ) -> "RememberedCall":
        arrays, static = StaticTree.of((f, args, kwargs))
        call = cls(f, arrays, call_names(f, args, kwargs, static.rest.taken), static)
        try:
            hash(call.static)
        except TypeError as error:
            raise TypeError(
                f"{owner}: leaves that are not arrays, and static fields, must be "
                f"hashable, since traces are looked up by them: {error}."
            ) from error
        return call

    def trace(self) -> Traced:
        """The jaxpr whose inputs are all of the arrays."""
        found: Any = None
        # JAX has one name for all functions there. An error is to have the user's.
        with contextlib.suppress(Exception):
            traced = _remembered.trace(self.static, self.arrays)
            # `jit` turns a tracer that `f` closes over into an input. Make it a const.
            if len(traced.jaxpr.in_avals) == len(self.arrays):
                found = traced.jaxpr, traced.out_info
        if found is None:
            run = functools.partial(_run, self.static)
            run = KnownAs("jit", self.f, self.names).name(run)
            found = jax.make_jaxpr(run, return_shape=True)(self.arrays)
        jaxpr, (_, static) = found
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.out_avals]
        return Traced(jaxpr, static.rest.join(types))


def _run(static: StaticTree, arrays: list[Value]) -> tuple[list[Value], StaticTree]:
    f, args, kwargs = static.rest.join(arrays)
    return StaticTree.of(as_arrays(enforce_annotations(f)(*args, **kwargs)))


# It is never run. It is jitted because JAX remembers the traces of jitted functions.
_remembered = jax.jit(_run, static_argnums=0)
