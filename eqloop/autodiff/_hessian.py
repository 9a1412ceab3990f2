"""`Hessian`: all second derivatives, forward mode over reverse mode."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, final

from .._arrays import Arrays
from .._calls import NewP, P
from .._types import PyTree
from ._blocks import by_columns, by_rows
from ._call import Call
from ._complex import check_forward, check_reverse, check_some_value
from ._derivative import AbstractBlocks


@final
class Hessian(AbstractBlocks[P]):
    """The second derivatives of a function, like `jax.hessian`.

    Args:
        f: The function. Its value is usually a scalar, but may be any PyTree.
        chunk_size: How many columns to compute at once, to limit the memory (not
            counting the Hessian itself): an `int`, or an [`eqloop.Budget`][]. By
            default all of them. The rows of a value that is not a scalar are in chunks
            as well.
        holomorphic: Whether `f` is holomorphic; then arguments and value are complex.

    Returns:
        When called: a tree like the value of `f`. In place of each array it has a tree
        like the argument, and in place of each array of that, another such tree. So it
        is a single array for a scalar function of one array. Each array has the shape
        of the output, followed by the shapes of the two inputs. For several `argnums`
        the inner trees are tuples. Leaves that have no derivative are `None`. Value and
        aux come after it as for [`Grad`][eqloop.Grad].

    Raises:
        TypeError: If a setting is not of its type; when called, if there is nothing to
            differentiate, or arrays are complex and `holomorphic` is not given.
        ValueError: If `argnums` is empty or `chunk_size` less than 1; when called, if
            there is no such argument, or one is named twice.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> el.Hessian(lambda x: jnp.prod(x), chunk_size=2)(jnp.array([1.0, 2.0, 3.0]))
        Array([[0., 3., 2.],
               [3., 0., 1.],
               [2., 1., 0.]], dtype=float32)

    References:
        [`jax.hessian`](https://docs.jax.dev/en/latest/_autosummary/jax.hessian.html).
    """

    f: Callable[P, PyTree]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "Hessian[NewP]": ...

    def _derive(self, call: Call) -> tuple[PyTree, Arrays, Arrays]:
        def first(arrays: Arrays) -> tuple[Arrays, PyTree]:
            blocks, outs, others = by_rows(call.run, arrays, self.chunk_size)
            return list(itertools.chain(*blocks)), (outs, others)

        blocks, _, (outs, others) = by_columns(
            first,
            call.arrays,
            self.chunk_size,
            evaluate=lambda arrays: ([], call.run(arrays)),
        )
        by_two = iter(map(call.gradient, blocks))
        by_one = lambda: list(itertools.islice(by_two, len(call.arrays)))
        hessian = call.jacobian([call.gradient(by_one()) for _ in outs])
        return hessian, outs, others

    def _check(self, call: Call, value: object) -> None:
        check_some_value(call, value)
        check_reverse(call, value, holomorphic=self.holomorphic)
        check_forward(call, value, holomorphic=self.holomorphic)
