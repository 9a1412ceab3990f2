"""Sizes that are not known while tracing: `jax.export` traces with symbolic ones."""

from typing import Any

from jax import export


def is_symbolic(size: Any) -> bool:
    """Whether a size is not known."""
    return export.is_symbolic_dim(size)


def refuse_symbolic(owner: str, size: Any, need: str, instead: str) -> None:
    """Sees to it that a size is known.

    Args:
        owner: The name of what needs to know it, for error messages.
        size: The size.
        need: What it is needed for.
        instead: What to do instead.

    Raises:
        ValueError: If it is not known.
    """
    if is_symbolic(size):
        raise ValueError(
            f"{owner}: {need} takes a number that is known when tracing, but here it "
            f"is symbolic, {size}. {instead}."
        )
