"""The error of numbers that are not finite, and how it gets past XLA."""

import contextlib
from collections.abc import Iterator

import jax


class NonFiniteError(jax.errors.JaxRuntimeError):
    """An operation gave a NaN or an infinity, and its operands were none.

    It is raised by what [`DebugNonFinite`][eqloop.DebugNonFinite] runs.
    """

    __module__ = "eqloop"


# What a compiled program raised last: XLA hands on but its text.
_raised: list[NonFiniteError] = []


def raise_inside(error: NonFiniteError) -> None:
    """Raises an error from a callback, so that `translated` can tell which it was."""
    _raised[:] = [error]
    raise error


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raises the error itself, where XLA raises one that only has its text."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        last, _raised[:] = list(_raised), []
        if isinstance(error, NonFiniteError) or not last:
            raise
        if str(last[0]) not in str(error):
            raise
        found = last[0]
    else:
        return
    raise found.with_traceback(None) from None
