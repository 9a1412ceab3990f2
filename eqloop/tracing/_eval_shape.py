"""`EvalShape`: what a function would return."""

from collections.abc import Callable
from typing import final

import jax

from .._arrays import is_typed, partition
from .._calls import (
    AbstractSameCall,
    KnownAs,
    OpenedCall,
    call_names,
    enforce_annotations,
)
from .._types import PyTree


@final
class EvalShape(AbstractSameCall[..., PyTree]):
    """The shapes and dtypes of a function's results, like `equinox.filter_eval_shape`.

    Nothing is computed. A `jax.ShapeDtypeStruct` can stand for an array in the
    arguments.

    Args:
        f: The function.

    Returns:
        When called like `f`: the result of `f`, with a `jax.ShapeDtypeStruct` in place
        of each array. Other leaves are unchanged.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> shape = el.EvalShape(lambda x: {"y": x @ x.T, "name": "gram"})
        >>> shape(jax.ShapeDtypeStruct((10_000, 3), jnp.float32))
        {'name': 'gram', 'y': ShapeDtypeStruct(shape=(10000, 10000), dtype=float32)}

    References:
        [`equinox.filter_eval_shape`](https://docs.kidger.site/equinox/api/transformations/).
    """

    f: Callable[..., PyTree]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """What `f(*args, **kwargs)` would return.

        Args:
            *args: The arguments of `f`; arrays may be `jax.ShapeDtypeStruct`s.
            **kwargs: Its keyword arguments, likewise.

        Returns:
            The tree that `f` returns, with a `jax.ShapeDtypeStruct` for each array.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
        """
        call = lambda f, args, kwargs: enforce_annotations(f)(*args, **kwargs)
        # Those of `f` may be types as well.
        arrays, rest = partition((self.f, args, kwargs), is_typed)
        known_as = KnownAs("jit", self.f, call_names(self.f, args, kwargs, rest.taken))
        take = lambda out: partition(out, is_typed)
        opened = OpenedCall(rest.join, call, take, known_as)
        types = jax.eval_shape(opened.on_arrays, arrays)
        return opened.kept.join(types)
