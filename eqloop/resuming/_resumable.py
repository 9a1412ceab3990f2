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

from .._calls import AbstractTransform, as_count, setting, typed
from .._types import PRNGKey, PyTree
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
    """A scan in segments, which another process can continue from files.

    Call it from Python, and not in a compiled function. Each segment is one compiled
    call. After each segment the carry and the `ys` are on disk. If the process ends for
    any reason, the same call with the same arguments continues after the last finished
    segment. The result is the same as without an interruption, to the last
    bit. Up to rounding, it is that of `scan(init, xs, key=key)`, with the same key for
    each step.

    Args:
        f: The scan: a [`Scan`][eqloop.Scan] or a
            [`CheckpointedScan`][eqloop.CheckpointedScan].
        directory: Where it is stored: a directory for this run alone, which is made if
            it does not exist. It contains JSON and `.npy` files.
        every: How many steps a segment has; the last one may have fewer.
        keep: How many carries are kept on disk. For a gradient, all are.
        ys: What the call returns as `ys`: with `"memory"` arrays of JAX, and with
            `"directory"` memory maps of `.npy` files.
        progress: Shows a progress bar, which moves after each segment; a resumed run
            continues it. By default the setting of the scan is used.

    Raises:
        TypeError: If `f` is not such a scan, or a setting is not of its type.
        ValueError: If `every` or `keep` is less than 1, or `ys` is neither of the two.

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
    every: int = setting(converter=_counted_by("every", "the steps of a segment"))
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
    ) -> tuple[PyTree, PyTree]:
        """Runs the loop, or what is left of it.

        Args:
            init: The carry of the first step.
            xs: What is scanned: arrays, `numpy.memmap`s, or anything else that has a
                shape and a dtype and can be sliced; or a function `(start, stop) -> xs`
                that returns the elements for these steps, the same each time. A thread
                reads it one segment ahead, and never all of it.
            length: How many steps; needed if `xs` does not say it.
            key: A PRNG key, as for the scan.

        Returns:
            The last carry, and `ys`.

        Raises:
            TypeError: As the scan does, and if it is called in a function that is
                compiled or differentiated.
            ValueError: As the scan does, and if the directory contains another run, a
                damaged file, or something else. Then nothing in it is changed.
            RuntimeError: If another process is running in the directory.
            OSError: If something cannot be read or written. Segments that were finished
                are kept.
        """
        run = self._open(init, xs, length, key)
        with run.held():
            return self._forward(run, keep=self.keep)

    @typed
    def value_and_grad(
        self,
        loss: Callable[..., PyTree],
        *,
        argnums: PyTree = "f",
        has_aux: bool = False,
    ) -> Callable[..., PyTree]:
        """The gradient of a loss of what the loop returns, through the whole loop.

        The carries at the starts of the segments stay on disk. Segments are reversed
        from the last one to the first, each under the scan's own schedule. After each
        segment the cotangents are on disk, so the backward pass can be resumed, too.

        Args:
            loss: A function `loss(carry, ys) -> value`, which is compiled. The `ys`
                that it uses, and their cotangents, must fit into memory. For a long
                loop, sum up the loss in the carry instead.
            argnums: What to differentiate with respect to: `"f"` for the parameters of
                the scan, `"init"` or 0, `"xs"` or 1, or a tuple of these.
            has_aux: Whether the loss returns a pair of the value and anything else.

        Returns:
            A function of the arguments of the call that returns `(value, gradient)`, or
            `((value, aux), gradient)`, as [`jax.value_and_grad`][] does. A gradient is
            a tree like its argument, with `None` for leaves that have no derivative;
            that of `"f"` is a scan. Gradients with respect to leaves of `xs` that are
            scanned are memory maps.

        Raises:
            TypeError: When called, as the loop does, and if the loss does not return a
                scalar.
            ValueError: If `argnums` is none of these; when called, as the loop does,
                and if the directory contains the cotangents of another loss.
        """
        wrt = as_wrt(argnums)

        @typed
        def value_and_grad(
            init: PyTree,
            xs: PyTree = None,
            *,
            length: SupportsIndex | None = None,
            key: PRNGKey | None = None,
        ) -> tuple[PyTree, PyTree]:
            run = self._open(init, xs, length, key)
            with run.held():
                run.run_forward(None, self._progress, in_memory=False)
                gradient = GradientCall(run, wrt)
                value, cts = gradient.differentiate(loss, has_aux)
                return value, gradient.back(cts, self._progress)

        return value_and_grad

    @typed
    def vjp(
        self,
        init: PyTree,
        xs: PyTree = None,
        *,
        length: SupportsIndex | None = None,
        key: PRNGKey | None = None,
        argnums: PyTree = ("f", "init"),
    ) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """Runs the loop, and returns a function that pulls cotangents back.

        Args:
            init: As for the call.
            xs: As for the call.
            length: As for the call.
            key: As for the call.
            argnums: What the cotangents are for, as in `value_and_grad`.

        Returns:
            `((carry, ys), pull)`. `pull((ct_carry, ct_ys))` takes trees like the carry
            and `ys`, with `None` for leaves that have no cotangent, or for a whole
            tree. It returns what `argnums` asks for.

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

        def pull(cotangents: PyTree) -> PyTree:
            gradient = GradientCall(run, wrt)
            cts = gradient.take(cotangents)
            with run.held():
                return gradient.back(cts, self._progress)

        return out, pull

    def status(self) -> RunStatus:
        """How far the run in the directory has come. It may still be running.

        Returns:
            A [`RunStatus`][eqloop.resuming.RunStatus]: how many steps there are, how
            many were run, and how many were reversed.

        Raises:
            ValueError: If the directory contains something else.
        """
        return RunStatus.read(Path(self.directory))

    def _open(self, *call: Any) -> OpenedRun:
        _refuse_traced((self, call))
        scan = dataclasses.replace(self.f, progress=None)
        settings = {"every": self.every, "ys": self.ys}
        return open_run(scan, self.every, Path(self.directory), settings, *call)

    def _forward(self, run: OpenedRun, keep: int | None) -> tuple[PyTree, PyTree]:
        in_memory = self.ys == "memory"
        return run.run_forward(keep, self._progress, in_memory=in_memory)

    @property
    def _progress(self) -> ProgressBar | None:
        return self.f.progress if self.progress is None else self.progress

    def __check_init__(self) -> None:
        if not isinstance(f := self.f, Scan | CheckpointedScan):
            what = type(f).__name__ if isinstance(f, AbstractTransform) else repr(f)
            raise TypeError(
                f"Resumable: the first argument must be an `el.Scan` or an "
                f"`el.CheckpointedScan`, not {what}. A loop without a carry "
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


def _refuse_traced(tree: PyTree) -> None:
    leaves = jax.tree.leaves(tree)
    # What is made in a function that is compiled is a tracer, whatever it is made of.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*leaves, jnp.zeros(())]):
        raise TypeError(
            "Resumable: it is called from Python, not in a function that is compiled, "
            "mapped or differentiated: it writes to the disk between its segments, "
            "each of which is compiled. For a gradient use `.value_and_grad(loss)` or "
            "`.vjp`."
        )
