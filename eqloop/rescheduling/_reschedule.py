"""`Reschedule`: the loops in code that one cannot edit, with a schedule."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import equinox as eqx
import jax
import jax.numpy as jnp

from .._arrays import describe, is_inexact, pick, put
from .._calls import (
    AbstractSameCall,
    NewP,
    NewR,
    P,
    R,
    check_least,
    compiled_once,
    floats_left,
    format_bytes,
    int_of,
    open_call,
    open_gradient,
    says_floats_left,
    setting,
)
from .._device import as_by_jit
from .._programs import Place, run, warn_once
from .._types import PyTree, Value
from ..checkpointing import (
    UNLIMITED,
    AbstractSchedule,
    AsScan,
    Binomial,
    Fused,
    LoopPolicy,
    Online,
    Plans,
    Recursive,
    StoreAll,
    as_policy_or_wrong,
    own_plans,
    stored_by_rules,
)
from ..loops import check_schedule, planned_by
from ..progress import ProgressBar, as_progress, check_progress
from ._foreign_loop import ForeignLoop
from ._rewriting import Note, Rewriting

_IN_VAIN = (
    "stores less for a gradient that it takes itself, which is taken as before, unless "
    "it is differentiated again. Reschedule the function inside: "
    "`jax.grad(el.Reschedule(f, …))`"
)

# With a smaller base, so many steps as a counter can hold take a dozen levels, which
# are loops within loops, and half a minute to compile.
_LEAST_BASE = 8

# A kernel has a copy of the step for each level: this many steps are six equal ones.
# It would take hours to run them.
_MOST_STEPS = 35**6


@dataclasses.dataclass(frozen=True)
class RescheduledLoops:
    """The loops of JAX in a function, see [`Reschedule`][eqloop.Reschedule].

    Attributes:
        taken: The plans of those that are run as planned loops in a gradient.
        left: Those that are left to JAX, each with the reason.
        undifferentiated: Arguments that are numbers of Python, such as `0.3`. They stay
            what they are, and the gradient that is planned is not one by them.
    """

    taken: Plans
    left: tuple[tuple[ForeignLoop, str], ...]
    undifferentiated: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(self.taken)] if self.taken else ["no loop is planned"]
        lines += ["left to JAX:"] * bool(self.left)
        lines += [f"  {loop}: {why}" for loop, why in self.left]
        lines += says_floats_left(self.undifferentiated)
        return "\n".join(lines)


@final
class Reschedule(AbstractSameCall[P, R]):
    """Runs the loops that a function has from JAX as loops of this library.

    It is for loops that you cannot edit, since they are in a library. Call it like `f`,
    which is traced: each `jax.lax.scan` in it, and so each `jax.lax.map` and each
    `jax.lax.fori_loop` of known bounds, runs as a planned loop with this schedule,
    wherever it is: in `jax.jit`, `jax.checkpoint`, `jax.lax.cond`, or another loop.
    The values and derivatives are those of `f`, to rounding.

    Put it around the function that is differentiated, inside of the gradient.

    What is transposed before a loop that reads its rows, as by `jax.vmap` of a function
    with a `jax.lax.scan` in it, is read where it is, without a copy.

    A loop within a loop gets the same schedule if the outer one would otherwise take
    more than twice the memory. If not, it is left to JAX, and is computed again with
    the step that it is in. Within a loop with a [`Budget`][eqloop.Budget] it stores
    everything if half of the budget is enough for that, and else what is best in half
    of it.

    Left as they are: loops with an `io_callback` or ordered effects in their steps,
    which cannot be run again; and loops in functions that have a derivative of their
    own (`jax.custom_vjp`, `jax.lax.custom_linear_solve`), or in the rules of such. What
    steps print by `jax.debug` is printed as often as by `f`.

    Args:
        f: The function.
        schedule: How to trade memory for recomputation, for each of the loops. By
            default every residual is stored, as JAX does.
        policy: Which residuals of a step are stored when it is recomputed, as for
            [`Scan`][eqloop.Scan].
        whiles: How each `jax.lax.while_loop` is differentiated in reverse mode, which
            it cannot be by itself: in how many checkpoints, as for
            [`CheckpointedWhileLoop`][eqloop.CheckpointedWhileLoop]; or
            `el.Recursive()`, as for [`BoundedWhileLoop`][eqloop.BoundedWhileLoop] with
            the greatest bound, with a `base` of at least 8; or `el.Fused()`, as one
            kernel each way. By default it has no reverse mode, unless `schedule` is a
            [`Fused`][eqloop.Fused] and it is in no other loop: then it is a kernel.
        progress: Shows a progress bar for each loop that is not inside of another one,
            or for each that `only` picks: `True`, an int (after how many steps it
            moves) or a [`ProgressBar`][eqloop.ProgressBar].
        only: `only(loop)` returns whether to take a loop. It sees the loop's `name`,
            `length`, `place` (`file`, `line`, `function`), `depth`, `carry` and
            `scope`, see [`ForeignLoop`][eqloop.ForeignLoop]. By default all are taken.

    Raises:
        TypeError: If `f` or `only` is not callable, or a setting has the wrong type.
            When called, if `only` returns anything but a bool.
        ValueError: If `whiles` is less than 1, its `base` less than 8, or if it is a
            `Fused` with an `every`. When a gradient is taken through a while loop, if
            there are no `whiles`; the error names its line.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def simulate(w, xs):  # of a library, say
        ...     step = lambda h, x: (jnp.tanh(w * h + x), None)
        ...     return jax.lax.scan(step, jnp.zeros(100), xs)[0].sum()
        >>> frugal = el.Reschedule(simulate, el.Recursive(16))
        >>> w, xs = jnp.float32(0.5), jnp.ones((1000, 100))
        >>> bool(jnp.allclose(jax.grad(frugal)(w, xs), jax.grad(simulate)(w, xs)))
        True
        >>> print(frugal.plans(w, xs))
        loop      steps  batch  schedule           stored ...
        lax.scan  1000   1      Recursive(base=16) ...

        A gradient through a while loop that has none:

        >>> def root(a):
        ...     far = lambda x: jnp.abs(x * x - a) > 1e-6
        ...     return jax.lax.while_loop(far, lambda x: (x + a / x) / 2, 1.0)
        >>> print(f"{jax.grad(el.Reschedule(root, whiles=20))(4.0):.3f}")
        0.250
    """

    f: Callable[P, R]
    schedule: AbstractSchedule | None = setting(default=None, kw_only=False)
    # Not static, so that `eqx.tree_at` reaches it.
    policy: Any = setting(default=None, converter=as_policy_or_wrong, static=False)
    whiles: AbstractSchedule | int | None = setting(default=None)
    progress: ProgressBar | None = setting(default=None, converter=as_progress)
    only: Callable[[ForeignLoop], bool] | None = setting(default=None)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Reschedule[NewP, NewR]": ...

    @compiled_once
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)` with other loops.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated, or if `only`
                returns anything but a bool.
            ValueError: If a gradient is taken through a while loop, and there are no
                `whiles`.
        """
        result, notes = self._run(args, kwargs)
        is_as_before = all(note.why and not note.has_bar for note in notes)
        told = self.schedule, self.policy, self.whiles, self.progress
        if is_as_before and any(setting is not None for setting in told):
            self._warn(f"is run otherwise, as {_left(notes)}", notes)
        elif self.schedule is not None:
            in_vain = [note for note in notes if note.is_back and not note.why]
            if in_vain:
                self._warn(_IN_VAIN, in_vain)
        return result

    def plans(self, *args: P.args, **kwargs: P.kwargs) -> RescheduledLoops:
        """Finds the plans of the loops, for a gradient with respect to all inputs.

        Args:
            *args: The arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for an
                array.
            **kwargs: Its keyword arguments.

        Returns:
            The loops that are `taken`, with their plans as [`plans`][eqloop.plans]
            finds them, and those that are `left`, with reasons. Printed, it is a table.
        """
        arrays, rest = open_gradient(self, args, kwargs)
        nonzeros = list(map(is_inexact, arrays))

        # It is traced more than once, and `only` is to be asked once of each loop.
        only = self.only and functools.cache(self.only)

        def run(*arrays: Value) -> tuple[PyTree, list[Note]]:
            self, args, kwargs = rest.join(arrays)
            asked = dataclasses.replace(self, only=only)
            return asked._run(args, kwargs, leaves_gradients=True)

        def gradient(*arrays: Value) -> PyTree:
            def outputs(*moving: Value) -> list[Value]:
                result, _ = run(*put(arrays, nonzeros, moving))
                return [x for x in jax.tree.leaves(result) if eqx.is_inexact_array(x)]

            outs, pull = jax.vjp(outputs, *pick(arrays, nonzeros))
            return pull(list(map(jnp.zeros_like, outs)))

        # While plans are listed, the loops of this library are not what will run.
        notes: list[Note] = []
        with as_by_jit():
            jax.eval_shape(lambda *arrays: notes.extend(run(*arrays)[1]), *arrays)
        taken = own_plans(gradient)(*arrays)
        left, stored = [note for note in notes if note.why], dict[Place | None, int]()
        if any(note.rule for note in left):
            stored = stored_by_rules(gradient)(*arrays)
        more = {
            rule: f"; its rule stores {format_bytes(size)} of its loops"
            for rule, size in stored.items()
        }
        why = ((note.loop, note.why + more.get(note.rule, "")) for note in left)
        floats = floats_left(self.f, args, kwargs)
        return RescheduledLoops(taken, tuple(why), floats)

    def _run(
        self, args: Any, kwargs: Any, leaves_gradients: bool = False
    ) -> tuple[Any, list[Note]]:
        """The result of a call, and what has become of each loop."""
        call, arrays = open_call("Reschedule", self.f, args, kwargs)
        program, fused = jax.make_jaxpr(call.on_arrays)(arrays), self.schedule
        if isinstance(fused, Fused):
            fused = dataclasses.replace(fused, every=None)
        rewriting = Rewriting(
            self.schedule,
            self._policy(),
            _planner(self.whiles),
            self.progress,
            self.only,
            leaves_gradients,
            _planner(fused) if isinstance(fused, Fused) else None,
        )
        new, notes = rewriting(program)
        return call.kept.join(run(new, *arrays)), notes

    def _warn(self, what: str, notes: list[Note]) -> None:
        name = getattr(self.f, "__qualname__", repr(self.f))
        # A loop is told of once, wherever it is run from.
        loops = tuple(str(note.loop) for note in notes)
        warn_once(f"Reschedule: no loop of `{name}` {what}.", loops)

    def _policy(self) -> LoopPolicy:
        schedule = self.schedule or StoreAll()
        return planned_by("Reschedule", schedule, self.policy)["policy"]

    def __check_init__(self) -> None:
        check_schedule("Reschedule", self.schedule)
        self._policy()
        _planner(self.whiles)
        check_progress("Reschedule", self.progress)
        if not (self.only is None or callable(self.only)):
            raise TypeError(
                f"Reschedule: `only` must be a function from a loop to whether it is "
                f"taken, not {describe(self.only)}."
            )


