"""A case: the gradient of a random program whose loop or map has a budget."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import eqloop as el

from ..random_programs.buffers import Buffered
from ..random_programs.cases import Case
from ..random_programs.endings import Ended
from ..random_programs.programs import Layers, Program, Rows, Scanned
from ..random_programs.transforms import Settings, Transform
from ..random_programs.values import is_inexact
from ..random_programs.world import World
from .plain import plain


@dataclasses.dataclass(frozen=True)
class Budgeted(Case):
    """A program whose gradient has a budget.

    Attributes:
        more: How many times the least that will do is in the budget.
        unused: Which outputs the loss leaves out.
        limit: Where a loop that may end does, if it counts.
        others: The settings of its budget: a second place, or whether it is measured.
    """

    more: float = 1.0
    unused: tuple[int, ...] = ()
    limit: int = 5
    others: Settings = (("measure", False),)

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """JAX's settings for this case: XLA's are those of users."""
        with (
            jax.enable_x64(self.precision.x64),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            yield

    def values(self, nudge: float = 0.0) -> list[Any]:
        """The inputs."""
        values = super().values(nudge)
        if isinstance(self.program, Ended | Buffered):
            values[0] = jnp.full_like(values[0], self.limit)
        return values

    def gradient(self, transform: Transform) -> tuple[Any, tuple[Any, Any]]:
        """The gradient by a transform, and what it is to be called with.

        The cotangents of outputs of all steps are arguments, as they are not the
        loop's; those of the last carry are computed from it, as by any loss.
        """
        program = dataclasses.replace(self.program, transform=transform)
        world = World(False, self.precision, self.width)
        carries = carry_count(program)
        values, at = self.values(), self.differentiated

        def call(*full: Any) -> tuple[list[Any], list[Any]]:
            out = dict(enumerate(program(world, full)))
            used = [i for i in out if is_inexact(out[i]) and i not in self.unused]
            carry = [out[i] for i in used if i < carries]
            return carry, [out[i] for i in used if i >= carries]

        if self.vmap == "inside":
            axes = tuple(0 if is_batched else None for is_batched in self.batched)
            # Outputs lie as the loop stacks them: to put the batch first copies them.
            stacked = 0 if transform.name == "ChunkedVmap" else 1
            call = jax.vmap(call, axes, _out_axes(call, axes, values, (0, stacked)))

        def run(values: Any, given: Any) -> Any:
            full = [*values]
            for i, x in zip(at, given, strict=True):
                full[i] = x
            return call(*full)

        def gradient(values: Any, cts: Any) -> Any:
            of = lambda *given: run(values, given)
            (carry, _), pull = jax.vjp(of, *(values[i] for i in at))
            return pull(([leaf * 2 for leaf in carry], cts))

        rows = jax.eval_shape(run, values, [values[i] for i in at])[1]
        cts = [jnp.full(row.shape, 0.5, row.dtype) for row in rows]
        return gradient, (values, cts)

    def budget(self, nbytes: int) -> el.Budget:
        """A budget of so many bytes."""
        return el.Budget(nbytes, **dict(self.others))

    @property
    def room(self) -> int:
        """How many bytes there are in the second place."""
        others = dict(self.others)
        return others.get("host") or others.get("disk") or 0

    @property
    def has_host(self) -> bool:
        """Whether that is the memory of the host, which on a CPU is the device's."""
        return "host" in dict(self.others)

    def reference(self) -> tuple[Any, tuple[Any, Any]]:
        """The gradient by plain JAX, and what it is to be called with."""
        return self.gradient(plain(self.program.transform))

    def within(self, schedule: Any) -> tuple[Any, tuple[Any, Any]]:
        """The gradient with a budget, and what it is to be called with."""
        transform = self.program.transform
        is_map = transform.name == "ChunkedVmap"
        setting = "chunk_size" if is_map else "schedule", schedule
        settings = (*transform.settings, setting)
        return self.gradient(dataclasses.replace(transform, settings=settings))


def _out_axes(call: Any, axes: Any, values: Any, batched: tuple[int, int]) -> Any:
    """The axes of a batch of outputs, with none for those that all examples have.

    To hand these out once for each example takes memory of its own.
    """

    def axis(group: int, i: int) -> int | None:
        try:
            one = jax.vmap(lambda *full: call(*full)[group][i], axes, None)
            jax.eval_shape(one, *values)
        except ValueError:
            return batched[group]
        return None

    one = jax.vmap(call, axes)
    counts = [len(group) for group in jax.eval_shape(one, *values)]
    return tuple([axis(n, i) for i in range(count)] for n, count in enumerate(counts))


def carry_count(program: Program) -> int:
    """How many of the outputs are the last carry; the others have a row a step."""
    match program:
        case Scanned():
            return len(jax.tree.leaves(program.trees[0]))
        case Ended():
            return 1 + program.carry
        case Layers() | Buffered():
            return len(program.bodies[0].outputs) + 4
        case Rows():
            return 0
    raise TypeError(f"{type(program).__name__} has no budget")
