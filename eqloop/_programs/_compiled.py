"""How much memory a program takes, found by compiling it; nothing is run.

Some programs cannot be compiled by themselves. Then what they take is estimated, and
that is said. Whatever else goes wrong is an error: no fault is to be taken for that.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import Any, TypeVar

import jax

from .._device import as_by_jit, planning_device
from .._types import PyTree
from ._effects import axes_named, has_checks
from ._lowering import NoSuchDevicesError, lowered
from ._places import Place, place_now

_T = TypeVar("_T")

_said = set[str]()


class NotCompiledError(Exception):
    """A program cannot be compiled by itself, or not run; the message says why."""


@contextlib.contextmanager
def by_itself(*programs: tuple[Callable[..., PyTree], PyTree]) -> Iterator[None]:
    """A context in which programs are compiled by themselves, and maybe run.

    It raises `NotCompiledError` if it is no fault that this cannot be done.
    """
    try:
        with as_by_jit():
            yield
    except NotCompiledError:
        raise
    # What the compiler of a device refuses, and what a device has no room for.
    except (
        NotImplementedError,
        NoSuchDevicesError,
        jax.errors.JaxRuntimeError,
    ) as error:
        first, *_ = str(error).splitlines() or [""]
        raise NotCompiledError(f"{type(error).__name__}: {first}") from error
    except Exception as error:
        # JAX says in many ways that what is around a program is missing.
        missing = next(filter(None, starmap(_missing_around, programs)), None)
        if missing is None:
            raise
        raise NotCompiledError(missing) from error


def said_to_be_estimated(what: str, error: NotCompiledError) -> None:
    """Warns that something is estimated, and why: once for each reason."""
    text = f"{what} is estimated, as a program of it could not be compiled: {error}"
    if text not in _said:
        _said.add(text)
        here = place_now() or Place("<unknown>", 0, "")
        warnings.warn_explicit(f"eqloop: {text}", UserWarning, here.file, here.line)


def temporary_bytes(run: Callable[..., PyTree], *types: PyTree) -> int | None:
    """The bytes that a program allocates besides its inputs and outputs.

    They are those of one of the devices that it is split over. See `told_of`.
    """
    return told_of(allocated_bytes, run, *types)


def told_of(
    tell: Callable[[jax.stages.Compiled], _T],
    run: Callable[..., PyTree],
    *types: PyTree,
) -> _T | None:
    """What can be told of a program when it is compiled.

    `None` if it cannot be compiled by itself, as with the axis of a `vmap` around it.
    """
    try:
        with by_itself((run, types)):
            return tell(lowered(run, *types).compile(quick_options()))
    except NotCompiledError as error:
        said_to_be_estimated("The memory of a plan", error)
        return None


def allocated_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes that a compiled program allocates besides its inputs and outputs."""
    analysis: Any = compiled.memory_analysis()
    if analysis is None:
        kind = planning_device().kind
        raise NotCompiledError(f"the compiler for {kind} does not tell its memory.")
    return analysis.temp_size_in_bytes


def _missing_around(run: Callable[..., PyTree], types: PyTree) -> str | None:
    """What has to be around a program, if anything is missing."""
    try:
        effects = jax.make_jaxpr(run)(*types).effects
    except NameError as error:  # an axis whose `vmap` is over
        return str(error)
    manual: Any = jax.sharding.get_abstract_mesh().manual_axes
    if axes := axes_named(effects) - set(manual):
        names = ", ".join(sorted(map(repr, axes)))
        return f"it has a collective over {names}, the axis of a `vmap` around it."
    if has_checks(effects):
        return "it has a `checkify.check`, and `checkify` is around it."
    return None


def quick_options() -> dict[str, Any]:
    """Options by which a program that is never run compiles quickly."""
    # XLA assigns memory before LLVM generates code, so this code need not be fast. No
    # pass of XLA is left out: each one moves what is next to what in memory. Without
    # that which makes one function of a small loop, a gradient took 5 % less.
    on_cpu = planning_device().platform == "cpu"
    return {"xla_backend_optimization_level": "0"} if on_cpu else {}
