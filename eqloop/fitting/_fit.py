"""`Fit`: a function whose gradient takes no more memory than a budget."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self, final

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax.sharding import NamedSharding, Sharding

from .._arrays import (
    Flags,
    automatic_sharding,
    is_weak,
    pick,
    put,
    split,
    strongly_typed,
    with_weak_types,
)
from .._calls import (
    AbstractSameCall,
    NewP,
    NewR,
    OpenedCall,
    P,
    R,
    check_bool,
    compiled_once,
    floats_left,
    open_call,
    open_gradient,
    parse_bytes,
    setting,
)
from .._compat import form_of
from .._device import DeviceLike, check_device, planning_for_call
from .._programs import is_ref, map_equations, traced
from .._types import Aval, PyTree, Value
from ..checkpointing import fitting
from ..rescheduling import with_open_loops
from ._decision import Limit, unbeaten
from ._fit_frontier import FitFrontier
from ._fit_plan import FitPlan, plan_of_decision
from ._fitted_call import FittedCall, says_if_planning_is_long, type_split_as
from ._options import Way
from ._whole import Decision

# A frontier has no more of them.
_PLANS = 10


@final
class Fit(AbstractSameCall[P, R]):
    """Runs a function whose gradient takes no more memory than a budget.

    Put it around the function that is differentiated, a loss for example, inside of the
    gradient. Call it like `f`. What is stored for the way back is decided for the whole
    function together: for each loop of this library that has no schedule of its own,
    how many carries; and for what lies between loops, which values, products first. The
    rest is computed again. Where that is not enough, some rows run at a time: of the
    dimension that goes through `f`, such as its batch, or around single large values.
    What is stored of them is decided for so many rows. Random numbers are those of `f`;
    values and derivatives are, to rounding, in every mode of differentiation.

    A loop is decided for if it was given no schedule: a [`Scan`][eqloop.Scan],
    `SlicedScan`, `ForLoop`, [`StackedLayers`][eqloop.StackedLayers] or
    [`ScanWhile`][eqloop.ScanWhile], or a
    [`CheckpointedWhileLoop`][eqloop.CheckpointedWhileLoop] without a number of
    `checkpoints`. Loops with a schedule keep it, and so do those that choose one
    themselves. `jax.checkpoint` within `f` is respected.

    When a gradient is taken, pieces of loops are compiled to see what they take, and
    then the whole gradient, up to four times, and up to three times more before it is
    refused; that of a short function without loops also once as it is, and once where
    the function is run a second time for its gradient. If most of the time is spent
    outside of loops, and nearly everything is stored, it is also run for a moment,
    beside one that takes a quarter: on a CPU that can be faster. What is found is
    remembered as for a [`Budget`][eqloop.Budget]. A function that is not
    differentiated in reverse mode runs as it is.

    The budget is for one gradient of `f`: for a whole batch, if the `vmap` is inside of
    the gradient. Derivatives of the gradient take more. How arrays are split over the
    automatic axes of a mesh is not known within `jit`: there, pass `plan` the arrays,
    and use its `pinned`.

    Args:
        f: The function.
        budget: How many bytes the gradient may take at once on each device, besides its
            inputs and outputs, as an int or a string such as `"8GiB"`.
        total: How many bytes it may take with inputs and outputs, instead.
        host: How many bytes of carries of loops may be stored in the memory of the
            host. A loop stores them there if that should be faster than to run steps
            once more: the time to move them is told from the device. On a CPU it
            changes nothing, as that is the memory of the host.
        foreign: Whether to decide for JAX's own loops in `f` as well, as
            [`Reschedule`][eqloop.Reschedule] runs them. `jax.lax.while_loop` then gets
            a reverse mode, with 64 checkpoints.
        split: Whether some rows may be run at a time, of the whole of `f` or of parts
            of it. Rows are entries along an axis that operations map, or add up: the
            examples of a batch, the edges of a graph, the classes of a loss. Where they
            see each other, as in a cumulative sum along them, they are there at once.
        device: What it is planned for, as for [`planning_for`][eqloop.planning_for]: by
            default, the device that it runs on.
        ways: What each part stores, in place of a search: that of a `pinned` plan.

    Raises:
        TypeError: If `f` is not callable, or an amount of memory is neither an int nor
            a string. When called, if `f` closes over a reference (`jax.new_ref`).
        ValueError: If there is both `budget` and `total`, or neither; or if it is not
            an amount of memory. When a gradient is taken, if nothing fits: the error
            says how much memory would be enough, and where most of it is taken.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(w, xs):
        ...     h, _ = el.Scan(lambda h, x: (jnp.tanh(w @ h + x), None))(xs[0], xs)
        ...     return jnp.sum(jnp.sin(h) ** 2)
        >>> w, xs = jnp.eye(64), jnp.ones((1000, 64))
        >>> fit = el.Fit(loss, "64KiB")
        >>> gradient = jax.jit(jax.grad(fit))(w, xs)
        >>> fit.plan(w, xs).peak_bytes <= 64 * 1024
        True

    References:
        The price of a byte is the multiplier of H. Everett, *Generalized Lagrange
        multiplier method*, [Oper. Res. 11(3), 1963](https://doi.org/10.1287/opre.11.3.399).
        PyTorch has a `memory_budget` for compiled functions, as a fraction.
    """

    f: Callable[P, R]
    budget: int | str | None = setting(default=None, kw_only=False)
    total: int | str | None = setting(default=None)
    host: int | str | None = setting(default=None)
    foreign: bool = setting(default=False)
    split: bool = setting(default=True)
    device: DeviceLike | None = setting(default=None)
    ways: tuple[Way, ...] | None = setting(default=None)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Fit[NewP, NewR]": ...

    @compiled_once
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)`.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated, or if it closes
                over a reference.
            ValueError: If a gradient is taken that does not fit.
        """
        opened = _OpenFit.of(self.f, args, kwargs, self.foreign)
        outs = self._planned(opened).apply(*opened.inputs)
        return opened.call.kept.join(with_weak_types(outs, opened.weak))

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> FitPlan:
        """Decides what is stored in a gradient.

        It is the gradient that was taken last of this function and of arrays like
        these, with the plan by which it ran, or else that by all inputs.

        Args:
            *args: The arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for an
                array. Where these say how arrays are split over devices, bytes are
                those of one device.
            **kwargs: Its keyword arguments.

        Returns:
            What was decided: a table, if it is printed.

        Raises:
            ValueError: If nothing fits.
        """
        with self._opened_to_plan(args, kwargs) as (formula, marks):
            plan = self._plan_of(formula.decision(marks))
        floats = floats_left(self.f, args, kwargs)
        return dataclasses.replace(plan, undifferentiated=floats)

    def frontier(self, *args: P.args, **kwargs: P.kwargs) -> FitFrontier:
        """The trade-off between memory and time, whatever the budget.

        Up to ten whole gradients, by the inputs as for `plan`, are compiled, none run.

        Args:
            *args: The arguments of `f`, as for `plan`.
            **kwargs: Its keyword arguments.

        Returns:
            Plans from the least memory to the least time: a table, if it is printed,
            and its `.plot()` draws it.
        """
        opened = self._opened_to_plan(args, kwargs)
        with opened as (formula, marks), says_if_planning_is_long():
            how = self._limit, formula.types, self.split, _PLANS
            found, best = unbeaten(formula.program, marks, *how)
            outs = formula.program.out_avals
            nbytes = self._limit.besides(formula.types, marks, outs)
            plans = tuple(map(self._plan_of, found))
            chosen = None if best is None else plans[found.index(best)]
            return FitFrontier(plans, nbytes, chosen)

    @contextlib.contextmanager
    def _opened_to_plan(
        self, args: Any, kwargs: Any
    ) -> Iterator[tuple[FittedCall, Flags]]:
        """The call as it is planned, and by which of its inputs."""
        arrays, rest = open_gradient(self.f, args, kwargs)
        shardings = list(map(automatic_sharding, arrays))
        found: list[_OpenFit] = []

        def open_traced(*traced: Value) -> None:
            f, args, kwargs = rest.join(traced)
            found.append(_OpenFit.of(f, args, kwargs, self.foreign, shardings))

        with planning_for_call(self.device, arrays):
            jax.eval_shape(open_traced, *arrays)
            (opened,) = found
            formula = self._planned(opened)
        with formula.planning():
            formula.refuse_symbolic()
            yield formula, formula.last_marks

    def _planned(self, opened: "_OpenFit") -> FittedCall:
        how = self._limit, self.device, self.ways, self.split
        return FittedCall(opened.program, opened.types, *how)

    def _plan_of(self, decision: Decision) -> FitPlan:
        how = dict[str, Any](ways=decision.ways, split=decision.cut.split != "nowhere")
        return plan_of_decision(decision, dataclasses.replace(self, **how))

    @property
    def _limit(self) -> Limit:
        name = "total" if self.budget is None else "budget"
        size = self.total if self.budget is None else self.budget
        host = 0 if self.host is None else parse_bytes("Fit", "host", self.host)
        return Limit(parse_bytes("Fit", name, size), name == "total", host)

    def __check_init__(self) -> None:
        if (self.budget is None) == (self.total is None):
            raise ValueError(
                "Fit: pass either a `budget`, for what the gradient takes besides its "
                "inputs and outputs, or a `total`, which includes them."
            )
        _ = self._limit
        check_bool("Fit", "foreign", self.foreign)
        check_bool("Fit", "split", self.split)
        check_device("Fit", self.device)


def _without_source(eqn: jex.JaxprEqn) -> jex.JaxprEqn:
    """A `device_put` of an array that may come from anywhere."""
    # What a function closes over is an input here. Its cotangent is not to be put on
    # the one device where it happens to be, in a program that runs on many.
    if form_of(eqn) != "device_put":
        return eqn
    ends = src, target = eqn.params["srcs"], eqn.params["devices"]
    devices = lambda one: isinstance(one, Sharding) and one.device_set
    if list(map(devices, src)) == list(map(devices, target)):
        return eqn
    srcs = [None if devices(a) != devices(b) else a for a, b in zip(*ends, strict=True)]
    return eqn.replace(params=eqn.params | {"srcs": tuple(srcs)})


@dataclasses.dataclass(frozen=True)
class _OpenFit:
    """A call of a function.

    Attributes:
        program: Its program, from what the function closes over and its arrays.
        types: Their types, with all that is known of how they are split over devices.
        weak: Which of the outputs are weakly typed.
    """

    call: OpenedCall
    program: jex.ClosedJaxpr
    inputs: list[Value]
    types: tuple[Aval, ...]
    weak: list[bool]

    @classmethod
    def of(
        cls,
        f: Callable[..., PyTree],
        args: Any,
        kwargs: Any,
        foreign: bool,
        shardings: Sequence[NamedSharding | None] | None = None,
    ) -> Self:
        """Opens a call, the arrays of which are split like this, if it is given."""
        call, arrays = open_call("Fit", f, args, kwargs)
        with fitting():
            closed = jax.make_jaxpr(call.on_arrays)(arrays)
            if foreign:
                closed = with_open_loops(closed)
        consts = closed.consts
        if any(map(is_ref, consts)):
            raise TypeError(
                "Fit: the function closes over a reference (`jax.new_ref`), which it "
                "would write to again where it is run again. Pass arrays and return "
                "them, or put `Fit` around the part that does not write to it."
            )

        closed = map_equations(closed, _without_source)
        # Constants of NumPy stay what they are, so that the very program is compiled
        # that will run.
        every = [*consts, *arrays]
        given = [not isinstance(x, np.ndarray) for x in every]

        def run(*flat: Value) -> list[Value]:
            own, others = split(put(every, given, flat), len(consts))
            return jax.core.eval_jaxpr(closed.jaxpr, own, *others)

        inputs = list(map(strongly_typed, pick(every, given)))
        with fitting():
            program = traced(run, list(map(jax.typeof, inputs)))
        known = map(automatic_sharding, arrays) if shardings is None else shardings
        placed = pick([*map(automatic_sharding, consts), *known], given)
        types = tuple(map(type_split_as, program.in_avals, placed))
        return cls(call, program, inputs, types, list(map(is_weak, closed.out_avals)))
