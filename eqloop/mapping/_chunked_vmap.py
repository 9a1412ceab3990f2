"""`ChunkedVmap`: `jax.vmap` over at most so many rows at once."""

import inspect
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, final

import equinox as eqx
from jaxtyping import PyTree

from .._axes import hashable_axes
from .._partition import describe
from .._transform import AbstractTransform
from ..checkpointing import as_policy
from ._call import open_call
from ._chunks import equal_chunks
from ._row_map import map_rows


def _as_chunk_size(size: SupportsIndex) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)
    except TypeError as error:
        raise TypeError(
            f"ChunkedVmap: `chunk_size` must be an int, the number of rows to map at "
            f"once, but it is {describe(size)}, of type {type(size).__name__}."
        ) from error
    if number < 1:
        raise ValueError(
            f"ChunkedVmap: `chunk_size` must be at least 1, but it is {number}. For "
            f"all rows at once, give a number that is large enough."
        )
    return number


@final
class ChunkedVmap(AbstractTransform):
    """Vectorises a function over at most so many rows at once.

    As `equinox.filter_vmap`, with the memory of one chunk rather than of all rows, also
    when it is differentiated, in any mode and order: nothing is stored for the backward
    pass but the arguments, and there each chunk is computed again. Called as `f` is,
    with its arguments stacked; arguments given by keyword are mapped as well.

    The chunks are all of one size, so that `f` is in the program once: 1000 rows with
    `chunk_size=300` are mapped in four chunks of 250. If the number of rows does not
    allow for that the last chunk overlaps the one before it, by fewer rows than there
    are chunks. These rows are evaluated twice; they count once, in the results and in
    their derivatives. `f` is never called with rows that are not in its arguments. If
    `chunk_size` is large enough for all rows, this is `equinox.filter_vmap`. Call it
    in a function that is compiled (`equinox.filter_jit`): outside of one, each call
    compiles anew.

    Args:
        f: The function. Its own arrays are the same for every row.
        chunk_size: How many rows may be mapped at once, at least 1.
        in_axes: Which axes of the arguments are mapped: an `int`, `None` to pass an
            argument whole, a function from a leaf to either, or a tree of these. A
            tuple has an entry for each positional argument, a dictionary one for each
            of the arguments that it names; other arguments are mapped over the leading
            axes of their arrays. Leaves that are not arrays are passed as they are.
        out_axes: At which axes of the results the rows are: likewise, a prefix of what
            `f` returns. `None` is for what is the same for every row.
        policy: Which values inside `f` are stored for the backward pass nevertheless,
            those of all rows: one of `eqloop.policies`, a callable from
            `jax.checkpoint_policies`, or the name of one of these.

    Raises:
        TypeError: `chunk_size` is no int, or `policy` no policy; when called, an axis
            is none, or a jaxtyping annotation of `f` is violated.
        ValueError: `chunk_size` is less than 1; when called, the lengths of the mapped
            axes disagree, there is nothing to map, an axis is out of range, or
            a result for which `out_axes` is `None` differs from row to row.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> mlp = eqx.nn.MLP(2, 3, 64, depth=2, key=jax.random.key(0))
        >>> el.ChunkedVmap(mlp, 32)(jnp.ones((1000, 2))).shape
        (1000, 3)

        As a decorator, with axes by name:

        >>> @el.ChunkedVmap(chunk_size=32, in_axes={"table": None, "x": 1})
        ... def look_up(table, x, *, scale):
        ...     return scale * (table @ x)
        >>> table, x, scale = jnp.ones((4, 3)), jnp.ones((3, 100)), jnp.arange(100.0)
        >>> look_up(table, x, scale=scale).shape
        (100, 4)
    """

    f: Callable[..., Any]
    chunk_size: int = eqx.field(static=True, converter=_as_chunk_size)
    in_axes: PyTree[Any] = eqx.field(
        default=eqx.if_array(0), static=True, converter=hashable_axes, kw_only=True
    )
    out_axes: PyTree[Any] = eqx.field(
        default=eqx.if_array(0), static=True, converter=hashable_axes, kw_only=True
    )
    # No static field, so that `eqx.tree_at` reaches it.
    policy: Any = eqx.field(default=None, converter=as_policy, kw_only=True)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.f)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `f` for every row of its arguments."""
        call = open_call(
            "ChunkedVmap",
            self.f,
            args,
            kwargs,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
        )
        chunks = equal_chunks(call.size, self.chunk_size)
        if chunks.count <= 1:
            return call.close(call.vectorised(call.consts, call.xs))
        ys = map_rows(
            call.vectorised,
            call.consts,
            call.xs,
            x_axes=call.x_axes,
            y_axes=call.y_axes,
            chunks=chunks,
            policy=as_policy(self.policy),  # `eqx.tree_at` may have put in a name
        )
        return call.close(ys)
