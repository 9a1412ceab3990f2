"""Schedules around another one: where its slots are, and in which form."""

import abc
import dataclasses
import os
import tempfile
from typing import Any, final

from .._arrays import as_float_dtype
from ._schedules import AbstractSchedule, StoreAll
from .engine._layout import Layout
from .engine._loop_spec import LoopSpec, Undo
from .engine.slots._file_slots import FileSlots
from .engine.slots._host_slots import HostSlots
from .engine.slots._slots import AbstractSlots
from .engine.slots._spill_files import SpillFiles


@dataclasses.dataclass(frozen=True)
class AbstractStored(AbstractSchedule):
    """A schedule around another one, which says how its carries are stored."""

    schedule: AbstractSchedule

    @property
    def undo(self) -> Undo | None:
        """How a step is undone, if the schedule does that."""
        return self.schedule.undo

    @property
    def budgeted_bytes(self) -> int | None:
        """The bytes of the budget within, if there is one."""
        return self.schedule.budgeted_bytes

    @property
    def measures_steps(self) -> bool:
        """Whether the schedule decides by measured times."""
        return self.schedule.measures_steps

    @property
    def can_choose_policy(self) -> bool:
        """Whether there is a budget within, which can also choose the policy."""
        return self.schedule.can_choose_policy

    def layout(self, loop: LoopSpec) -> Layout:
        """The layout of the schedule, with other slots."""
        layout = self.schedule.layout(loop)
        if layout.stores_residuals:
            return layout
        return dataclasses.replace(layout, slots=self._slots(layout.slots))

    @abc.abstractmethod
    def _slots(self, slots: AbstractSlots) -> AbstractSlots:
        """The slots to use instead of those of the schedule."""

    def _refuse_moved(self, slots: AbstractSlots) -> None:
        if slots != slots.near:
            raise ValueError(
                f"{type(self).__name__}: the slots of {self.schedule!r} are "
                f"stored elsewhere already. Use one of the two."
            )


@final
@dataclasses.dataclass(frozen=True)
class Offload(AbstractStored):
    """Stores the carries of another schedule in host memory.

    The primal sends each carry to the host when it stores it, and the backward pass
    fetches them one at a time. So the device needs little more than the working set of
    a step. This pays off if a step takes longer than moving its carry. The carries of
    the inner levels of `Recursive` and `Chunked` stay on the device, because they are
    few and needed soon. On a CPU this changes only the kind of memory. The time of a
    plan does not include moving carries.

    Args:
        schedule: Which carries are stored.
        memory_kind: The host memory that compiled code can reach, which is
            `"pinned_host"`.

    Raises:
        TypeError: If `schedule` is not a schedule.
        ValueError: If `schedule` stores no carries, or the memory is of another kind.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> schedule = el.Offload(el.Binomial(8))
        >>> scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=schedule)
        >>> jax.grad(lambda h: scan(h, jnp.zeros(50))[0])(0.0)
        Array(1., dtype=float32, weak_type=True)

    References:
        [JAX on host offloading](https://docs.jax.dev/en/latest/notebooks/host-offloading.html).
    """

    memory_kind: str = "pinned_host"

    def __post_init__(self) -> None:
        _check_stored("Offload", self.schedule)
        if isinstance(self.schedule, Offload):
            raise ValueError(
                f"Offload: {self.schedule!r} is on the host already. Use it as it is."
            )
        if self.memory_kind != "pinned_host":
            raise ValueError(
                f"Offload: `memory_kind` must be 'pinned_host', the memory of the host "
                f"that compiled code can reach, not {self.memory_kind!r}."
            )

    def _slots(self, slots: AbstractSlots) -> AbstractSlots:
        self._refuse_moved(slots)
        return HostSlots(precision=slots.precision)


