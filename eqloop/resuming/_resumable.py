"""`Resumable`: a scan that goes on where an earlier process was when it ended."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex, final

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp

from .._settings import as_count
from .._transform import AbstractTransform, setting
from .._typecheck import PRNGKey, PyTree, typed
from ..loops import AbstractScan, CheckpointedScan, Scan
from ..progress import ProgressBar, as_progress, check_progress
from ._gradient_call import GradientCall, as_wrt
from ._open_run import OpenedRun, open_run
from ._status import RunStatus


def _counted_by(name: str, what: str) -> Callable[[SupportsIndex], int]:
    return functools.partial(as_count, "Resumable", name, what)


def _path(directory: Any) -> Any:
    return os.fspath(directory) if isinstance(directory, os.PathLike) else directory


@final
class Resumable(AbstractTransform):
    """A scan in segments, with all on disk that is needed to go on with it.

    It is called from Python, not in a function that is compiled. Each segment is one
    compiled call. After it the carry is on disk, and so are the `ys`. If the process
    ends, in whatever way, the same call with the same arguments goes on after the last
    segment that was finished. The result is that of a run that nothing has interrupted,
    to the last bit; and that of `scan(init, xs, key=key)`, with the same key for each
    step, up to rounding.

    Args:
        f: The scan: a [`Scan`][eqloop.Scan] or a
            [`CheckpointedScan`][eqloop.CheckpointedScan].
        directory: Where it is stored: a directory of this run alone, which is made if
            it is not there. It holds JSON and `.npy` files.
        every: How many steps a segment has; the last one may have fewer.
        keep: How many carries are kept on disk. For a gradient, all are.
        ys: Where the `ys` are in the end: in `"memory"`, as arrays of JAX, or in the
            `"directory"`, as memory maps of `.npy` files.
        progress: Shows a progress bar, which moves after each segment and goes on where
            it was: as for the scan, whose own setting is used if this is not given.

    Raises:
        TypeError: If `f` is no such scan, or a setting is not of its type.
        ValueError: If `every` or `keep` is less than 1, or `ys` is something else.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(lambda total, x: (total + x, total))
        >>> run = el.Resumable(scan, tempfile.mkdtemp(), every=1000)
        >>> total, path = run(jnp.zeros(()), jnp.ones(2500))
        >>> total, path.shape
        (Array(2500., dtype=float32), (2500,))
        >>> print(run.status())
        2500 of 2500 steps were run
    """

    f: AbstractScan[Any, Any]  # pyright: ignore[reportIncompatibleMethodOverride]
    directory: str = eqx.field(static=True, converter=_path)
    every: int = eqx.field(
        static=True,
        kw_only=True,
        converter=_counted_by("every", "the steps of a segment"),
    )
    keep: int = setting(
        default=2, converter=_counted_by("keep", "the carries that are kept")
    )
    ys: str = setting(default="memory")
    progress: ProgressBar | None = setting(default=None, converter=as_progress)

    @typed
    def __call__(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
    ) -> tuple[Any, Any]:
        """Runs the loop, or what is left of it.

        Args:
            init: The carry of the first step.
            xs: What is scanned: arrays, `numpy.memmap`s or whatever else has a shape, a
                dtype and slices; or a function `(start, stop) -> xs` that gives the
                elements for these steps, each time the same. It is read a segment
                ahead, on a thread, and never whole.
            length: How many steps; needed if `xs` does not say it.
            key: A PRNG key, as for the scan.

        Returns:
            The last carry, and `ys`.

        Raises:
            TypeError: As the scan does; and in a function that is compiled or
                differentiated.
            ValueError: As the scan does. If the directory holds another run, something
                else or a damaged file: then nothing in it is changed.
            RuntimeError: If another run is in the directory.
            OSError: If something cannot be read or written. What was finished is kept.
        """
        run = self._open(init, xs, length, key)
        with run.held():
            return self._forward(run, keep=self.keep)

    @typed
    def value_and_grad(
        self, loss: Callable[..., Any], *, argnums: Any = "f", has_aux: bool = False
    ) -> Callable[..., Any]:
        """The gradient of a loss of what the loop returns, through all of the loop.

        The carries that segments start with stay on disk. Segments are reversed from
        the last one to the first, each under the scan's own schedule; after each the
        cotangents are on disk, so that the way back too goes on where it was.

        Args:
            loss: A function `loss(carry, ys) -> value`, which is compiled. `ys` that it
                uses are held in memory, and so are their cotangents: what the whole of
                a long loop is to be judged by is best summed up in the carry.
            argnums: What to differentiate by: `"f"` for the parameters of the scan,
                `"init"` or 0, `"xs"` or 1, or a tuple of these.
            has_aux: Whether the loss returns a pair of the value and anything else.

        Returns:
            A function of the arguments of the call that returns `(value, gradient)`, or
            `((value, aux), gradient)`, as [`jax.value_and_grad`][] does. A gradient is
            a tree as what it is of, with `None` for leaves that have none. That of what
            is scanned of `xs` is in memory maps.

        Raises:
            TypeError: When called, as the loop does, and if the loss does not return a
                scalar.
            ValueError: If `argnums` is something else; when called, as the loop does,
                and if the directory holds the cotangents of another loss.
        """
        wrt = as_wrt(argnums)

        @typed
        def value_and_grad(
            init: PyTree,
            xs: PyTree = None,
            *,
            length: SupportsIndex | None = None,
            key: PRNGKey | None = None,
        ) -> tuple[Any, Any]:
            run = self._open(init, xs, length, key)
            with run.held():
                run.run_forward(None, self._progress, in_memory=False)
                gradient = GradientCall(run, wrt)
                value, cts = gradient.differentiate(loss, has_aux)
                return value, gradient.back(*cts, self._progress)

        return value_and_grad

    @typed
    def vjp(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
        argnums: Any = ("f", "init"),
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Runs the loop, and returns what pulls cotangents back through it.

        Args:
            init: As for the call.
            xs: As for the call.
            length: As for the call.
            key: As for the call.
            argnums: What cotangents are wanted of, as for `value_and_grad`.

        Returns:
            `((carry, ys), pull)`. `pull((ct_carry, ct_ys))` takes trees as the carry
            and `ys`, with `None` for leaves that have no cotangent, or for all of one
            of the two. It returns what `argnums` asks for.

        Raises:
            TypeError: As the call does.
            ValueError: As the call does.
            RuntimeError: As the call does.
            OSError: As the call does.
        """
        wrt = as_wrt(argnums)
        run = self._open(init, xs, length, key)
        with run.held():
            out = self._forward(run, keep=None)

        def pull(cotangents: Any) -> Any:
            gradient = GradientCall(run, wrt)
            cts = gradient.take(cotangents)
            with run.held():
                return gradient.back(*cts, self._progress)

        return out, pull

    def status(self) -> RunStatus:
        """How far the run in the directory has come. It may be running.

        Returns:
            A [`RunStatus`][eqloop.resuming.RunStatus]: the number of steps, of those
            that were run, and of those that were reversed.

        Raises:
            ValueError: If there is something else in the directory.
        """
        return RunStatus.read(Path(self.directory))

    def _open(self, init: Any, xs: Any, length: Any, key: Any) -> OpenedRun:
        _refuse_traced((self, init, xs, key))
        return open_run(
            dataclasses.replace(self.f, progress=None),
            init,
            xs,
            length=length,
            key=key,
            every=self.every,
            directory=Path(self.directory),
            settings={"every": self.every, "ys": self.ys},
        )

    def _forward(self, run: OpenedRun, keep: int | None) -> tuple[Any, Any]:
        in_memory = self.ys == "memory"
        return run.run_forward(keep, self._progress, in_memory=in_memory)

    @property
    def _progress(self) -> ProgressBar | None:
        return self.f.progress if self.progress is None else self.progress

    def __check_init__(self) -> None:
        if not isinstance(self.f, Scan | CheckpointedScan):
            raise TypeError(
                f"Resumable: the first argument must be an `el.Scan` or an "
                f"`el.CheckpointedScan`, not {_what(self.f)}. A loop without a carry "
                f"is a scan whose carry is None; slices of `ys` are taken afterwards."
            )
        if not isinstance(self.directory, str) or not self.directory:
            raise TypeError(
                f"Resumable: `directory` must be a path, not {self.directory!r}."
            )
        if self.ys not in ("memory", "directory"):
            raise ValueError(
                f'Resumable: `ys` must be "memory" or "directory", not {self.ys!r}.'
            )
        check_progress("Resumable", self.progress)


def _what(f: Any) -> str:
    return type(f).__name__ if isinstance(f, AbstractTransform) else repr(f)


def _refuse_traced(tree: Any) -> None:
    leaves = jax.tree.leaves(tree)
    # What is made in a function that is compiled is a tracer, whatever it is made of.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*leaves, jnp.zeros(())]):
        raise TypeError(
            "Resumable: it is called from Python, not in a function that is compiled, "
            "mapped or differentiated: it writes to the disk between its segments, "
            "each of which is compiled. For a gradient use `.value_and_grad(loss)` or "
            "`.vjp`."
        )
