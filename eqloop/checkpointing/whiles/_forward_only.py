"""Loops of any number of steps that are differentiated in forward mode alone."""

import dataclasses
from typing import NoReturn

from ..engine._problem import LoopSpec
from ._while_order import UNLIMITED


@dataclasses.dataclass(frozen=True)
class ForwardOnly:
    """A loop that has no reverse mode, since it may have any number of steps."""

    max_steps: int = UNLIMITED

    def layout(self, loop: "LoopSpec") -> NoReturn:
        raise ValueError(
            "WhileLoop cannot be differentiated in reverse mode (`jax.grad`, "
            "`jax.vjp`), as that needs memory for a number of steps that is unknown. "
            "Use `el.BoundedWhileLoop(cond, body, max_steps=...)` if there is a bound "
            "on the number of steps, `el.CheckpointedWhileLoop(cond, body)` if there "
            "is none, or forward mode (`jax.jvp`, `jax.jacfwd`)."
        )