@final
@dataclasses.dataclass(frozen=True)
class Cast(AbstractStored):
    """Stores the carries of another schedule in a lower precision.

    The floating-point leaves of its slots are rounded, so they take half or a quarter
    of the memory. Only stored carries are rounded. The loop runs in full precision, and
    its outputs are those without `Cast`. Steps that are run again start from a rounded
    carry, so the gradient is about as precise as the dtype, unless the steps amplify
    errors. Integers, complex numbers, and leaves that do not have more bits than the
    dtype are stored unchanged.

    Args:
        schedule: Which carries are stored.
        dtype: A floating-point dtype, such as `jnp.bfloat16` or `"float16"`.

    Raises:
        TypeError: If `schedule` is not a schedule, or `dtype` is not a dtype.
        ValueError: If `schedule` stores no carries, or casts them already; if `dtype`
            is not a floating-point one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> args = jnp.zeros(1000), jnp.zeros((256, 1000))
        >>> full = el.Scan(step, schedule=el.Binomial(64)).plan(*args)
        >>> cast = el.Cast(el.Binomial(64), jnp.bfloat16)
        >>> plan = el.Scan(step, schedule=cast).plan(*args)
        >>> print(plan)  # doctest: +ELLIPSIS
        Cast(schedule=Binomial(checkpoints=64, block=1), dtype=dtype(bfloat16))
          steps              256
          stored carries     64, 1.95 KiB each
          ...
        >>> plan.peak_bytes < 0.6 * full.peak_bytes
        True

        On the host, half as large: `el.Offload(el.Cast(el.Binomial(64), "float16"))`.
    """

    dtype: Any

    def __post_init__(self) -> None:
        _check_stored("Cast", self.schedule)
        which = "a floating-point dtype, such as `jnp.bfloat16` or 'float16'"
        others = "Leaves that are not floating-point numbers are stored unchanged."
        dtype = as_float_dtype("Cast", self.dtype, which, others)
        object.__setattr__(self, "dtype", dtype)

    def _slots(self, slots: AbstractSlots) -> AbstractSlots:
        if slots.precision is not None:
            raise ValueError(
                f"Cast: the slots of {self.schedule!r} are cast already. Use one of "
                f"the two."
            )
        return dataclasses.replace(slots, precision=self.dtype)


@final
@dataclasses.dataclass(frozen=True)
class Spill(AbstractStored):
    """Stores the carries of another schedule in files.

    It is for loops whose stored carries do not fit into device memory or host memory.
    They are written while the loop runs forward, and in the backward pass the next one
    is read in advance. Only a few are in memory at a time. The carries of inner levels
    of `Recursive` and `Chunked` stay on the device. `Binomial` writes and reads carries
    more often, and so takes more time.

    The files have no names, so they disappear at the end of the backward pass, and when
    the process ends for any reason. The backward pass may run any number of times, so
    the primal does not write files. Instead, each backward pass begins by running the
    loop again, which is one more evaluation of each step. It needs a backend that
    supports callbacks to the host.

    Args:
        schedule: Which carries are stored.
        directory: An existing directory that can be written to, best on a fast disk.

    Raises:
        TypeError: If `schedule` is not a schedule, or `directory` is not a path.
        ValueError: If `schedule` stores no carries, or stores them elsewhere already.
        OSError: If `directory` is not a directory, or cannot be written to. While a
            gradient is computed, if the disk is full; a program that is compiled raises
            JAX's own error, with the same message.

    Examples:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> schedule = el.Spill(el.Chunked(16), tempfile.gettempdir())
        >>> scan = el.Scan(step, schedule=schedule)
        >>> jax.grad(lambda h: scan(h, jnp.zeros(256))[0])(0.0)
        Array(1., dtype=float32, weak_type=True)
    """

    directory: str | os.PathLike[str]
    _files: SpillFiles = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_stored("Spill", self.schedule)
        directory = writable_directory("Spill", self.directory)
        object.__setattr__(self, "directory", directory)
        object.__setattr__(self, "_files", SpillFiles(directory))

    def _slots(self, slots: AbstractSlots) -> AbstractSlots:
        self._refuse_moved(slots)
        return FileSlots(str(self.directory), self._files, precision=slots.precision)


def writable_directory(owner: str, path: Any) -> str:
    """The path of a directory that can be written to."""
    try:
        directory = os.fsdecode(os.fspath(path))
    except TypeError:
        raise TypeError(
            f"{owner}: `directory` must be the path of a directory, not {path!r}."
        ) from None
    if not os.path.isdir(directory):
        what = "is a file" if os.path.exists(directory) else "does not exist"
        raise NotADirectoryError(
            f"{owner}: `directory` must be an existing directory, and {directory!r} "
            f"{what}."
        )
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise PermissionError(
            f"{owner}: no file can be made in `directory`, {directory!r}: "
            f"{error.strerror}."
        ) from error
    return directory


def _check_stored(owner: str, schedule: object) -> None:
    """Checks that a schedule is one, and stores carries."""
    if not isinstance(schedule, AbstractSchedule):
        raise TypeError(
            f"{owner}: `schedule` must be a schedule, such as `el.Binomial(30)`, "
            f"not {schedule!r}."
        )
    if isinstance(schedule, StoreAll):
        raise ValueError(
            f"{owner}: StoreAll() stores residuals and no carries, so there are no "
            f"slots. Give a schedule that has some, such as `el.Chunked(1)`, or move "
            f"residuals to the host by a policy, `el.policies.offload_names`."
        )
