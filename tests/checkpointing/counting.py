"""How often, and where, a loop evaluates its step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqloop as el


class Counter:
    """A step that counts its evaluations, each at its place in the loop."""

    def __init__(self, ordered: bool = False):
        self.places: list[int] = []
        self.ordered = ordered

    def __call__(self, carry: Any, x: Any) -> tuple[Any, Any]:
        h, place = carry
        # It must depend on the carry: otherwise XLA may well hoist it out of a loop.
        jax.debug.callback(self._note, place, ordered=self.ordered)
        return (jnp.sin(h + x), place + 1), h

    def _note(self, place: np.ndarray) -> None:
        self.places.append(int(place))

    def evaluations(self, f: Callable[..., Any], *args: Any) -> list[int]:
        """The places that are evaluated while a function is run."""
        self.places.clear()
        jax.block_until_ready(jax.jit(f)(*args))
        jax.effects_barrier()
        return self.places


def final(step: Any, schedule: Any, length: int, **settings: Any) -> Any:
    """The last carry, as a function of the first and of `xs`."""
    scan = el.Scan(step, schedule=schedule, **settings)
    return lambda h, xs: scan((h, 0), xs, length=length)[0][0]


def count_gradient(schedule: Any, length: int, **settings: Any) -> list[int]:
    step = Counter()
    loss = final(step, schedule, length, **settings)
    return step.evaluations(jax.grad(loss), 0.5, jnp.ones(length))
