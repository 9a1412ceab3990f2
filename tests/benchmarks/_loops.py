"""Loops to compare, ours and the peers', behind the signature of `jax.lax.scan`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
from jax import lax

import eqloop as el
from eqloop.checkpointing import AbstractSchedule

from ._measure import Case


@dataclasses.dataclass(frozen=True)
class Loop:
    """A way to run a step over `xs`.

    Args:
        name: how tables call it, with its settings.
        line: how plots call it, whatever its settings.
        run: `(f, init, xs) -> (carry, ys)`.
        requires: the package that it is from, if that may be missing.
    """

    name: str
    line: str
    run: Callable[..., Any]
    requires: str | None = None

    def case(
        self, use: Callable[[Callable[..., Any]], Any], args: tuple[Any, ...]
    ) -> Case:
        """The case that makes some `use` of this loop: its gradient, say."""
        return Case(self.name, use(self.run), args, self.requires, self.line)


def ours(schedule: AbstractSchedule) -> Loop:
    """This project's scan under a schedule."""
    name = _spelled(schedule)
    return Loop(
        name,
        "Budget" if isinstance(schedule, el.Budget) else name,
        lambda f, init, xs: el.Scan(f, schedule=schedule)(init, xs),
    )


def _spelled(schedule: Any) -> str:
    """A schedule as one writes it down, without the names of its settings."""
    settings = [getattr(schedule, field.name) for field in dataclasses.fields(schedule)]
    match schedule:
        case el.Budget(nbytes):
            settings = [nbytes if nbytes % 1024 else _binary(nbytes)]
        case el.Binomial(first, block=1) | el.Chunked(first, batch=1):
            settings = [first]
        case el.Recursive(base, batch=None):
            settings = [base]
    return f"{type(schedule).__name__}({', '.join(map(repr, settings))})"


def _binary(nbytes: int) -> str:
    mebi = 2**20
    return f"{nbytes // 1024}KiB" if nbytes % mebi else f"{nbytes // mebi}MiB"


def _peer(
    name: str, line: str, run: Callable[..., Any], requires: str | None = None
) -> Loop:
    """A loop that wants a hashable function, which a module of arrays is not."""
    return Loop(
        name,
        line,
        lambda f, init, xs: run(lambda carry, x: f(carry, x), init, xs),
        requires,
    )


def lax_scan() -> Loop:
    """JAX's own scan: every residual of every step is stored."""
    return _peer("`lax.scan`", "lax.scan", lax.scan)


def lax_scan_of_remat() -> Loop:
    """JAX's own scan of a checkpointed step: every carry is stored."""

    def run(f, init, xs):
        return lax.scan(jax.checkpoint(f, prevent_cse=False), init, xs)

    name = "`lax.scan`, `jax.checkpoint` on the step"
    return _peer(name, "jax.checkpoint", run)


def nested(*lengths: int) -> Loop:
    """Checkpointed scans nested by hand, the step checkpointed too."""

    def run(f, init, xs):
        blocks = jax.tree.map(lambda x: x.reshape(*lengths, *x.shape[1:]), xs)
        body = jax.checkpoint(f, prevent_cse=False)
        for _ in lengths[1:]:
            body = _checkpointed_scan(body)
        carry, ys = lax.scan(body, init, blocks)
        flat = (math.prod(lengths),)
        n = len(lengths)
        return carry, jax.tree.map(lambda y: y.reshape(flat + y.shape[n:]), ys)

    return _peer(f"nested by hand, {' x '.join(map(str, lengths))}", "by hand", run)


def _checkpointed_scan(body: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(
        lambda carry, xs: lax.scan(body, carry, xs), prevent_cse=False
    )


def equinox(checkpoints: int | None = None) -> Loop:
    """Equinox's internal scan, online treeverse."""

    def run(f, init, xs):
        return eqxi.scan(f, init, xs, kind="checkpointed", checkpoints=checkpoints)

    slots = "default slots" if checkpoints is None else f"{checkpoints} slots"
    return _peer(f"Equinox internal, {slots}", "Equinox", run)


def powerpax(chunk_size: int) -> Loop:
    """powerpax's scan with a checkpoint every so many steps."""

    def run(f, init, xs):
        import powerpax

        return powerpax.checkpoint_chunked_scan(f, init, xs, chunk_size=chunk_size)

    return _peer(f"powerpax, chunks of {chunk_size}", "powerpax", run, "powerpax")


def brainstate(base: int) -> Loop:
    """brainstate's nested scan of padded length."""

    def run(f, init, xs):
        import brainstate

        return brainstate.transform.checkpointed_scan(f, init, xs, base=base)

    return _peer(f"brainstate, base {base}", "brainstate", run, "brainstate")
