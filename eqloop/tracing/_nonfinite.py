"""The error of numbers that are not finite, and how it gets past XLA."""

import collections
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from builtins import RuntimeError as JaxRuntimeError  # JAX does not say its type
else:
    from jax.errors import JaxRuntimeError


class NonFiniteError(JaxRuntimeError):
    """An operation gave a NaN or an infinity that its operands did not have.

    It is raised by what [`DebugNonFinite`][eqloop.DebugNonFinite] runs.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> try:
        ...     el.DebugNonFinite(jnp.log)(0.0)
        ... except el.NonFiniteError as error:
        ...     print(str(error).splitlines()[0])
        `log` gave -inf.
    """

    __module__ = "eqloop"


# The last errors of programs, perhaps one a device: XLA passes on only their text.
_raised: collections.deque[NonFiniteError] = collections.deque(maxlen=64)


def raise_inside(error: NonFiniteError) -> None:
    """Raises an error from a callback, so that `translated` can tell which it was."""
    _raised.append(error)
    raise error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises the error itself, where XLA raises one that only has its text."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        text, last = str(error), list(_raised)
        _raised.clear()
        found = next((raised for raised in last if str(raised) in text), error)
        if found is error or isinstance(error, NonFiniteError):
            raise
    else:
        return
    raise found.with_traceback(None)
