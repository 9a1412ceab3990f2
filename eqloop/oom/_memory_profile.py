"""`memory_profile`: what is alive where a function takes the most memory."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from .._arrays import is_typed, partition, refuse_symbolic_plan
from .._calls import KnownAs, OpenedCall, call_names, typed
from .._compiled import CompiledProgram, compiled, with_all_frames
from .._device import DeviceLike, check_device, planning_device, planning_for_call
from .._programs import allocated_bytes, lowered
from .._tracebacks import border
from .._types import PyTree, Value
from ..checkpointing import plans
from ._profile import MemoryProfile, profile_of

# What JAX calls an input of a program that is lowered here.
_INPUT = re.compile(r"flat\[(\d+)\]")


@typed(instead="Call the result with f's arguments: `el.memory_profile(f)(*args)`.")
def memory_profile(
    f: Callable[..., PyTree], *, device: DeviceLike | None = None
) -> Callable[..., MemoryProfile]:
    """Compiles a function, and tells what is alive where it takes the most memory.

    Nothing is run, so this is what to call if a program dies with
    `RESOURCE_EXHAUSTED: Out of memory`. Sizes are those that XLA has assigned, on each
    device if arrays are split over several. Each array comes with the line of your
    program that made it, also if that is on the way back, in a loop, or in a library.

    If `f` is a compiled function, such as `jax.jit(f, donate_argnums=0)`, inputs are
    donated as it says.

    Args:
        f: Any function, a training step for example.
        device: What to compile for, as for [`planning_for`][eqloop.planning_for]: by
            default, the device on which `f` would run.

    Returns:
        A function of the arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for
        an array. It returns a [`MemoryProfile`][eqloop.MemoryProfile]. Printed, it is
        a table of ten lines, with what would take less.

    Raises:
        TypeError: If `f` is not callable.
        RuntimeError: When called, if the compiler for the device does not write
            down which memory it assigns.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(w, x):
        ...     hidden = jnp.tanh(x @ w)
        ...     return jnp.sum(jax.nn.log_softmax(hidden @ w.T)[:, 0])
        >>> w, x = jnp.ones((64, 4096)), jnp.ones((512, 64))
        >>> profile = el.memory_profile(jax.grad(loss))(w, x)
        >>> profile.largest.shape, profile.largest.place.function
        ((512, 4096), 'loss')
        >>> print(profile)
        loss: ... MiB at the peak, ... MiB in all, on cpu
        ...
    """
    check_device("memory_profile", device)

    @border
    @functools.wraps(f)
    def profile(*args: PyTree, **kwargs: PyTree) -> MemoryProfile:
        arrays, rest = partition((f, args, kwargs), is_typed)
        refuse_symbolic_plan("memory_profile", arrays)
        names = call_names(f, args, kwargs, rest.taken)
        call = lambda f, args, kwargs: f(*args, **kwargs)
        take = lambda out: (eqx.filter(out, eqx.is_array), None)
        known = KnownAs("jit", f, names)
        run = OpenedCall(rest.join, call, take, known).on_arrays
        own = inspect.unwrap(f)
        own = own.func if isinstance(own, functools.partial) else own
        name = getattr(own, "__name__", type(own).__name__)
        of_loops = functools.partial(plans(f, device=device), *args, **kwargs)
        with planning_for_call(device, arrays):
            donated = () if inspect.isfunction(f) else _donated(run, arrays)
            with with_all_frames():
                program, done = compiled(lowered(run, arrays, donated=donated))
            kind, size = planning_device().kind, allocated_bytes(done)
            inputs = _inputs(program, names)
            return profile_of(program, name, kind, inputs, size, of_loops)

    return profile


def _donated(run: Callable[..., PyTree], arrays: Sequence[Value]) -> tuple[int, ...]:
    """Which of its inputs a compiled function gives away."""
    program = jax.make_jaxpr(run)(arrays).jaxpr
    found = set[Any]()
    for eqn in program.eqns:
        flags = eqn.params.get("donated_invars", ())
        found.update(x for x, flag in zip(eqn.invars, flags, strict=False) if flag)
    return tuple(i for i, x in enumerate(program.invars) if x in found)


def _inputs(program: CompiledProgram, names: Sequence[str]) -> Mapping[int, str]:
    """The paths of the inputs of a program, as far as JAX has left these there."""
    found = dict[int, str]()
    for number, parameter in program.parameters.items():
        index = _INPUT.search(parameter.scope)
        if index is not None and int(index.group(1)) < len(names):
            found[number] = names[int(index.group(1))]
    return found
