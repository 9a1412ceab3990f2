"""`ChunkedVmap`: `jax.vmap` over at most so many rows at once."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex, final

import equinox as eqx

from .._arrays import axes_tree, hashable_axes
from .._calls import NewP, NewR, P, R, compiled_once, setting
from .._types import PyTree
from ..checkpointing import Budget, as_jax_policy, as_policy_or_wrong
from ..progress import ProgressBar, as_progress, check_progress
from ._abstract_map import AbstractAxesMap
from ._map_plan import MapPlan, plan_of_map
from ._open_map import as_chunk_size, check_reduce, open_map, planner_for


def _as_chunk_size(size: SupportsIndex | Budget) -> int | Budget:
    what = "the number of rows to map at once, or a `Budget`"
    return as_chunk_size("ChunkedVmap", what, size)


@final
class ChunkedVmap(AbstractAxesMap[P, R]):
    """Vectorises a function over a limited number of rows at once.

    Like `equinox.filter_vmap`, but with the memory of one chunk rather than of all
    rows. This also holds for derivatives, in any mode and order: only the arguments are
    stored for the backward pass, which computes each chunk again. Call it like `f`,
    with stacked arguments; keyword arguments are mapped as well. A single PRNG key that
    is passed as `key=` is split, one for each row, so results do not depend on the size
    of the chunks.

    All chunks have one size if that is possible with chunks of more than half of
    `chunk_size`: 1000 rows with `chunk_size=300` are mapped in four chunks of 250. If
    not, the first chunk is shorter, and `f` is in the program a second time for it. `f`
    is called once for each row, and never with rows that are not in its arguments. If
    `chunk_size` is large enough for all rows, this is `equinox.filter_vmap`.

    If a row can see its chunk, by [`unvmap`][eqloop.unvmap], a `custom_vmap` or a key
    of `rbg`, its result depends on the chunks. Then the value and all derivatives have
    the same chunks.

    Args:
        chunk_size: The greatest number of rows to map at once, at least 1. Or an
            [`eqloop.Budget`][]: then as many rows as fit into this much memory, besides
            arguments and results. The size is found when the map is compiled,
            separately for the value and for each derivative (if no row can see its
            chunk), and under `vmap` for the whole batch. To find it, programs of a few
            sizes are compiled, and not run.
        reduce: `"sum"` or `"mean"` to reduce results over the rows instead of stacking
            them, with the types of `jnp.sum` and `jnp.mean`; or a prefix tree of these
            for what `f` returns, with `None` for results to stack. The gradient of a
            mean of losses is then accumulated from chunk to chunk. Results of 16 bits
            are added up in 32 bits, and so are gradients
            ([`accumulating_in`][eqloop.accumulating_in]). Results for which `out_axes`
            is `None` are the same for every row, and are not reduced.
        policy: Which values inside `f` are stored for the backward pass, for all rows:
            one of `eqloop.policies`, a callable from `jax.checkpoint_policies`, or the
            name of one of these.
        progress: Shows a progress bar: `True`, an int (after how many rows it moves) or
            a [`ProgressBar`][eqloop.ProgressBar].

    Raises:
        TypeError: `chunk_size` is neither an int nor a `Budget`, `policy` is not a
            policy, or `progress` is not a progress bar; when called, an axis is none, a
            jaxtyping annotation of `f` is violated, or a result is to be reduced and
            cannot be added up.
        ValueError: `chunk_size` is less than 1, or `reduce` no reduction; when called,
            the lengths of the mapped axes disagree, there is nothing to map, an axis is
            out of range, or a result for which `out_axes` is `None` differs from row to
            row; where it is compiled, if a single row does not fit into the `Budget`,
            or a second derivative does not in the chunks that it has to have.

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

        Gradient accumulation, in 2 MiB:

        >>> loss = lambda mlp, x: jnp.sum(mlp(x) ** 2)
        >>> mean = el.ChunkedVmap(
        ...     loss, el.Budget("2MiB"), in_axes={"mlp": None}, reduce="mean"
        ... )
        >>> grads = eqx.filter_jit(eqx.filter_grad(mean))(mlp, jnp.ones((100_000, 2)))
        >>> grads.layers[0].weight.shape
        (64, 2)
    """

    f: Callable[P, R]
    chunk_size: int | Budget = eqx.field(static=True, converter=_as_chunk_size)
    in_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    out_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    reduce: PyTree = setting(default=None, converter=hashable_axes)
    # No static field, so that `eqx.tree_at` reaches it.
    policy: Any = setting(default=None, converter=as_policy_or_wrong, static=False)
    progress: ProgressBar | None = setting(default=None, converter=as_progress)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "ChunkedVmap[NewP, NewR]": ...

    def __check_init__(self) -> None:
        check_reduce("ChunkedVmap", axes_tree(self.reduce))
        as_jax_policy("ChunkedVmap", self.policy)
        check_progress("ChunkedVmap", self.progress)

    @compiled_once
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f` on every row of its arguments, a chunk at a time.

        Args:
            *args: The arguments of `f`, with their rows along the axes of `in_axes`.
            **kwargs: Those that are given by keyword: along axis 0, unless `in_axes`
                names them.

        Returns:
            What `f` returns, with its arrays stacked along the axes of `out_axes`, or
            reduced over the rows.

        Raises:
            TypeError: If an axis is neither an int nor `None`, or a jaxtyping
                annotation of `f` is violated.
            ValueError: If nothing is mapped, if axes do not fit or differ in length, or
                if a row alone takes more than the budget.
        """
        call = open_map(
            "ChunkedVmap",
            self.f,
            args,
            kwargs,
            in_axes=self.in_axes,
            out_axes=self.out_axes,
            reduce=axes_tree(self.reduce),
        )
        # `eqx.tree_at` may have put in the name of a policy.
        policy = as_jax_policy("ChunkedVmap", self.policy)
        return call.run(planner_for(self.chunk_size), policy, self.progress)

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> MapPlan:
        """The chunks of a call and of its gradient, and what they take.

        They are compiled, and not run.

        Args:
            *args: The arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for an
                array.
            **kwargs: Those that are given by keyword.

        Returns:
            What was found: a table, if it is printed.

        Raises:
            ValueError: If there is a `policy`: then the gradient is one with what that
                keeps, of which `eqloop.memory_profile` tells. As for a call otherwise.
        """
        if self.policy is not None:
            raise ValueError(
                "ChunkedVmap: with a `policy`, values of all rows are kept from the "
                "value for the gradient, which have no plan. Use "
                "`el.memory_profile(gradient)(...)`."
            )
        return plan_of_map(self, args, kwargs)
