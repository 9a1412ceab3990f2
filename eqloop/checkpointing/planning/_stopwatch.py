"""How long programs take: they are compiled, and run on numbers that are made up."""

import concurrent.futures
import math
import os
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..._device import planning_device
from ..._types import PyTree, Value
from ..engine.slots._slots import key_impl

# How long all programs together are run, in seconds; longer if it takes that for a few
# runs of each.
_ENOUGH = 0.3
_FEWEST_RUNS, _MOST_RUNS = 3, 15


def nanoseconds(
    programs: Sequence[tuple[Callable[..., PyTree], Value]],
) -> list[float] | None:
    """How long each program takes, at best.

    They are run in turn, so that what disturbs the machine disturbs all of them alike.
    Nothing of it is a part of a program that is being traced.

    Args:
        programs: Functions, with the types of their arguments.

    Returns:
        The times, or `None` if a program cannot be compiled by itself, as what has a
        collective cannot, or if the device that plans are for is not here.
    """
    device = planning_device()
    if not device.is_here:
        return None
    on_device = jax.default_device(device.own)
    try:
        # Checks of results would be made of numbers that mean nothing.
        with jax.debug_nans(False), jax.debug_infs(False), on_device:
            ready = _ready(programs)
            # What a callback is given would be a part of the program being traced, too.
            with jax.ensure_compile_time_eval():
                return _best_times(ready)
    except Exception:
        return None


def _ready(programs: Sequence[Value]) -> list[tuple[Value, Value]]:
    """Programs and their arguments. What is compiled can be called while tracing."""
    lowered = [jax.jit(run).lower(*types) for run, types in programs]
    # Their arguments are made by a program, too: arrays that were made in any other way
    # would be a part of the program that is being traced. Those that are alike are made
    # once.
    arrays = [jax.tree.flatten(types) for _, types in programs]
    kinds = list(dict.fromkeys(kind for leaves, _ in arrays for kind in leaves))
    maker = jax.jit(lambda: list(map(_made_up, kinds))).lower()
    # XLA compiles without holding Python up.
    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        *runs, make = pool.map(lambda one: one.compile(), [*lowered, maker])
    made = dict(zip(kinds, make(), strict=True))
    arguments = (
        tree.unflatten([made[kind] for kind in leaves]) for leaves, tree in arrays
    )
    return list(zip(runs, arguments, strict=True))


def _best_times(programs: list[tuple[Value, Value]]) -> list[float]:
    best = [math.inf] * len(programs)
    start = time.perf_counter()
    for turn in range(1 + _MOST_RUNS):
        for i, (run, args) in enumerate(programs):
            before = time.perf_counter()
            jax.block_until_ready(run(*args))
            # The first time, memory is touched that was never used before.
            if turn:
                best[i] = min(best[i], time.perf_counter() - before)
        if turn >= _FEWEST_RUNS and time.perf_counter() - start > _ENOUGH:
            break
    return [1e9 * seconds for seconds in best]


def _made_up(aval: Value) -> Value:
    """Small numbers of this type, with which few steps blow up."""
    shape, dtype = aval.shape, aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        zeros = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        data = jnp.zeros(zeros.shape, zeros.dtype)
        return jax.random.wrap_key_data(data, impl=key_impl(dtype))
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(shape, dtype)
    # All different, as zeros or equal numbers might be a special case.
    size = math.prod(shape)
    numbers = (jnp.arange(size) % 97).astype(jnp.float32) * 1e-3 + 0.01
    return numbers.astype(dtype).reshape(shape)
