"""`Jit`: a compiled function, with a name."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, final, get_args

import equinox as eqx
import jax

from .._arrays import StaticTree, as_arrays
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
from .._types import PyTree, Value
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
        run, _ = _programs(self._name, self.donate)
        try:
            with translated():
                return _joined(run(*_apart(self.f, args, kwargs)))
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
        _, program = _programs(self._name, self.donate)
        return Lowered(program.lower(*_apart(self.f, args, kwargs)), self.f)

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


# Arrays of the first argument, those of `f` and of other arguments, and what is left.
_Apart = tuple[list[Value], list[Value], tuple[StaticTree, StaticTree]]


def _apart(f: PyTree, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> _Apart:
    (first, one), (others, two) = map(StaticTree.of, (args[:1], (f, args[1:], kwargs)))
    return first, others, (one, two)


def _joined(out: tuple[list[Value], StaticTree]) -> PyTree:
    arrays, static = out
    return static.rest.join(arrays)


@functools.cache
def _programs(name: str, donate: Donate) -> tuple[Any, Any]:
    """The jitted function of all `Jit`s of that name, and the same to be lowered."""
    # That the function to be called is an argument spares it being taken apart when it
    # is wrapped: `equinox.filter_jit(f)` for each call would take several times longer.

    def call(
        first: list[Value], others: list[Value], statics: tuple[StaticTree, StaticTree]
    ) -> tuple[list[Value], StaticTree]:
        one, two = statics
        f, args, kwargs = two.rest.join(others)
        args = *one.rest.join(first), *args
        return StaticTree.of(as_arrays(call_traced("Jit", f, args, kwargs)))

    call.__name__ = call.__qualname__ = name
    given = {"none": (), "all": (0, 1), "warn": (0, 1)}.get(donate, (1,))
    lowered = jax.jit(call, static_argnums=2, donate_argnums=given)
    # This one raises what `equinox.error_if` says.
    return eqx.filter_jit(call, donate=donate), lowered


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
            first, others, _ = _apart(self.f, args, kwargs)
            return _joined(self.compiled(first, others))

    def memory_analysis(self) -> Any:
        """What it allocates, where the backend tells."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """What it computes, where the backend tells."""
        return self.compiled.cost_analysis()

    def as_text(self) -> str:
        """The optimised program."""
        return self.compiled.as_text()
