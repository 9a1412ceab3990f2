"""The schedule by which a loop is one kernel."""

import dataclasses
from typing import final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._arrays import Arrays
from .._device import planning_device
from .._programs import constant
from .._types import Value
from ._schedules import make_count
from .engine._layout import Layout
from .engine._loop_spec import AbstractSchedule, LoopSpec
from .engine.orders._nested import Nested
from .fused._nests import usual_nests
from .fused._pallas import by_tiles
from .fused._row_programs import MOST_KNOWN, Settings
from .fused._runner import FusedRunner
from .steps._step import Step, make_step


@final
@dataclasses.dataclass(frozen=True)
class Fused(AbstractSchedule):
    """On a GPU or a TPU the whole loop is one kernel, and its way back is another.

    Where many independent rows run the same small step (ensembles of differential
    equations, environments, neurons, small cells), XLA starts some 10 to 50 kernels for
    each step, and that is nearly all of the time. Here a step starts none. What a row
    carries is in registers all along, and a carry is stored every so many steps.

    Rows are the axes of `vmap`, as many as there are, and axes along which the user's
    step treats all entries alike, such as a population in arrays of shape `(n,)`. What
    rows share, such as parameters, stays shared. Sums over rows are added up in the
    same order in every run.

    On a CPU, and on a TPU what does not fit into its vector memory, the loop runs as
    [`Chunked`][eqloop.Chunked] with the same number would. Its plan says so, and what
    it would be on a GPU. [A guide](../guides/fused.md) says which steps can be in a
    kernel.

    Args:
        every: A carry is stored every so many steps, and the steps between two of them
            are run again on the way back. If it is at least the length of the loop,
            these are all steps, as for `Chunked`. By default there are as many levels
            as it takes to need at most twice the memory of
            [`Recursive()`][eqloop.Recursive].
        block: How many rows one block of threads has, a power of two. By default it is
            chosen by the number of rows. On a TPU it is 1024.
        interpret: Whether the kernels are run by Pallas's interpreter, on any device.
            That is slow, and for tests.

    Raises:
        TypeError: If a number is not an int, or an operation in the step cannot be in a
            kernel: the error names it and its line.
        ValueError: If a number is less than 1, or `block` is not a power of two.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def decay(rate, h):
        ...     scan = el.Scan(
        ...         lambda h, _: (h - 0.1 * rate * h, None), schedule=el.Fused()
        ...     )
        ...     return scan(h, length=100)[0]
        >>> ensemble = jax.vmap(decay, in_axes=(None, 0))
        >>> gradient = jax.grad(lambda rate, h: ensemble(rate, h).sum())
        >>> print(f"{gradient(0.3, jnp.ones(4096)):.0f}")
        -2008

    References:
        U. Utkarsh et al., *Automated translation and accelerated solving of
        differential equations on multiple GPU platforms*, 2023,
        [arXiv:2304.06835](https://arxiv.org/abs/2304.06835), which makes one kernel of
        a solve, forwards.
    """

    every: int | None = None
    block: int | None = dataclasses.field(default=None, kw_only=True)
    interpret: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.every is not None:
            make_count(self, "every", self.every)
        if self.block is not None:
            make_count(self, "block", self.block)
            if self.block & (self.block - 1):
                raise ValueError(
                    f"Fused: `block` must be a power of two, such as 128, not "
                    f"{self.block}."
                )
        if not isinstance(self.interpret, bool):
            raise TypeError(
                f"Fused: `interpret` must be True or False, not {self.interpret!r} of "
                f"type {type(self.interpret).__name__}."
            )

    def __repr__(self) -> str:
        settings = [] if self.every is None else [f"every={self.every}"]
        settings += [] if self.block is None else [f"block={self.block}"]
        settings += ["interpret=True"] * self.interpret
        return f"Fused({', '.join(settings)})"

    def layout(self, loop: LoopSpec) -> Layout:
        """Segments of so many steps, or levels of them."""
        nests, runner = usual_nests(loop.length, self.every), self.runner
        if runner is not None:
            return Layout(Nested(nests), runner=runner.storing(nests))
        here = planning_device().platform.upper()
        how = "Chunked" if self.every is None else f"Chunked({self.every})"
        why = f"on a {here} it runs as `{how}` does"
        return Layout(Nested(nests), why_left=why, is_for_gpu=True)

    @property
    def runner(self) -> FusedRunner | None:
        """The kernels, on a GPU or a TPU, or if they are interpreted."""
        is_there = planning_device().platform == "gpu" or by_tiles()
        if not self.interpret and not is_there:
            return None
        return FusedRunner(Settings(self.block, self.interpret))

    def prepared(self, step: Step, consts: Arrays) -> tuple[Step, list[Value]]:
        """The step with tables of integers in it: indices that a kernel then knows.

        Args:
            step: The step.
            consts: Its consts.

        Returns:
            The step that runs, and its consts.
        """
        known = list(map(_is_table, consts))
        if self.runner is None or not any(known):
            return step, list(consts)
        dtypes = [c.dtype for c in consts]

        def move(left: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            values = iter(left)
            every = [
                constant(np.asarray(c)).astype(d) if flag else next(values)
                for c, flag, d in zip(consts, known, dtypes, strict=True)
            ]
            return step(every, carry, x)

        left = [c for c, flag in zip(consts, known, strict=True) if not flag]
        types = list(map(jax.typeof, left)), step.carry_types, step.x_types
        return make_step(move, *types), left


def _is_table(const: Value) -> bool:
    """Whether a const is a known array of a few integers, or of booleans."""
    if isinstance(const, jax.core.Tracer) or not 0 < const.size <= MOST_KNOWN:
        return False
    if jnp.issubdtype(const.dtype, jax.dtypes.extended) or const.dtype.kind not in "bi":
        return False
    array = np.asarray(const)
    return np.array_equal(array, array.astype(np.int32))
