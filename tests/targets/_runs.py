"""Runs cases on a device that is here, to see that they are right.

Several processes compile and run them side by side. `tests.on_gpu` takes times.
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ._cases import GROUPS, Case
from ._verdicts import Found, judged

# A result may differ from that of plain JAX by so much, relative to the greatest entry
# of its array, or by more if carries are stored in bfloat16.
TOLERANCE, TOLERANCE_OF_CASTS = 1e-3, 5e-2

# Group and name of a case.
Key = tuple[str, str]


def run_all(
    platform: str, length: int, keys: Sequence[Key], workers: int, within: float
) -> Iterator[tuple[Key, Found]]:
    """Compiles and runs cases in several processes.

    Args:
        platform: The device to run on.
        length: How many steps the loops have.
        keys: The cases, by group and name.
        workers: How many processes.
        within: In how many seconds the last of them is begun. What is left is not run.

    Yields:
        Each case as it is found.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = list[Any](), list[Any]()
    # It grows with what programs take, and the processes share the device.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    for turn in range(workers):
        ours, theirs = context.Pipe()
        share = platform, length, keys[turn::workers], within
        process = context.Process(target=_work, args=(*share, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    yield from _said(pipes)
    for process in processes:
        process.join()


def _said(pipes: Sequence[Any]) -> Iterator[Any]:
    """What comes from all processes, until each has said that it is done."""
    left = list(pipes)
    while left:
        ready: list[Any] = multiprocessing.connection.wait(left)
        for pipe in ready:
            try:
                said = pipe.recv()
            except EOFError:  # It was killed.
                said = None
            if said is None:
                left.remove(pipe)
            else:
                yield said


def _work(
    platform: str, length: int, keys: Sequence[Key], within: float, pipe: Any
) -> None:
    """What each process does."""
    end = time.monotonic() + within
    jax.config.update("jax_default_device", jax.devices(platform)[0])
    # By default a GPU rounds what it multiplies, in each program in another order.
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        for key, case in _cases(length, keys):
            if time.monotonic() > end:
                break
            pipe.send((key, _found(case)))
        pipe.send(None)
    except BrokenPipeError:  # Nobody listens any more.
        return


def _cases(length: int, keys: Sequence[Key]) -> Iterable[tuple[Key, Case]]:
    for group in dict.fromkeys(group for group, _ in keys):
        for case in GROUPS[group](length):
            if (group, case.name) in keys:
                yield (group, case.name), case


def _found(case: Case) -> Found:
    found, compiled = judged(case)
    if compiled is None:
        return found
    values = case.make() if case.make else _drawn(case.args)
    flat = jax.device_put(jax.tree.leaves(values))
    try:
        result = jax.block_until_ready(compiled(*flat))
        expected = _expected(case, values)
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        wrong = f"{type(error).__name__}: {first[:200]}"
        return dataclasses.replace(found, wrong=(*found.wrong, wrong))
    difference, wrong = _difference(result, expected), found.wrong
    if difference > (TOLERANCE_OF_CASTS if "Cast" in case.name else TOLERANCE):
        wrong = (*wrong, f"{difference:.1e} from what it should be")
    return dataclasses.replace(found, error=difference, wrong=wrong)


def _expected(case: Case, values: Any) -> Any:
    """What plain JAX computes, or else the host."""
    if case.plain:
        return jax.jit(case.plain)(*values)
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(case.function)(*jax.device_get(values))


def _drawn(types: Any) -> Any:
    """Arrays of these types: weights so small that no step is chaotic."""
    draw = np.random.default_rng(0)

    def of(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        rows, columns = (1, *leaf.shape)[-2:]
        scale = columns**-0.5 if rows == columns else 0.1
        return (scale * draw.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(of, types)


def _difference(result: Any, expected: Any) -> float:
    """The greatest difference, relative to the greatest entry of its array."""

    def of(one: Any, other: Any) -> float:
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = float(np.max(np.abs(other), initial=0.0)) or 1.0
        error = float(np.max(np.abs(one - other), initial=0.0)) / scale
        return error if np.isfinite(error) else float("inf")

    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return max((of(one, other) for one, other in pairs), default=0.0)
