"""Which of our loops takes the place of which of theirs.

Every variant computes the same, so that one suite tests several schedules.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import eqloop as el


@dataclasses.dataclass(frozen=True)
class Variant:
    """Our loops, as a suite is to see them.

    Attributes:
        schedule: How scans are differentiated, and `fori_loop`s of known length.
        while_loop: From `cond` and `body` to a loop.
        map: From a function and a batch size, or none, to a map.
    """

    schedule: Any
    while_loop: Callable[[Callable[..., Any], Callable[..., Any]], Any]
    map: Callable[[Callable[..., Any], int | None], Any]


def _map(f: Callable[..., Any], batch_size: int | None) -> Any:
    return el.Map(f, batch_size=batch_size)


def _chunked_vmap(f: Callable[..., Any], batch_size: int | None) -> Any:
    return el.ChunkedVmap(f, batch_size or 2)


def _checkpointed(cond: Callable[..., Any], body: Callable[..., Any]) -> Any:
    return el.CheckpointedWhileLoop(cond, body, checkpoints=3)


# Small numbers, for their loops are short, and are to be cut all the same.
VARIANTS = {
    "plain": Variant(el.StoreAll(), el.WhileLoop, _map),
    "recursive": Variant(el.Recursive(2), el.WhileLoop, _chunked_vmap),
    "binomial": Variant(el.Binomial(2), _checkpointed, _map),
    "chunked": Variant(el.Chunked(2), _checkpointed, _chunked_vmap),
}
