"""What only moves entries, in NumPy: nothing is computed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ._scope import BlockScope, entry, objects, of_array


def _broadcast(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    for n, i in zip(a.shape, p["broadcast_dimensions"], strict=True):
        sizes[i] = n
    return np.broadcast_to(a.reshape(sizes), p["shape"])


def _sliced(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    steps = p["strides"] or [1] * a.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return a[tuple(slice(*map(int, bound)) for bound in bounds)]


def _padded(p: dict[str, Any], a: np.ndarray, value: np.ndarray) -> np.ndarray:
    config = [tuple(map(int, c)) for c in p["padding_config"]]
    sizes = [
        low + high + n + max(n - 1, 0) * within
        for n, (low, high, within) in zip(a.shape, config, strict=True)
    ]
    # What is cut off by negative padding is put in first.
    grown = [
        size + max(-low, 0) + max(-high, 0)
        for size, (low, high, _) in zip(sizes, config, strict=True)
    ]
    out = np.empty(grown, object)
    out.reshape(-1)[:] = objects([value[()]], ())
    at = [
        slice(max(low, 0), max(low, 0) + n + max(n - 1, 0) * w, w + 1)
        for n, (low, _, w) in zip(a.shape, config, strict=True)
    ]
    out[tuple(at)] = a
    cut = [
        slice(max(-low, 0), max(-low, 0) + size)
        for size, (low, _, _) in zip(sizes, config, strict=True)
    ]
    return out[tuple(cut)]


# What only moves entries, in NumPy: nothing is computed.
MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, a: a.reshape(p["new_sizes"]),
    "squeeze": lambda p, a: np.squeeze(a, tuple(p["dimensions"])),
    "transpose": lambda p, a: a.transpose(p["permutation"]),
    "rev": lambda p, a: np.flip(a, p["dimensions"]),
    "slice": _sliced,
    "concatenate": lambda p, *a: np.concatenate(a, p["dimension"]),
    "pad": _padded,
}


def moved(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    return [entry(MOVES[eqn.primitive.name](eqn.params, *ins))]


def iota(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    p = eqn.params
    n, axis = p["shape"][p["dimension"]], p["dimension"]
    row = (
        np.arange(n)
        .astype(p["dtype"])
        .reshape([-1 if i == axis else 1 for i in range(len(p["shape"]))])
    )
    return [of_array(np.broadcast_to(row, p["shape"]))]
