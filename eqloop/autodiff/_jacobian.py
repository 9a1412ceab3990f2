"""`JacRev`, `JacFwd` and `Jacobian`: all derivatives of the outputs by the inputs."""

import abc
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import jax

from .._arrays import Arrays, is_complex
from .._calls import NewP, P
from .._types import PyTree
from ._blocks import by_columns, by_rows, num_entries
from ._call import Call
from ._complex import check_forward, check_reverse, check_some_value
from ._derivative import AbstractBlocks


class AbstractJacobian(AbstractBlocks[P]):
    """The derivatives of all outputs of `f` with respect to all its inputs.

    A final class says in which mode.

    Args:
        f: The function. Its arguments and its value may be any PyTrees.
        chunk_size: How many sweeps to run at once, to limit the memory (not counting
            the Jacobian itself): an `int`, or an [`eqloop.Budget`][]. By default all of
            them.
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.
    """

    @abc.abstractmethod
    def _is_forward(self, call: Call) -> bool:
        """Whether to take the derivative in forward mode."""

    def _derive(self, call: Call) -> tuple[PyTree, Arrays, Arrays]:
        check, blocks_of = check_reverse, by_rows
        if self._is_forward(call):
            check, blocks_of = check_forward, by_columns
        call.checks.append(functools.partial(check, holomorphic=self.holomorphic))
        blocks, outs, others = blocks_of(call.run, call.arrays, self.chunk_size)
        return call.jacobian(list(map(call.gradient, blocks))), outs, others

    def _check(self, call: Call, value: object) -> None:
        check_some_value(call, value)


@final
class JacRev(AbstractJacobian[P]):
    """The Jacobian in reverse mode, like `jax.jacrev`: one sweep for each output.

    Use reverse mode for functions with fewer outputs than inputs.

    Args:
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.
            Without it the value must be real.

    Returns:
        When called: a tree like the value of `f`. In place of each array it has a tree
        like the argument, or a tuple of such trees for several `argnums`. Each array
        has the shape of the output, followed by the shape of the input. Leaves that
        have no derivative are `None`. Value and aux come after it as for
        [`Grad`][eqloop.Grad].

    Raises:
        TypeError: If a setting is not of its type; when called, if there is nothing to
            differentiate in an argument or in the value.
        ValueError: If `argnums` is empty or `chunk_size` less than 1; when called, if
            there is no such argument, or one is named twice.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> f = lambda x, w: {"a": w @ x, "b": jnp.sum(x)}
        >>> x, w = jnp.ones(3), jnp.ones((2, 3))
        >>> jacobian = el.JacRev(f, argnums=(0, 1), chunk_size=2)(x, w)
        >>> [block.shape for block in jacobian["a"]]
        [(2, 3), (2, 2, 3)]

    References:
        [`jax.jacrev`](https://docs.jax.dev/en/latest/_autosummary/jax.jacrev.html). The
        wish for chunks: [functorch
        #680](https://github.com/pytorch/functorch/issues/680).
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "JacRev[NewP]": ...

    def _is_forward(self, call: Call) -> bool:
        return False


@final
class JacFwd(AbstractJacobian[P]):
    """The Jacobian in forward mode, like `jax.jacfwd`: one sweep for each input.

    Use forward mode for functions with fewer inputs than outputs. It stores nothing for
    a backward pass. In chunks, it evaluates `f` again for each chunk.

    Args:
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.
            Without it the arguments must be real.

    Returns:
        When called: what [`JacRev`][eqloop.JacRev] returns.

    Raises:
        TypeError: As for `JacRev`.
        ValueError: As for `JacRev`.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> value, jacobian = el.JacFwd(jnp.cumsum, return_value=True)(jnp.arange(3.0))
        >>> jacobian
        Array([[1., 0., 0.],
               [1., 1., 0.],
               [1., 1., 1.]], dtype=float32)

    References:
        [`jax.jacfwd`](https://docs.jax.dev/en/latest/_autosummary/jax.jacfwd.html).
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "JacFwd[NewP]": ...

    def _is_forward(self, call: Call) -> bool:
        return True


@final
class Jacobian(AbstractJacobian[P]):
    """The Jacobian, in the mode that takes fewer sweeps.

    It uses forward mode if `f` has no more inputs than outputs, and reverse mode
    otherwise. For complex arrays it uses the mode that JAX supports: forward mode for
    complex values of real arguments, and reverse mode for real values of complex
    arguments.

    Returns:
        When called: what [`JacRev`][eqloop.JacRev] returns.

    Raises:
        TypeError: As for `JacRev`.
        ValueError: As for `JacRev`.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> el.Jacobian(lambda x: jnp.stack([x, x**2]))(3.0)
        Array([1., 6.], dtype=float32, weak_type=True)
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "Jacobian[NewP]": ...

    def _is_forward(self, call: Call) -> bool:
        outs, _ = jax.eval_shape(call.run, call.arrays)
        if not self.holomorphic and any(map(is_complex, [*call.arrays, *outs])):
            return not any(map(is_complex, call.arrays))
        return num_entries(call.arrays) <= num_entries(outs)
