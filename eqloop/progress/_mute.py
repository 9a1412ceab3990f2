"""Programs whose loops show no bars, and such as close all bars when they fail."""

import functools
from typing import Any

from .._equations import map_equations, map_params
from .._formula import Formula
from . import _display


@functools.lru_cache(maxsize=128)
def muted(program: Any, backward: bool) -> Any:
    """A program to be run again, without the bars of the loops in it.

    Args:
        program: The program. If there are no bars in it, it is returned as it is.
        backward: Whether to leave out those of their backward sweeps, too.
    """

    def mute(value: Any) -> Any:
        return value.muted(backward) if isinstance(value, Formula) else value

    return map_equations(program, lambda eqn: map_params(eqn, mute))


@functools.lru_cache(maxsize=128)
def guarded(program: Any) -> Any:
    """A program whose callbacks close all bars when they raise.

    When a callback raises, as that of `eqx.error_if` does, the program is abandoned,
    and nobody tells its bars.
    """

    def guard(eqn: Any) -> Any:
        if eqn.primitive.name.endswith("_callback"):
            callback = _closing(eqn.params["callback"])
            return eqn.replace(params={**eqn.params, "callback": callback})
        return map_params(eqn, lambda p: p.guarded() if isinstance(p, Formula) else p)

    return map_equations(program, guard)


def _closing(callback: Any) -> Any:
    @functools.wraps(callback, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return callback(*args, **kwargs)
        except BaseException:
            _display.close_all()
            raise

    return call
