"""Meters: what a program on the device does to have its bars shown.

A report is a callback that takes the number of the bar and returns it. The number is
handed on from report to report, as part of the loop's state, and so the reports come in
order. Each takes something that was just computed along, or XLA would run it as soon as
it could; and it has no side effect that JAX knows of, so that a loop with a bar may be
wherever one without may be.

A program that is run again shows its bars once, and one that may fail closes them: both
are changes of the meters in it (`BarChange`).
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import Arrays, refuse_symbolic, split
from .._programs import Formula, map_equations, map_params
from .._types import Index, PyTree, Value
from . import _display
from ._bar import ProgressBar
from ._display import Source

# How often a bar moves unless the user says so.
_MOVES = 25

_BACKWARD, _TANGENTS, _UNKNOWN = "backward", "tangents", -1


@dataclasses.dataclass(frozen=True, eq=False)
class Label:
    """The text before a bar, as a function of the loop's position.

    Attributes:
        desc: The user's function of position, carry and `y`.
        carry: For each array in the carry, how many axes it has.
        y: The same for what a step returns besides the carry.
        join_carry: From its arrays to the carry that the user knows.
        join_y: The same for `y`.
    """

    desc: Callable[[int, PyTree, PyTree], str]
    carry: tuple[int, ...]
    y: tuple[int, ...]
    join_carry: Callable[[list[Value]], PyTree]
    join_y: Callable[[list[Value]], PyTree]

    @classmethod
    def of(
        cls,
        desc: Callable[[int, PyTree, PyTree], str],
        carry_types: Arrays,
        y_types: Arrays,
        join_carry: Callable[[list[Value]], PyTree],
        join_y: Callable[[list[Value]], PyTree],
    ) -> Self:
        ndims = lambda avals: tuple(jax.eval_shape(_raw, aval).ndim for aval in avals)
        return cls(desc, ndims(carry_types), ndims(y_types), join_carry, join_y)

    def pick(self, carry: Arrays, y: Arrays) -> list[Value]:
        """The arrays that it needs: without their tangents, which come after them."""
        return [*carry[: len(self.carry)], *y[: len(self.y)]]

    def __call__(self, done: int, values: Sequence[np.ndarray]) -> str:
        # A batch has added axes in front: the label is that of the first example.
        firsts = [
            value[(0,) * (value.ndim - ndim)]
            for value, ndim in zip(values, (*self.carry, *self.y), strict=True)
        ]
        carry, y = split(firsts, len(self.carry))
        text = self.desc(done - 1, self.join_carry(carry), self.join_y(y))
        if not isinstance(text, str):
            raise TypeError(
                f"ProgressBar: `desc` must return a string, but it returned {text!r}."
            )
        return text


@dataclasses.dataclass(frozen=True)
class Meter:
    """The bars of one loop: that of the loop itself, and that of its backward sweep.

    Attributes:
        source: What the host knows of it; `None` for a loop without bars.
        every: After how many steps they move.
        is_known: Whether it is known beforehand how many steps there are.
        phase: The sweep that is run; empty for the loop itself.
        forward: Whether the loop itself has one. If it is run again it has not.
        at: Where in the carry of a while loop the number of the bar is.
    """

    source: Source | None = None
    every: int = 1
    is_known: bool = True
    phase: str = ""
    forward: bool = True
    at: int = 1

    @property
    def is_shown(self) -> bool:
        """Whether there are any bars."""
        return self.source is not None

    @property
    def here(self) -> "Gauge":
        """The gauge of the loop itself."""
        source = self.source if self.forward else None
        total = source.total if source is not None and self.is_known else _UNKNOWN
        return Gauge(source, self.every, self.phase, total)

    @property
    def back(self) -> "Gauge":
        """The gauge of the backward sweep."""
        return self.backward.here

    @property
    def backward(self) -> "Meter":
        """The bars of a backward sweep that is a loop by itself."""
        return self._with(phase=self._in(_BACKWARD), forward=True)

    @property
    def again(self) -> "Meter":
        """The bars of a loop that is run again, to be differentiated."""
        return self._with(forward=False)

    @property
    def tangents(self) -> "Meter":
        """The bars of the loop that computes tangents."""
        return self._with(phase=self._in(_TANGENTS))

    def moved(self, by: int) -> "Meter":
        """These bars with so many leaves more before the number in the carry."""
        return self._with(at=self.at + by)

    def _in(self, phase: str) -> str:
        return f"{self.phase}, {phase}" if self.phase else phase

    def _with(self, **changes: Any) -> "Meter":
        return dataclasses.replace(self, **changes) if self.is_shown else self


NO_BARS = Meter()


@dataclasses.dataclass(frozen=True)
class Gauge:
    """One bar, as the program on the device sees it.

    Attributes:
        source: What the host knows of it; `None` if there is no bar.
        every: After how many steps it moves.
        phase: The sweep whose steps are counted.
        total: How many steps it has. It may be an array, and is negative as long as it
            is not known.
    """

    # Where there is none, the number to report under is `None`, and so is what every
    # report returns: nothing is added to a program.

    source: Source | None
    every: int
    phase: str
    total: Value

    @property
    def is_shown(self) -> bool:
        """Whether there is a bar."""
        return self.source is not None

    def of(self, total: Any) -> "Gauge":
        """This gauge, now that it is known how many steps there are."""
        return dataclasses.replace(self, total=total)

    def open(self, after: Arrays, dtype: np.dtype = jnp.int32) -> Any:
        """Has the bar shown, before the first step."""
        # `after` is all that the loop needs, lest it be shown while that is computed.
        if not self.is_shown:
            return None
        return self.report(jnp.zeros((), dtype), 0, after, None)

    def report(
        self, number: Value, done: Value, carry: Arrays, y: Arrays | None = ()
    ) -> Value:
        """Tells how many steps were run."""
        if self.source is None:
            return number
        label = None if _BACKWARD in self.phase else self.source.label
        values = [] if label is None or y is None else label.pick(carry, y)
        message = [number, done, self.total, _is_first(), _token([*carry, *(y or [])])]
        # In one array, since each takes its time to get to the host.
        packed = jnp.stack([jnp.asarray(x).astype(jnp.int32) for x in message])
        shown = jax.pure_callback(
            functools.partial(_report, self.source, self.phase),
            jax.ShapeDtypeStruct((), jnp.int32),
            *map(lax.stop_gradient, (packed, *map(_raw, values))),
            vmap_method="expand_dims",
        )
        return shown.astype(number.dtype)

    def report_if_due(
        self, number: Value, done: Value, size: Value, carry: Arrays, y: Arrays = ()
    ) -> Value:
        """Tells that `size` steps more were run, should the bar move by now."""
        if not self.is_shown:
            return number
        report = lambda: self.report(number, done, carry, y)
        if isinstance(size, int) and size % self.every == 0:
            return report()
        is_due = done // self.every != (done - size) // self.every
        return lax.cond(is_due | (done == self.total), report, lambda: number)

    @property
    def to_watch(self) -> Value:
        """A number for `watch`."""
        return jnp.zeros((), jnp.float32) if self.is_shown else None

    def watch(self, number: Index, done: Value, size: int) -> Value:
        """Has a backward sweep that JAX makes report when it passes here."""
        # The number is what `to_watch` was: its cotangent is the number of the bar.
        if number is None or not self.is_shown:
            return number

        @jax.custom_vjp
        def here(number: Index, done: Value) -> Value:
            return number

        def back(done: Value, number: Index) -> tuple[Value, None]:
            return self.report_if_due(number, done, size, []), None

        here.defvjp(lambda number, done: (number, done), back)
        return here(number, done)


NO_BAR = Gauge(None, 1, "", 0)


def tied(number: Value, outputs: PyTree) -> Value:
    """The outputs of a loop, so that nobody gets them without its reports."""
    # The reports are made if the outputs are asked for, and only then: a loop that
    # nobody needs is not run for its bar. To have them belong together, one element of
    # each output would be another one if the number were negative, which it never is.
    # (`lax.optimization_barrier` does not keep what is not needed.)
    if number is None:
        return outputs
    return jax.tree.map(lambda x: _tie(x, number >= 0), outputs)


# Its derivative is that of the identity, lest a backward sweep copies cotangents.
@jax.custom_jvp
def _tie(x: Value, always: Value) -> Value:
    if not x.size or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    # A number has no index, and `checkify` asks a slice for one.
    if not x.ndim or _is_sharded(x):
        return jnp.where(always, x, jnp.zeros_like(x))
    start = (0,) * x.ndim
    first = lax.slice(x, start, (1,) * x.ndim)
    first = jnp.where(always, first, jnp.zeros_like(first))
    return lax.dynamic_update_slice(x, first, start)


@_tie.defjvp
def _tie_jvp(primals: PyTree, tangents: PyTree) -> PyTree:
    return _tie(*primals), tangents[0]


def make_meter(
    owner: str,
    progress: ProgressBar | None,
    length: int | None,
    label: Callable[[Callable[[int, PyTree, PyTree], str]], Label] | None = None,
) -> Meter:
    """The meter of a loop."""
    if progress is None:
        return NO_BARS
    _display.require_tqdm(owner)
    need = "the number of steps of a progress bar"
    refuse_symbolic(owner, length, need, "Leave `progress` out for `jax.export`")
    total = progress.total if length is None else length
    if progress.total not in (None, total):
        raise ValueError(
            f"{owner}: `progress` expects {progress.total} steps in all, but there are "
            f"{length}. Leave `total` out: it is for loops of unknown length."
        )
    desc = progress.desc
    if callable(desc) and label is None:
        raise TypeError(
            f"{owner}: `desc` of a progress bar must be a string here, as there is no "
            f"carry to call a function with."
        )
    every = progress.every or _default_every(total)
    if callable(desc) and label is not None:
        source = Source(total=total, label=label(desc))
    else:
        source = Source(str(desc or ""), total)
    return Meter(source, every, is_known=length is not None)


def _default_every(total: int | None) -> int:
    """A number of steps that moves a bar some 25 times, a divisor if one is near."""
    if total is None:
        return 100
    about = -(-total // _MOVES) or 1
    near = next(n for n in range(about, 0, -1) if total % n == 0)
    return near if 2 * near >= about else about


def _token(arrays: Arrays) -> jax.Array:
    """A number that is not known before these arrays are."""
    one = lambda x: lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
    first = [x if _is_sharded(x) else one(x) for x in map(_raw, arrays) if x.size]
    return sum(map(jnp.count_nonzero, first), jnp.zeros((), int))


def _is_sharded(x: Value) -> bool:
    """Whether an array may not have an element that can be taken by itself."""
    return any(jax.typeof(x).sharding.spec)


def _raw(leaf: Value) -> Value:
    """What a callback can take: of a PRNG key its numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _is_first() -> jax.Array:
    """Whether this is the first of the devices that run the program side by side."""
    first = jnp.array(True)
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        first &= lax.axis_index(axis) == 0
    return first


