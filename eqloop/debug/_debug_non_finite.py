"""`DebugNonFinite`: where the first NaN, or infinity, comes from."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import describe, is_dynamic, partition, paths, pick, strongly_typed
from .._calls import AbstractSameCall, NewP, NewR, P, R
from ..tracing import RememberedCall
from ._checked import Checked, with_inputs


@final
class DebugNonFinite(AbstractSameCall[P, R]):
    """Runs a function, and raises an error at its first NaN or infinity.

    The error names the operation, its line in your code, its operands, the iteration of
    each loop around it, and the sweep, forward or backward. The operation
    turned finite numbers into a NaN or an infinity, or infinities into a NaN.
    Infinities among the operands, such as a mask of `-inf`, are not an error. If a
    result has a NaN that came from an argument, the error names the argument.

    It works under `jax.jit`, `jax.grad` and `jax.vmap`, in a loop, and around any of
    these. It also checks derivatives and batches of the function. It looks into loops,
    branches and maps over devices; of kernels and callbacks it checks only the results.
    `jnp.where` selects from values that have been computed, so values that are not
    selected count. If several are nested, the outermost one reports.

    Args:
        f: The function.
        when: Whether to check. With `False` it only calls `f`. It may be a traced
            boolean: then the program contains both versions, and runs one of them.

    Raises:
        TypeError: `when` is not a boolean; or, when called, a static leaf is not
            hashable.
        NonFiniteError: When called, or by a program that has been compiled with the
            call in it. [`Jit`][eqloop.Jit] raises this error itself. `jax.jit` raises a
            `jax.errors.JaxRuntimeError` or a `ValueError` with its text, as for every
            error in a callback.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> def halve(x, _):
        ...     return x / 2, jnp.log(x - 0.25)
        >>> scan = el.DebugNonFinite(el.Scan(halve))
        >>> scan(1.0, length=5)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        eqloop.NonFiniteError: `log` gave -inf.
        ...
          operand 0: float32[] from 0 to 0
          in: iteration 2 of Scan
          sweep: forward
    """

    f: Callable[P, R]
    when: Any = eqx.field(default=True, kw_only=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "DebugNonFinite[NewP, NewR]": ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)`, and checks the result of each of its operations.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            NonFiniteError: When an operation gives a NaN or an infinity.
            TypeError: If a leaf that is not an array is not hashable.
        """
        __tracebackhide__ = True
        if isinstance(self.when, bool | np.bool_):
            if not self.when:
                return self.f(*args, **kwargs)
            when = []
        else:
            when = [jnp.asarray(self.when)]
        call = RememberedCall.of("DebugNonFinite", self.f, args, kwargs)
        jaxpr, out = call.trace()
        # No type is weak: derivatives lose these, and a primitive must keep its types.
        inputs = [*when, *map(strongly_typed, [*jaxpr.consts, *call.arrays])]
        _, rest = partition(out, lambda x: isinstance(x, jax.ShapeDtypeStruct))
        closed_over = ["an array that `f` closes over"] * len(jaxpr.consts)
        checked = Checked(
            with_inputs(jaxpr.jaxpr, tuple(map(jax.typeof, inputs))),
            names=(*["`when`"] * len(when), *closed_over, *call.names),
            outputs=tuple(pick(paths(out, "the result"), rest.taken)),
            has_when=bool(when),
        )
        return rest.join(checked.apply(*inputs))

    def __check_init__(self) -> None:
        when = self.when
        if isinstance(when, bool | np.bool_):
            return
        if not is_dynamic(when) or when.dtype != bool or when.shape != ():
            raise TypeError(
                f"DebugNonFinite: `when` must be True, False or a boolean scalar, not "
                f"{describe(when)}."
            )
