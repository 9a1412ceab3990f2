"""What takes the place of `jax.lax.scan`, `while_loop`, `fori_loop` and `map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el

from ._variants import Variant


def replacements(variant: Variant) -> dict[str, Callable[..., Any]]:
    """Functions with the signatures of those in `jax.lax`, by name."""

    def scan(
        f: Any,
        init: Any,
        xs: Any = None,
        length: int | None = None,
        reverse: bool = False,
        unroll: int | bool = 1,
        _split_transpose: bool = False,
    ) -> Any:
        # To `jax.lax.scan`, no unrolling is `False` or 0 as well.
        loop = el.Scan(
            f, schedule=variant.schedule, reverse=reverse, unroll=unroll or 1
        )
        return loop(as_arrays(init), xs, length=length)

    def while_loop(cond_fun: Any, body_fun: Any, init_val: Any) -> Any:
        return variant.while_loop(cond_fun, body_fun)(as_arrays(init_val))

    def fori_loop(
        lower: Any,
        upper: Any,
        body_fun: Any,
        init_val: Any,
        *,
        unroll: int | bool | None = None,
    ) -> Any:
        try:
            # A tracer may well have a value, under an eager `jax.grad` for example.
            start, stop = int(lower), int(upper)
        except (TypeError, jax.errors.InconclusiveDimensionOperation):
            return _while_counting(while_loop, lower, upper, body_fun, init_val)
        if start >= stop:  # without `jit`, a scan of length 0 is an error
            return as_arrays(init_val)
        step = lambda carry, _: ((carry[0] + 1, body_fun(*carry)), None)
        settings = dict(length=stop - start, unroll=unroll or 1)
        (_, last), _ = scan(step, (start, init_val), **settings)
        return last

    def map(f: Any, xs: Any, *, batch_size: int | None = None) -> Any:
        return variant.map(f, batch_size or None)(xs)

    return {"scan": scan, "while_loop": while_loop, "fori_loop": fori_loop, "map": map}


def as_arrays(tree: Any) -> Any:
    """Python's numbers as arrays: they vary, whatever the loop does with them.

    Ours would keep one that a step hands back, which is not what their tests expect.
    """
    numbers = bool | int | float | complex | np.generic
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, numbers) else x, tree)


def _while_counting(
    while_loop: Callable[..., Any], lower: Any, upper: Any, body: Any, init: Any
) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(lower, upper)
    bounds = jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)
    _, _, last = while_loop(
        lambda carry: carry[0] < carry[1],
        lambda carry: (carry[0] + 1, carry[1], body(carry[0], carry[2])),
        (*bounds, init),
    )
    return last
