"""Solves inside of a checked `jax.shard_map`, each device stopping at its own time.

Solvers start from numbers that are the same on all devices, and their branches and
loops return such that are not. JAX refuses that, as their types differ. So a solve is
traced as if everything were the same on all devices, and then everything gets the types
that it has where nothing is.
"""

from collections.abc import Callable

import jax

from .._arrays import axes_of, explicit_sharding, partition, vary
from .._programs import CannotVaryError, run, varied
from .._types import Aval, PyTree, Value
from ..checkpointing import trace_step


def on_each_device(f: Callable[[PyTree], PyTree], args: PyTree) -> PyTree:
    """Calls a function whose loops may mix what devices share and do not."""
    # All arrays of the result differ along the axes that any argument differs along.
    arrays, rest = partition(args)
    axes = frozenset[str]().union(*map(axes_of, arrays))
    if not axes or any(explicit_sharding(x) is not None for x in arrays):
        return f(args)
    results = list[PyTree]()

    def on_arrays(
        _: list[Value], arrays: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        taken, result = partition(f(rest.join(arrays)))
        results.append(result)
        return [], taken

    step, consts = trace_step(on_arrays, [], list(map(_same_everywhere, arrays)))
    try:
        program = varied(step.jaxpr, axes)
    except CannotVaryError:
        return f(args)  # for JAX to judge
    outs = run(program, *(vary(x, axes) for x in (*consts, *arrays)))
    return results[-1].join(outs)


def _same_everywhere(x: Value) -> Aval:
    """The type of an array, as it is if all devices have the same."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
