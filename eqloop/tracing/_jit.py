"""`Jit`: a compiled function, with a name."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import equinox as eqx
import jax

from .._calls import (
    NEEDS_VALUES,
    AbstractSameCall,
    NewP,
    NewR,
    P,
    R,
    call_traced,
    open_call,
)
from .._classes import AbstractBordered
from .._types import PyTree
from ._named import check_name, name_of
from ._nonfinite import translated

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


@final
class Jit(AbstractSameCall[P, R]):
    """Compiles a function, like `equinox.filter_jit`.

    Arrays are traced. All other leaves of the arguments and of `f` are static: the
    function is compiled again if they change. Transforms with the same function, name
    and settings share a program, so you may wrap a model at each step of training.

    Args:
        f: The function.
        donate: Which arrays the results may overwrite; donated arrays cannot be used
            again. `"all"`: all arrays, including those of `f`; `"all-except-first"`:
            all but those of the first argument; `"warn"` and `"warn-except-first"`: the
            same, with a warning for each array that could not be used; `"none"`.
        name: The name of the program in profiles and printed programs. By default the
            name of `f`.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If `donate` is none of these, or `name` is empty.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.Jit(name="energy")
        ... def f(x, power):
        ...     return jnp.sum(x**power)
        >>> f(jnp.arange(3.0), 2)
        Array(5., dtype=float32)
        >>> f.lower(jnp.arange(3.0), 2).as_text().splitlines()[0].split()[1]
        '@jit_energy'

    References:
        [`equinox.filter_jit`](https://docs.kidger.site/equinox/api/transformations/).
    """

    f: Callable[P, R]
    donate: Donate = eqx.field(default="none", static=True, kw_only=True)
    name: str | None = eqx.field(default=None, static=True, kw_only=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Jit[NewP, NewR]": ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)`, and compiles it first if necessary.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
        """
        program = _program(self._name, self.donate)
        try:
            with translated():
                return program(args[:1], (self.f, args[1:], kwargs))
        except NEEDS_VALUES as error:
            failed = error
        # JAX has one name for all functions there. The error is to have the user's.
        call, arrays = open_call("Jit", self.f, args, kwargs)
        jax.eval_shape(call.on_arrays, arrays)
        raise failed

    def lower(self, *args: PyTree, **kwargs: PyTree) -> "Lowered":
        """The program for such arguments, not compiled yet.

        Args:
            *args: The arguments of `f`; arrays may be `jax.ShapeDtypeStruct`s.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            The lowered program. It has `as_text()` and `compile()`; call the compiled
            program like `f`.
        """
        program = _program(self._name, self.donate)
        return Lowered(program.lower(args[:1], (self.f, args[1:], kwargs)), self.f)

    @property
    def _name(self) -> str:
        return self.name or name_of(self.f)

    def __check_init__(self) -> None:
        if self.donate not in get_args(Donate):
            known = ", ".join(map(repr, get_args(Donate)))
            raise ValueError(
                f"Jit: `donate` must be one of {known}, not {self.donate!r}."
            )
        if self.name is not None:
            check_name("Jit", self.name)


@functools.cache
def _program(name: str, donate: Donate) -> Any:
    """The jitted function of all `Jit`s of that name."""
    # That the function to be called is an argument spares it being taken apart when it
    # is wrapped: `equinox.filter_jit(f)` for each call would take several times longer.

    def call(first: tuple[PyTree, ...], rest: tuple[PyTree, ...]) -> PyTree:
        f, args, kwargs = rest
        return call_traced("Jit", f, (*first, *args), kwargs)

    call.__name__ = call.__qualname__ = name
    return eqx.filter_jit(call, donate=donate)


class Lowered(AbstractBordered):
    """A program that has been traced and lowered."""

    lowered: Any
    f: Callable[..., PyTree]

    def as_text(self) -> str:
        """The program, as StableHLO."""
        return self.lowered.as_text()

    def compile(
        self, compiler_options: dict[str, str | bool] | None = None
    ) -> "Compiled":
        """Compiles it."""
        return Compiled(self.lowered.compile(compiler_options), self.f)


class Compiled(AbstractBordered):
    """A compiled program."""

    compiled: Any
    f: Callable[..., PyTree]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs it."""
        __tracebackhide__ = True
        with translated():
            return self.compiled(args[:1], (self.f, args[1:], kwargs))

    def memory_analysis(self) -> Any:
        """What it allocates, where the backend tells."""
        return self.compiled.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """What it computes, where the backend tells."""
        return self.compiled.compiled.cost_analysis()

    def as_text(self) -> str:
        """The optimised program."""
        return self.compiled.compiled.as_text()