def _planner(whiles: object) -> Online | AsScan | None:
    """How while loops are run, as a setting says it."""
    if whiles is None:
        return None
    if isinstance(whiles, Fused):
        if whiles.every is not None:
            raise ValueError(
                f"Reschedule: `whiles` is {whiles}, and a carry every {whiles.every} "
                f"steps is too many where nobody knows how many steps there are. Use "
                f"`whiles=el.Fused()`, which stores some at each of several levels."
            )
        return AsScan(_MOST_STEPS, whiles)
    if isinstance(whiles, Recursive):
        check_least("Reschedule", "base` of `whiles", whiles.base, _LEAST_BASE)
        return AsScan(UNLIMITED, whiles)
    checkpoints = whiles.checkpoints if isinstance(whiles, Binomial) else whiles
    if (count := int_of(checkpoints)) is None:
        raise TypeError(
            f"Reschedule: `whiles` must be a number of checkpoints, as in `whiles=64`, "
            f"or `el.Recursive()`, not {describe(whiles)}."
        )
    check_least("Reschedule", "whiles", count, 1)
    return Online(UNLIMITED, count)


def _left(notes: list[Note]) -> str:
    left = "".join(f"\n  {note.loop}: {note.why}" for note in notes)
    return f"every loop in it is left to JAX:{left}" if left else "it has none"
