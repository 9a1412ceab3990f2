"""Schedules: how to trade memory for recomputation. One class is one idea."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, TypeAlias, final

import jax

from .._calls import int_of
from ._policies import AUTO, Policy, as_jax_policy
from .engine._layout import AbstractRunner, Layout
from .engine._loop_spec import AbstractSchedule, LoopSpec, Undo
from .engine.orders._all_at_once import AllAtOnce
from .engine.orders._first_and_last import FirstAndLast
from .engine.orders._levels import Nest, nests
from .engine.orders._nested import Nested
from .engine.orders._revolved import Revolved
from .engine.reversals._together import together
from .planning._default_batches import with_batches


@final
@dataclasses.dataclass(frozen=True)
class StoreAll(AbstractSchedule):
    """Stores every residual and recomputes nothing, as `jax.lax.scan` does.

    Memory grows with the length of the loop, by the residuals of one step for each
    step. This is the default schedule of [`Scan`][eqloop.Scan]. Unlike there, gradients
    by bfloat16 arrays that all steps share are added up in float32
    ([`accumulating_in`][eqloop.accumulating_in]), and a step that writes a row of an
    array in its carry does not copy the array's cotangent.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), schedule=el.StoreAll())
        >>> scan.plan(0.0, jnp.ones(1000)).evaluations
        1000
    """

    _by_jax: ClassVar[bool] = True

    def layout(self, loop: LoopSpec) -> Layout:
        """Everything is stored, of a loop of any length, even of an unknown one."""
        return Layout(AllAtOnce(loop._problem.loop.length))


# The key of JAX's caches contains it: what was traced elsewhere is traced again.
_is_fitting: Any = jax.make_user_context(False)


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """A context in which loops without a schedule leave it open, see `Fitted`."""
    with _is_fitting(True):
        yield


def is_fitting() -> bool:
    """Whether loops without a schedule leave it open."""
    return _is_fitting.value


@final
@dataclasses.dataclass(frozen=True)
class Fitted(AbstractSchedule):
    """The schedule of a loop in a `Fit`, which decides for all loops together.

    Attributes:
        otherwise: The schedule of a loop for which it does not decide.
    """

    otherwise: AbstractSchedule = StoreAll()

    def layout(self, loop: LoopSpec) -> Layout:
        """What the other schedule decides on."""
        return self.otherwise.layout(loop)


def left_open(schedule: AbstractSchedule) -> AbstractSchedule:
    """The schedule of a loop that was given none: a `Fit` around it may decide."""
    return Fitted(schedule) if is_fitting() else schedule


@final
@dataclasses.dataclass(frozen=True)
class Recursive(AbstractSchedule):
    """Nested segments: memory grows with the logarithm of the length.

    The loop is cut into about `base` segments, each of these into `base` again, and so
    on down to single steps. About `base * log(length, base)` carries are stored at
    once, and each step is run about `log(length, base)` times more. The length can be
    any number: levels become unequal, and no steps are added. All trip counts are
    static, which suits accelerators.

    With a `policy`, the innermost `base` steps are a block, and the residuals that the
    policy allows are stored for the whole block.

    Args:
        base: The number of segments at each level, at least 2. A smaller base takes
            less memory and more time.
        batch: The greatest number of steps to reverse together. They are linearised in
            one batch, and the cotangent of a parameter is a single product of matrices.
            This takes the memory of that many steps, and makes the gradient of a
            recurrent cell several times as fast. Steps that contain branches or effects
            are reversed one by one. By default, steps with many parameters are
            reversed together if that should be faster, and there may be fewer levels.
            This takes at most twice the memory of the slots, or 64 KiB if that is more,
            besides the size of the parameters' cotangents.

    Raises:
        TypeError: If either is not an int.
        ValueError: If `base` is less than 2, or `batch` less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(
        ...     lambda h, x: (jnp.sin(h + x), None), schedule=el.Recursive(10)
        ... )
        >>> plan = scan.plan(0.0, jnp.ones(1000))
        >>> plan.levels
        ((10, 10, 10),)
        >>> plan.slots, plan.evaluations
        (30, 3800)

    References:
        T. Chen, B. Xu, C. Zhang and C. Guestrin, *Training deep nets with sublinear
        memory cost*, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174), section 4.4;
        [jax #2139](https://github.com/jax-ml/jax/pull/2139).
    """

    base: int = 16
    batch: int | None = dataclasses.field(default=None, kw_only=True)

    def __repr__(self) -> str:
        batch = "" if self.batch is None else f", batch={self.batch}"
        return f"Recursive(base={self.base}{batch})"

    def __post_init__(self) -> None:
        make_count(self, "base", self.base, least=2)
        if self.batch is not None:
            make_count(self, "batch", self.batch)

    def layout(self, loop: LoopSpec) -> Layout:
        """Nests of about equal levels; without a policy down to single steps."""
        length = loop.length
        reversal = together(loop._problem.step, self.batch or 1)
        stores_residuals = loop.has_policy and self.batch in (None, 1)
        block = min(self.base, length) if stores_residuals else 1
        # Slots that hold nothing take no memory, and save all recomputation.
        base = self.base if loop.has_slots else length
        order = Nested(nests(length, max(base, 2), block))
        layout = Layout(order, reversal=reversal)
        if self.batch is None and not loop.has_policy:
            return with_batches(loop, layout)
        return layout


@final
@dataclasses.dataclass(frozen=True)
class Chunked(AbstractSchedule):
    """Stores one carry for each chunk, and all carries of the chunk being reversed.

    Each step is run two more times, except for the last step of a chunk and the steps
    of a shorter last chunk, which are run one more time. Chunks of about the square
    root of the length take the least memory.

    With a `policy`, a chunk is a block, and the residuals that the policy allows are
    stored for the whole block.

    Args:
        chunk_size: The number of steps in a chunk. If it is at least the length of the
            loop, there is one chunk, and every carry is stored.
        batch: The greatest number of steps to reverse together. They are linearised in
            one batch, and the cotangent of a parameter is a single product of matrices.
            This takes the memory of that many steps, and makes the gradient of a
            recurrent cell several times as fast. Steps that contain branches or effects
            are reversed one by one.

    Raises:
        TypeError: If either is not an int.
        ValueError: If either is less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(
        ...     lambda h, x: (jnp.sin(h + x), None), schedule=el.Chunked(32)
        ... )
        >>> plan = scan.plan(0.0, jnp.ones(1000))
        >>> plan.levels
        ((31, 32), (8,))
        >>> plan.slots
        63

    References:
        T. Chen, B. Xu, C. Zhang and C. Guestrin, *Training deep nets with sublinear
        memory cost*, [arXiv:1604.06174](https://arxiv.org/abs/1604.06174), section 3.
    """

    chunk_size: int
    batch: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        make_count(self, "chunk_size", self.chunk_size)
        make_count(self, "batch", self.batch)

    def layout(self, loop: LoopSpec) -> Layout:
        """Chunks of equal size, and one nest for what they leave over."""
        length = loop.length
        chunk = min(self.chunk_size, length)
        count, rest = divmod(length, chunk)
        if not loop.has_policy or self.batch > 1:
            levels = (chunk,) if chunk == length else (count, chunk)
            parts = [Nest(levels)] + [Nest((rest,))] * (rest > 0)
        else:
            parts = [Nest((count,), chunk)] + [Nest((1,), rest)] * (rest > 0)
        reversal = together(loop._problem.step, self.batch)
        return Layout(Nested(tuple(parts)), reversal=reversal)


@final
@dataclasses.dataclass(frozen=True)
class Binomial(AbstractSchedule):
    """The least recomputation that is possible with a number of stored carries.

    The slots are one buffer that is used in place, and no other order takes fewer
    evaluations. With `s` slots, loops of up to `comb(s + r, s)` steps are reversed with
    at most `r` evaluations of a step before its reversal. Trip counts depend on the
    position, so a GPU waits for its host. If that matters, use
    [`Recursive`][eqloop.Recursive].

    Args:
        checkpoints: The number of carries stored at once, including the initial one.
        block: The number of consecutive steps whose residuals are stored together. More
            than 1 saves recomputation if the residuals of a step are small. A shorter
            loop is one block.

    Raises:
        TypeError: If either is not an int.
        ValueError: If either is less than 1.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(
        ...     lambda h, x: (jnp.sin(h + x), None), schedule=el.Binomial(30)
        ... )
        >>> plan = scan.plan(0.0, jnp.ones(1000))
        >>> plan.slots, plan.evaluations
        (30, 3475)

    References:
        A. Griewank and A. Walther, *Algorithm 799: revolve*,
        [ACM TOMS 26(1), 2000](https://doi.org/10.1145/347837.347846).
    """

    checkpoints: int
    block: int = dataclasses.field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        make_count(self, "checkpoints", self.checkpoints)
        make_count(self, "block", self.block)

    def layout(self, loop: LoopSpec) -> Layout:
        """A chain of blocks, reversed in place."""
        length = loop.length
        return Layout(Revolved(length, self.checkpoints, min(self.block, length)))


@final
@dataclasses.dataclass(frozen=True)
class StoreLast(AbstractSchedule):
    """Stores everything of the last steps, and takes the first ones back by a schedule.

    The last steps are evaluated once. They are taken back first, and then the memory of
    their residuals is free for the others. So with memory for the residuals of a part
    of the steps, none of these is run again. A [`Budget`][eqloop.Budget] finds by
    itself how many steps that are.

    Args:
        schedule: The schedule of the first steps.
        steps: Of how many steps, the last ones, everything is stored. If the loop has
            no more, this is [`StoreAll`][eqloop.StoreAll].

    Raises:
        TypeError: If `schedule` is not a schedule, or `steps` is not an int.
        ValueError: If `schedule` is a budget, or `steps` is negative.

    Examples:
        A stack of 24 layers, of which the first two are run again.

        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> schedule = el.StoreLast(el.Chunked(1), 22)
        >>> scan = el.Scan(lambda h, w: (jnp.tanh(w @ h), None), schedule=schedule)
        >>> scan.plan(jnp.ones(8), jnp.ones((24, 8, 8))).evaluations
        26

    References:
        `--recompute-method block` of
        [Megatron-LM](https://github.com/NVIDIA/Megatron-LM), which recomputes the first
        so many layers and stores the others.
    """

    schedule: AbstractSchedule
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, AbstractSchedule):
            raise TypeError(
                f"StoreLast: `schedule` must be a schedule, such as `el.Chunked(1)`, "
                f"not {self.schedule!r}."
            )
        if self.schedule.budgeted_bytes is not None:
            raise ValueError(
                f"StoreLast: {self.schedule!r} finds by itself of how many steps "
                f"everything is stored. Use it alone."
            )
        make_count(self, "steps", self.steps, least=0)

    @property
    def undo(self) -> Undo | None:
        """How a step is undone, if the first steps are."""
        return self.schedule.undo

    def layout(self, loop: LoopSpec) -> Layout:
        """The order of the first steps, before that of the last ones."""
        if not self.steps:
            return self.schedule.layout(loop)
        everything, count = Layout(AllAtOnce(loop.length)), loop.length - self.steps
        if count <= 0:
            return everything
        problem = loop._problem
        first = problem.loop.part(count)
        problem = dataclasses.replace(problem, loop=first, planner=self.schedule)
        layout = self.schedule.layout(LoopSpec(problem, loop._active))
        if layout.stores_residuals:
            return everything
        order = layout.slot_order.only_carries()
        last = AllAtOnce(loop.length - order.length)
        return dataclasses.replace(layout, order=FirstAndLast(order, last))


@final
@dataclasses.dataclass(frozen=True)
class Pinned(AbstractSchedule):
    """One plan that was made before: the `pinned` of a [`Plan`][eqloop.Plan].

    Args:
        only: The plan's layout.
        by: How steps are undone, if that is by an inverse.

    Raises:
        TypeError: If that is not a layout.
        ValueError: If a loop of another length is differentiated.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> step = lambda h, x: (jnp.sin(h + x), None)
        >>> found = el.Scan(step, schedule=el.Budget("4KiB")).plan(0.0, jnp.ones(1000))
        >>> scan = el.Scan(step, schedule=found.pinned)
        >>> scan.plan(0.0, jnp.ones(1000)).pinned == found.pinned
        True
    """

    only: Layout
    by: Undo | None = None

    @property
    def undo(self) -> Undo | None:
        """How a step is undone, if it is."""
        return self.by

    @property
    def runner(self) -> AbstractRunner | None:
        """What runs the loop, if not the engine."""
        return self.only.runner

    def __post_init__(self) -> None:
        if not isinstance(self.only, Layout):
            raise TypeError(
                f"Pinned: `only` must be the layout of a plan, not {self.only!r}. Use "
                f"`plan.pinned`."
            )

    def layout(self, loop: LoopSpec) -> Layout:
        """The layout of the plan."""
        planned = self.only.order.length
        if loop.length != planned:
            raise ValueError(
                f"Pinned: this plan is for a loop of {planned} steps, and the loop has "
                f"{loop.length}. Use the schedule that made the plan."
            )
        return self.only


def make_count(schedule: object, name: str, value: object, least: int = 1) -> None:
    """Makes a field an int, if its value is one of some kind, and not too small."""
    owner = type(schedule).__name__
    if (count := int_of(value)) is None:
        raise TypeError(
            f"{owner}: `{name}` must be an int, not {value!r} of type "
            f"{type(value).__name__}."
        )
    if count < least:
        raise ValueError(f"{owner}: `{name}` must be at least {least}, not {count}.")
    object.__setattr__(schedule, name, count)


# The policy of a loop, once it is one that JAX takes.
LoopPolicy: TypeAlias = Callable[..., Any] | Literal["auto"] | None


def as_loop_policy(
    owner: str, policy: "Policy | Callable[..., Any] | str | None"
) -> LoopPolicy:
    """The policy of a loop: `"auto"` as well, if a budget is to choose it."""
    if isinstance(policy, AbstractSchedule):
        raise TypeError(
            f"{owner}: `policy` says which values of a step are stored, but it is a "
            f"schedule. Did you mean `schedule={policy!r}`?"
        )
    is_auto = isinstance(policy, str) and policy == AUTO
    return AUTO if is_auto else as_jax_policy(owner, policy)
