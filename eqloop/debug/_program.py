"""A program to check, with names for its inputs and outputs."""

import dataclasses
import functools
from collections.abc import Sequence

import jax.core
import jax.extend.core as jex

from .. import _programs
from .._arrays import Flags, is_inexact, pick, split
from .._programs import Rewrite
from .._types import Aval, BatchAxis, PyTree, Value


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to check.

    Attributes:
        jaxpr: The program. It closes over no tracers, and no type in it is weak:
            derivatives lose weak types, and a primitive must keep the types it has.
    """

    jaxpr: jex.ClosedJaxpr
    names: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, *args: PyTree) -> list[Value]:
        return _programs.run(self.jaxpr, *args)

    @property
    def out_types(self) -> list[Aval]:
        """The types of the outputs."""
        return list(self.jaxpr.out_avals)

    def pushed(self, moves: Flags) -> "Program":
        """The outputs, and the tangents of those that can have one."""
        moving = tuple(map(is_inexact, self.out_types))
        return Program(
            _programs.pushed(self.jaxpr, (moves,), (moving,)),
            (*self.names, *_each("the tangent of", pick(self.names, moves))),
            (*self.outputs, *_each("the tangent of", pick(self.outputs, moving))),
        )

    def pulled(self, marks: Flags, wanted: Flags) -> "Program":
        """The cotangents of marked inputs, from inputs and cotangents of outputs."""
        return Program(
            _programs.pulled(self.jaxpr, (marks,), (wanted,)),
            (*self.names, *_each("the cotangent of", pick(self.outputs, wanted))),
            tuple(_each("the cotangent of", pick(self.names, marks))),
        )

    def batched(self, axis_data: BatchAxis, dims: tuple[int | None, ...]) -> "Program":
        """The program of a batch, with outputs batched along their leading axis."""
        out_dims = (0,) * len(self.outputs)
        rewrite = lambda jaxpr: _programs.batched(jaxpr, axis_data, dims, out_dims)
        return self.rewritten(rewrite)

    def rewritten(self, rewrite: Rewrite) -> "Program":
        """The same with another jaxpr, which has as many inputs and outputs."""
        jaxpr = rewrite(self.jaxpr)
        same = jaxpr is self.jaxpr
        return self if same else dataclasses.replace(self, jaxpr=jaxpr)


@functools.lru_cache(maxsize=256)
def make_program(
    jaxpr: jex.Jaxpr,
    consts: tuple[Value, ...],
    types: tuple[Aval, ...],
    names: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Program:
    """A program from a jaxpr."""

    def run(*flat: Value) -> list[Value]:
        consts_, inputs = split(flat, len(consts))
        return jax.core.eval_jaxpr(jaxpr, consts_, *inputs)

    return Program(_programs.traced(run, [*consts, *types]), names, outputs)


def _each(what: str, names: Sequence[str]) -> list[str]:
    return [f"{what} {name}" for name in names]
