"""What only moves entries, in NumPy: nothing is computed."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ._scope import BlockScope, objects


def _broadcast(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    sizes = [1] * len(p["shape"])
    for n, i in zip(a.shape, p["broadcast_dimensions"], strict=True):
        sizes[i] = n
    return np.broadcast_to(a.reshape(sizes), p["shape"])


def _sliced(p: dict[str, Any], a: np.ndarray) -> np.ndarray:
    steps = p["strides"] or [1] * a.ndim
    bounds = zip(p["start_indices"], p["limit_indices"], steps, strict=True)
    return a[tuple(slice(*map(int, bound)) for bound in bounds)]


def _put(p: dict[str, Any], a: np.ndarray, new: np.ndarray, *at: Any) -> np.ndarray:
    out, places = a.copy(), [int(x[()]) for x in at]
    pairs = zip(places, new.shape, strict=True)
    out[tuple(slice(i, i + n) for i, n in pairs)] = new
    return out


# What only moves entries, in NumPy: nothing is computed.
MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda p, a: a.reshape(p["new_sizes"]),
    "squeeze": lambda p, a: np.squeeze(a, tuple(p["dimensions"])),
    "transpose": lambda p, a: a.transpose(p["permutation"]),
    "rev": lambda p, a: np.flip(a, p["dimensions"]),
    "slice": _sliced,
    "concatenate": lambda p, *a: np.concatenate(a, p["dimension"]),
    "dynamic_update_slice": _put,
}


def moved(scope: BlockScope, eqn: Any, ins: list[np.ndarray]) -> list[np.ndarray]:
    made = MOVES[eqn.primitive.name](eqn.params, *ins)
    # NumPy gives one entry as it is.
    return [made if isinstance(made, np.ndarray) else objects([made], ())]