# On the host. Under `vmap` arrays have axes in front, of size one or of the batch's.


def _report(
    source: Source, phase: str, message: np.ndarray, *values: np.ndarray
) -> np.ndarray:
    message = np.asarray(message)
    # Of examples that stop at different times, the bar is that of the last.
    number, done, total, is_first, _ = message.reshape(-1, 5).max(0).tolist()
    if is_first:
        arrays = tuple(map(np.asarray, values))
        number = _display.report(source, phase, number, done, total, arrays)
    return np.full(message.shape[:-1], number, np.int32)


# What becomes of the bars in a program that is run again, or that may fail.


class BarChange(abc.ABC):
    """A change of the bars in a program: a frozen, hashable dataclass."""

    @abc.abstractmethod
    def meter(self, meter: Meter) -> Meter:
        """The bars of a loop in the program."""

    @property
    def in_reverse(self) -> "BarChange":
        """The change for a reverse sweep in the program."""
        return self

    def equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        """An equation of the program."""
        change = lambda p: p.with_bars(self) if isinstance(p, Formula) else p
        return map_params(eqn, change)

    def __call__(self, program: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
        """The program; the very same if there are no bars in it."""
        return _changed(program, self)


@dataclasses.dataclass(frozen=True)
class Again(BarChange):
    """A program is run again: without the bars that have been shown.

    Attributes:
        backward: Whether to leave out those of backward sweeps, too.
    """

    backward: bool = False

    def meter(self, meter: Meter) -> Meter:
        return NO_BARS if self.backward else meter.again

    @property
    def in_reverse(self) -> BarChange:
        # A sweep that is there already is one whose bar has been shown.
        return Again(backward=True)


@dataclasses.dataclass(frozen=True)
class Guarded(BarChange):
    """Callbacks close all bars when they raise."""

    # When a callback raises, as that of `eqx.error_if` does, the program is abandoned,
    # and no report closes its bars.

    def meter(self, meter: Meter) -> Meter:
        return meter

    def equation(self, eqn: jex.JaxprEqn) -> jex.JaxprEqn:
        if eqn.primitive.name.endswith("_callback"):
            callback = _closing(eqn.params["callback"])
            return eqn.replace(params={**eqn.params, "callback": callback})
        return super().equation(eqn)


@functools.lru_cache(maxsize=256)
def _changed(program: jex.ClosedJaxpr, change: BarChange) -> jex.ClosedJaxpr:
    return map_equations(program, change.equation)


def _closing(callback: Any) -> Any:
    @functools.wraps(callback, updated=())
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        try:
            return callback(*args, **kwargs)
        except BaseException:
            _display.close_all()
            raise

    return call
