"""JAX's flags for its next forms of checkpoints, names and custom rules."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import pytest

FLAGS = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3")
# None of them, each alone, and all together.
SETS = [(), *((flag,) for flag in FLAGS), FLAGS]

only_with_flags = pytest.mark.skipif(
    not hasattr(jax.config, FLAGS[0]), reason="JAX before 0.12 has no such flags"
)


@contextlib.contextmanager
def turned_on(flags: Sequence[str]) -> Iterator[None]:
    """These flags are on, and the others off."""
    before = {flag: getattr(jax.config, flag) for flag in FLAGS}
    try:
        for flag in FLAGS:
            jax.config.update(flag, flag in flags)
        yield
    finally:
        for flag, value in before.items():
            jax.config.update(flag, value)


def names_of(flags: Sequence[str]) -> str:
    """A name for a set of flags, for the id of a case."""
    return "+".join(flag.removeprefix("jax_") for flag in flags) or "none"
