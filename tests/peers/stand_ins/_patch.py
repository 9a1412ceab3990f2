"""Puts our loops where others look for theirs, and takes them away again."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import equinox.internal as eqxi
from jax import lax

from . import _equinox, _lax
from ._diffrax import adjoint_replaced
from ._variants import VARIANTS, Variant

_LIBRARY = "eqloop"

_OTHERS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "adjoint": adjoint_replaced,
    "theirs": contextlib.nullcontext,
}
# What a suite can be run on: a variant of our loops, our adjoint, or what is theirs.
STAND_INS = (*VARIANTS, *_OTHERS)


def stand_in(name: str) -> contextlib.AbstractContextManager[None]:
    """Inside, what has this name is in place."""
    return _OTHERS[name]() if name in _OTHERS else replaced(VARIANTS[name])


@contextlib.contextmanager
def replaced(variant: Variant) -> Iterator[None]:
    """Inside, `jax.lax` and `equinox.internal` have our loops.

    What was imported from them by name before is as it was. Our loops run on those of
    `jax.lax`: a call from this library goes to the original.
    """
    with contextlib.ExitStack() as stack:
        for module, functions in (
            (lax, _lax.replacements(variant)),
            (eqxi, _equinox.replacements(variant)),
        ):
            for name, ours in functions.items():
                function = _for_others(ours, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, function))
        yield


def _for_others(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """`ours`, looking like `theirs`, which this library is given itself."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_library = caller.partition(".")[0] == _LIBRARY
        return (theirs if is_library else ours)(*args, **kwargs)

    return call
