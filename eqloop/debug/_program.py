"""A program on arrays, and the programs of its derivatives and of a batch."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex

from .._array_types import strongly_typed
from .._formula import vmap
from .._partition import Flags, pick, put, split
from .._tangents import is_inexact
from ..progress import guarded, muted


@dataclasses.dataclass(frozen=True)
class Program:
    """What is to be checked.

    Attributes:
        jaxpr: The program. It closes over no tracers, and no type in it is weak:
            derivatives lose weak types, and a primitive must keep the types it has.
        names: What its inputs are called.
        outputs: What its outputs are called.
        is_backward: Whether it is a backward sweep.
    """

    jaxpr: jex.ClosedJaxpr
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    is_backward: bool = False

    def __call__(self, *args: Any) -> list[Any]:
        return jex.jaxpr_as_fun(self.jaxpr)(*args)

    @property
    def in_types(self) -> list[Any]:
        """The types of the inputs."""
        return list(self.jaxpr.in_avals)

    @property
    def out_types(self) -> list[Any]:
        """The types of the outputs."""
        return list(self.jaxpr.out_avals)

    @property
    def moving(self) -> list[bool]:
        """Which outputs can have a tangent."""
        return list(map(is_inexact, self.out_types))

    def rewritten(self, rewrite: Callable[[Any], Any]) -> "Program":
        """The same with another jaxpr of the same meaning and signature."""
        jaxpr = rewrite(self.jaxpr)
        same = jaxpr is self.jaxpr
        return self if same else dataclasses.replace(self, jaxpr=jaxpr)

    def muted(self, backward: bool) -> "Program":
        """The program to be run again: without the progress bars in it."""
        return self.rewritten(lambda jaxpr: muted(jaxpr, backward))

    def guarded(self) -> "Program":
        """The program with callbacks that close all bars when they raise."""
        return self.rewritten(guarded)


@functools.lru_cache(maxsize=256)
def make_program(
    jaxpr: Any,
    consts: tuple[Any, ...],
    types: tuple[Any, ...],
    names: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Program:
    """A program from a jaxpr.

    Args:
        jaxpr: The jaxpr, whose constants become inputs, before the others.
        consts: The types of the constants.
        types: The types of the inputs.
        names: What both are called.
        outputs: What the outputs are called.
    """

    def run(*flat: Any) -> list[Any]:
        consts_, inputs = split(flat, len(consts))
        return jax.core.eval_jaxpr(jaxpr, consts_, *inputs)

    return Program(_trace(run, [*consts, *types]), names, outputs)


@functools.lru_cache(maxsize=256)
def pushed(program: Program, moves: Flags) -> Program:
    """The outputs, and the tangents of those that can have one."""
    types = program.in_types

    def push(*flat: Any) -> list[Any]:
        primals, tangents = split(flat, len(types))
        run = lambda marked: program(*put(primals, moves, marked))
        outs, dots = jax.jvp(run, (pick(primals, moves),), (tangents,))
        return [*outs, *pick(dots, program.moving)]

    dots = [aval.to_tangent_aval() for aval in pick(types, moves)]
    names = [f"the tangent of {name}" for name in pick(program.names, moves)]
    outputs = [
        f"the tangent of {name}" for name in pick(program.outputs, program.moving)
    ]
    return Program(
        _trace(push, [*types, *dots]),
        (*program.names, *names),
        (*program.outputs, *outputs),
        program.is_backward,
    )


@functools.lru_cache(maxsize=256)
def pulled(program: Program, marks: Flags, wanted: Flags) -> Program:
    """The cotangents of marked inputs, from the inputs and cotangents of outputs."""
    types = program.in_types

    def pull(*flat: Any) -> list[Any]:
        primals, cts = split(flat, len(types))
        run = lambda marked: pick(program(*put(primals, marks, marked)), wanted)
        _, back = jax.vjp(run, pick(primals, marks))
        return back(cts)[0]

    cts = [aval.to_ct_aval() for aval in pick(program.out_types, wanted)]
    names = [f"the cotangent of {name}" for name in pick(program.outputs, wanted)]
    outputs = [f"the cotangent of {name}" for name in pick(program.names, marks)]
    return Program(
        _trace(pull, [*types, *cts]), (*program.names, *names), tuple(outputs), True
    )


@functools.lru_cache(maxsize=256)
def batched(program: Program, axis_data: Any, dims: tuple[int | None, ...]) -> Program:
    """The program of a batch, whose outputs all have it along their leading axis."""
    types = [
        aval if dim is None else jex.unmapped_aval(axis_data.size, dim, aval)
        for aval, dim in zip(program.in_types, dims, strict=True)
    ]
    jaxpr = _trace(vmap(program, axis_data, dims, 0), types)
    return dataclasses.replace(program, jaxpr=jaxpr)


def _trace(f: Callable[..., Sequence[Any]], types: Sequence[Any]) -> jex.ClosedJaxpr:
    flat = lambda *args: list(map(strongly_typed, f(*args)))
    return jax.make_jaxpr(flat)(*types)
