"""What all derivatives of a function share: their settings, and their results."""

import abc
from collections.abc import Callable
from typing import Any

from .._arrays import Arrays
from .._calls import AbstractSameCall, P, check_bool, compiled_when, setting
from .._types import PyTree
from ..checkpointing import Budget
from ._argnums import Argnums, as_argnums, check_argnums
from ._call import Call, open_derivative
from ._counts import as_int, check_chunk_size


class AbstractDerivative(AbstractSameCall[P, PyTree]):
    """A function whose call gives a derivative of `f` at the arguments.

    It differentiates with respect to the floating-point and complex arrays of the
    arguments that `argnums` names, including NumPy arrays. An argument that is a Python
    `float` or `complex` by itself counts as an array; in a tree such numbers are
    static. The derivative is a tree as the argument is, with `None` for all other
    leaves. With several `argnums` it is a tuple of these. The arrays of `f` itself, if
    it is a module, are not differentiated, and neither is the `self` of a method: to
    differentiate with respect to them, pass them as an argument.

    Results come in the order of JAX: as of [`jax.value_and_grad`][] if `return_value`,
    so the value, or the pair `(value, aux)` that `f` returned if `has_aux`, and then
    the derivative; and as of [`jax.grad`][] otherwise: the derivative, alone or in a
    pair with `aux`.

    A final class says in `_check` what `f` may return. Its call opens the call of `f`,
    differentiates `Call.run` of it, and closes it with `_results`.

    Args:
        argnums: The arguments to differentiate with respect to: the position of one (a
            negative one counts from the last positional argument of the call), its
            name, or a tuple of these, for a tuple of derivatives.
        has_aux: Whether `f` returns a pair of its value, and anything else.
        return_value: Whether to return the value as well, before the derivative.
    """

    f: Callable[P, PyTree]
    argnums: Argnums = setting(default=0, converter=as_argnums)
    has_aux: bool = setting(default=False)
    return_value: bool = setting(default=False)

    @abc.abstractmethod
    def _check(self, call: Call, value: object) -> None:
        """Raises if this is no value that can be differentiated so."""

    def _open(self, args: tuple[PyTree, ...], kwargs: dict[str, Any]) -> Call:
        how = self.argnums, self.has_aux, self._check
        return open_derivative(type(self).__name__, self.f, args, kwargs, *how)

    def _results(
        self, call: Call, derivative: PyTree, outs: Arrays, others: Arrays
    ) -> PyTree:
        value, aux = call.close(outs, others)
        if self.return_value:
            return ((value, aux) if self.has_aux else value), derivative
        return (derivative, aux) if self.has_aux else derivative

    def __check_init__(self) -> None:
        owner = type(self).__name__
        check_argnums(owner, self.argnums)
        check_bool(owner, "has_aux", self.has_aux)
        check_bool(owner, "return_value", self.return_value)


class AbstractExactDerivative(AbstractDerivative[P]):
    """A derivative that needs only the arguments of `f`, and no random directions.

    A final class says in `_derive` how it is taken.
    """

    @property
    def _runs_a_loop(self) -> bool:
        # Without one there is nothing to be compiled: `f` is run as it is, and may look
        # at the values of its arguments.
        return False

    @compiled_when(lambda self, *_, **__: self._runs_a_loop)
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """Differentiates `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            The derivative, and what `return_value` and `has_aux` ask for.

        Raises:
            TypeError: If an argument has no derivative, or if this derivative does not
                exist for what `f` returns.
            ValueError: If `argnums` names an argument that is not passed.
        """
        call = self._open(args, kwargs)
        return self._results(call, *self._derive(call))

    @abc.abstractmethod
    def _derive(self, call: Call) -> tuple[PyTree, Arrays, Arrays]:
        """The derivative, and what `Call.run` returns."""


class AbstractBlocks(AbstractExactDerivative[P]):
    """All derivatives of each output by each input, so many at once."""

    chunk_size: int | Budget | None = setting(default=None, converter=as_int)
    holomorphic: bool = setting(default=False)

    @property
    def _runs_a_loop(self) -> bool:
        return self.chunk_size is not None

    def __check_init__(self) -> None:
        owner = type(self).__name__
        check_chunk_size(owner, self.chunk_size)
        check_bool(owner, "holomorphic", self.holomorphic)
