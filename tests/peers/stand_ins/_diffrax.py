"""What takes the place of the adjoint that Diffrax differentiates a solve by."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def adjoint_replaced() -> Iterator[None]:
    """Inside, `CheckpointedAdjoint` is the default of `diffrax.diffeqsolve`.

    So it is for tests that name `diffrax.RecursiveCheckpointAdjoint` themselves.
    What Diffrax solves for itself, in `BacksolveAdjoint` for example, is as it was.
    """
    # Not at the top: Diffrax's options have jaxtyping check it, and so it must not be
    # imported before pytest is configured.
    import diffrax

    from eqloop.diffrax import CheckpointedAdjoint

    theirs = diffrax.diffeqsolve

    @functools.wraps(theirs)
    def diffeqsolve(*args: Any, **settings: Any) -> Any:
        return theirs(*args, **{"adjoint": CheckpointedAdjoint(), **settings})

    with (
        mock.patch.object(diffrax, "diffeqsolve", diffeqsolve),
        mock.patch.object(diffrax, "RecursiveCheckpointAdjoint", CheckpointedAdjoint),
    ):
        yield
