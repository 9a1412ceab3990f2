"""`Optimize`: a function that runs what the passes have made of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax
import jax.extend.core as jex

from .._calls import (
    AbstractSameCall,
    NewP,
    NewR,
    P,
    R,
    compiled_once,
    open_call,
    setting,
)
from .._programs import run
from ._optimize import PASSES, check_passes, optimize


def _as_passes(passes: Any) -> tuple[Callable[..., Any], ...]:
    check_passes(passes, "Optimize")
    return tuple(passes)


@final
class Optimize(AbstractSameCall[P, R]):
    """Runs a function after the passes of `eqloop.ir` have rewritten it.

    Call it like `f`. `f` is traced with its own arrays and those of its arguments as
    inputs; other leaves pass through unchanged. The rewritten function has the same
    values, effects and derivatives, and can be transformed like `f`. It is traced and
    rewritten once for all calls of the same types.

    Args:
        f: The function.
        passes: The passes in their order; see `eqloop.ir.optimize`.

    Raises:
        TypeError: `passes` is not a sequence of functions.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> f = ir.Optimize(lambda x: jnp.sin(x * 1.0) + jnp.sin(x))
        >>> print(jax.make_jaxpr(f)(1.0))
        { lambda ; a:f32[]. let b:f32[] = sin a; c:f32[] = add b b in (c,) }
    """

    f: Callable[P, R]
    passes: tuple[Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr], ...] = setting(
        default=PASSES, converter=_as_passes
    )

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Optimize[NewP, NewR]": ...

    @compiled_once
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)`, rewritten.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
        """
        call, arrays = open_call("Optimize", self.f, args, kwargs)
        jaxpr = optimize(jax.make_jaxpr(call.on_arrays)(arrays), self.passes)
        return call.kept.join(run(jaxpr, *arrays))
