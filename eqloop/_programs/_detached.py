"""A value without its derivative, as a primitive that can be transposed."""

from collections.abc import Hashable, Sequence

import jax

from .._arrays import is_inexact
from .._types import Aval, BatchAxis, PyTree, Value
from ._formula import Formula


class Detached(Formula):
    """The identity without a derivative, as `jax.lax.stop_gradient`.

    Unlike that it can be transposed: it stands where a user's function is linear.
    """

    def __init__(self, aval: Aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {"aval": aval}
        super().__init__()

    def expand(self, x: Value) -> Value:
        return x

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return self.zero_cts()

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [False]

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return list(marks)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        (x,), (dim,) = args, dims
        return Detached(jax.typeof(x)), args, [dim]


def detached(x: Value) -> Value:
    """The same value, without a derivative."""
    return Detached(jax.typeof(x)).apply(x) if is_inexact(x) else x
