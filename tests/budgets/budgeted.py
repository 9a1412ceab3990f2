"""A case: the gradient of a random program whose loop or map has a budget."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import eqloop as el

from ..random_programs.buffers import Buffered
from ..random_programs.cases import Case
from ..random_programs.endings import Ended
from ..random_programs.programs import Layers, Program, Rows, Scanned
from ..random_programs.transforms import Settings
from ..random_programs.values import is_inexact
from ..random_programs.world import World
from .chains import Chain, by_scan, foreign
from .plain import checkpointed, plain

Gradient: TypeAlias = tuple[Callable[..., Any], tuple[Any, Any]]
# The settings of a loop that leaves out rows.
_OF_A_SLICE = ("start", "stop", "step")


@dataclasses.dataclass(frozen=True)
class Budgeted(Case):
    """A program whose gradient has a budget.

    Attributes:
        more: How many times the least that will do is in the budget.
        unused: Which outputs the loss leaves out.
        limit: Where a loop that may end does, if it counts.
        others: The settings of its budget: a second place, or whether it is measured.
        how: By what it has the budget: by `Budget`, or by `Reschedule`, `Fit` or `Fit
            foreign` around it, the first and the last with loops of JAX's.
        constants: Which of the inputs are arrays of NumPy that it closes over.
        loss: What is differentiated of the carry: its `squares`, those of the `first`
            leaf, or its `sum`.
        has_value: Whether the loss is returned as well, as by a `Fit` in any case.
        is_inner: Whether the budget is for one example, within a `vmap`.
        devices: Over how many devices a batch is split, if it is.
        within_jit: Whether the program is under a `jax.jit` of its own.
        transposed: Which inputs are given with their first two axes in the other order,
            and are transposed before the loop.
    """

    more: float = 1.0
    unused: tuple[int, ...] = ()
    limit: int = 5
    others: Settings = (("measure", False),)
    how: str = "Budget"
    constants: tuple[int, ...] = ()
    loss: str = "squares"
    has_value: bool = False
    is_inner: bool = False
    devices: int = 0
    within_jit: bool = False
    transposed: tuple[int, ...] = ()

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """JAX's settings for this case: XLA's are those of users."""
        with (
            jax.enable_x64(self.precision.x64),
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
        ):
            yield

    def values(self, nudge: float = 0.0) -> list[Any]:
        """The inputs."""
        values = super().values(nudge)
        if isinstance(self.program, Ended | Buffered):
            values[0] = jnp.full_like(values[0], self.limit)
        return self._transposed(values)

    def _transposed(self, values: Sequence[Any]) -> list[Any]:
        swap = lambda i, x: jnp.swapaxes(x, 0, 1) if i in self.transposed else x
        return [swap(i, x) for i, x in enumerate(values)]

    @property
    def name(self) -> str:
        """What has the budget, and of what."""
        of = self.program.transform.name
        return of if self.how == "Budget" else f"{self.how} of {of}"

    @property
    def is_fit(self) -> bool:
        """Whether the budget is for all of the function."""
        return self.how.startswith("Fit")

    @property
    def slack(self) -> int:
        """The bytes that the loop does not take: for sums, and over devices.

        The value may read a leaf of the last carry that nobody differentiates. What is
        transposed is copied, and so is its cotangent. XLA does the same to `xs` whose
        axis is moved before a loop of JAX's. Such a loop also gives rows that are left
        out behind it.
        """
        if self.is_fit:
            return 0
        count = 64 * (self.has_value + bool(self.devices))
        count *= 2 + 2 * len(self.program.inputs)
        count += 2 * self._bytes(self.transposed)
        is_foreign = self.how == "Reschedule"
        is_moved = any(getattr(self.program, "x_axes", ()))
        is_moved |= is_foreign and self.vmap == "inside"
        if self.has_value or is_moved:
            count += self._bytes(range(len(self.program.inputs)))
        if is_moved:
            count += self._bytes(self.differentiated)
        if is_foreign and self.program.transform.name == "SlicedScan":
            count += 2 * self._bytes_of_all_rows()
        shared = [i for i in self.differentiated if not self.batched[i]]
        return count + 2 * self._bytes(shared if self.devices else ())

    def _bytes_of_all_rows(self) -> int:
        """What a loop gives that has a row for each step, also for those left out."""
        transform = self.program.transform
        run = self._on_batches(self._outputs(self.program), self.program, None)
        rows = jax.eval_shape(run, *self.values())[1]
        kept = range(transform.length)[slice(*map(transform.get, _OF_A_SLICE))]
        size = sum(row.size * row.dtype.itemsize for row in rows)
        return size * transform.length // max(len(kept), 1)

    def _bytes(self, inputs: Iterable[int]) -> int:
        values = self.values()
        return sum(values[i].nbytes for i in inputs)

    def budget(self, nbytes: int) -> el.Budget:
        """A budget of so many bytes."""
        return el.Budget(nbytes, **dict(self.others))

    @property
    def room(self) -> int:
        """How many bytes there are in the second place."""
        others = dict(self.others)
        return others.get("host") or others.get("disk") or 0

    @property
    def has_host(self) -> bool:
        """Whether that is the memory of the host, which on a CPU is the device's."""
        return "host" in dict(self.others)

    # Each of these is a gradient, and what it is to be called with.

    def reference(self) -> Gradient:
        """The one by plain JAX."""
        return self._gradient(self._with(plain, by_scan))

    def checkpointed(self) -> Gradient:
        """The one by plain JAX that stores inputs and carries, and nothing else."""
        return self._gradient(self._with(checkpointed, by_scan), jax.checkpoint)

    def within(self, budget: Any) -> Gradient:
        """The one with a budget."""
        if self.how == "Budget":
            transform = self.program.transform
            is_map = transform.name == "ChunkedVmap"
            setting = "chunk_size" if is_map else "schedule", budget
            settings = (*transform.settings, setting)
            transform = dataclasses.replace(transform, settings=settings)
            return self._gradient(
                dataclasses.replace(self.program, transform=transform)
            )
        around = {
            "Reschedule": lambda f: el.Reschedule(f, budget),
            "Fit": lambda f: el.Fit(f, budget.nbytes),
            "Fit foreign": lambda f: el.Fit(f, budget.nbytes, foreign=True),
        }
        same = lambda transform: transform
        ways = (same, same) if self.how == "Fit" else (plain, foreign)
        return self._gradient(self._with(*ways), around[self.how])

    def _with(
        self, change: Callable[..., Any], of_stage: Callable[..., Any]
    ) -> Program:
        if isinstance(self.program, Chain):
            return self.program.by(of_stage)
        return dataclasses.replace(
            self.program, transform=change(self.program.transform)
        )

    def _gradient(
        self, program: Program, around: Callable[..., Any] | None = None
    ) -> Gradient:
        """The gradient of a program.

        The cotangents of outputs of all steps are arguments, as they are not the
        loop's; those of the last carry are computed from it, as by any loss.

        Args:
            program: The program.
            around: What is around it, if anything is.
        """
        values, at = self.values(), self.differentiated
        f = self._on_batches(self._outputs(program), program, around)

        def run(values: Any, given: Any) -> Any:
            full = [*values]
            for i, x in zip(at, given, strict=True):
                full[i] = x
            return f(*full)

        def gradient(values: Any, cts: Any) -> Any:
            of = lambda *given: run(values, given)
            (out, rows), pull = jax.vjp(of, *(values[i] for i in at))
            if self.is_fit:
                # All that it returns are outputs, which are not counted. They come in
                # the order of `jax.value_and_grad`: XLA's schedule depends on it.
                return out, rows, pull((jnp.ones_like(out), cts))
            grads = pull((self._cotangents(out), cts))
            return (grads, self._loss(out)) if self.has_value else grads

        rows = jax.eval_shape(run, values, [values[i] for i in at])[1]
        cts = [jnp.full(row.shape, 0.5, row.dtype) for row in rows]
        return gradient, (values, cts)

    def _outputs(self, program: Program) -> Callable[..., tuple[list[Any], list[Any]]]:
        """What is used of the carry, and of what has a row for each step."""
        world = World(False, self.precision, self.width)
        carries, values = carry_count(program), self.values()

        def call(*full: Any) -> tuple[list[Any], list[Any]]:
            out = dict(enumerate(program(world, full)))
            used = [i for i in out if is_inexact(out[i]) and i not in self.unused]
            carry = [out[i] for i in used if i < carries]
            return carry, [out[i] for i in used if i >= carries]

        constants = {i: np.asarray(values[i]) for i in self.constants}
        if self.vmap == "inside":  # of each example the same
            own = {i: x[0] for i, x in constants.items() if self.batched[i]}
            constants |= own

        def closed(*full: Any) -> tuple[list[Any], list[Any]]:
            given = [constants.get(i, x) for i, x in enumerate(full)]
            return call(*self._transposed(given))

        return jax.jit(closed) if self.within_jit else closed

    def _on_batches(
        self, call: Any, program: Program, around: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """The program with what is around it, on all examples."""
        around = around or (lambda f: f)
        is_batched = self.vmap == "inside"
        is_inner = is_batched and self.is_inner and not self.is_fit
        one, call = call, around(call) if is_inner else call
        if is_batched:
            axes = tuple(0 if is_batched else None for is_batched in self.batched)
            # Outputs lie as the loop stacks them: to put the batch first copies them.
            stacked = 0 if program.transform.name == "ChunkedVmap" else 1
            outs = _out_axes(one, axes, self.values(), (0, stacked))
            call = jax.vmap(call, axes, outs)
        if self.is_fit:
            whole = call
            call = lambda *full: (self._loss((out := whole(*full))[0]), out[1])
        call = call if is_inner else around(call)
        if is_batched and self.devices:
            call = _on_devices(call, self.devices, axes, outs)
        return call

    def _loss(self, carry: Sequence[Any]) -> Any:
        of = jnp.real if self.loss == "sum" else lambda x: jnp.real(x * jnp.conj(x))
        leaves = carry[:1] if self.loss == "first" else carry
        real = self.precision.dtype("f")
        return sum((jnp.sum(of(x).astype(real)) for x in leaves), jnp.zeros((), real))

    def _cotangents(self, carry: Sequence[Any]) -> list[Any]:
        """Those of the loss, without its sums, which are not the loop's."""
        if self.loss == "sum":
            return [jnp.ones_like(x) for x in carry]
        is_used = [self.loss != "first" or i == 0 for i in range(len(carry))]
        pairs = zip(carry, is_used, strict=True)
        return [2 * jnp.conj(x) if used else jnp.zeros_like(x) for x, used in pairs]


def _on_devices(call: Any, count: int, axes: Any, outs: Any) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()[:count]), ("rows",))

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec(*[] if axis is None else [*[None] * axis, "rows"])

    specs = tuple(list(map(spec, group)) for group in outs)
    ins = tuple(map(spec, axes))
    return jax.shard_map(call, mesh=mesh, in_specs=ins, out_specs=specs)


def _out_axes(call: Any, axes: Any, values: Any, batched: tuple[int, int]) -> Any:
    """The axes of a batch of outputs, with none for those that all examples have.

    To hand these out once for each example takes memory of its own.
    """

    def axis(group: int, i: int) -> int | None:
        try:
            one = jax.vmap(lambda *full: call(*full)[group][i], axes, None)
            jax.eval_shape(one, *values)
        except ValueError:
            return batched[group]
        return None

    one = jax.vmap(call, axes)
    counts = [len(group) for group in jax.eval_shape(one, *values)]
    return tuple([axis(n, i) for i in range(count)] for n, count in enumerate(counts))


def carry_count(program: Program) -> int:
    """How many of the outputs are the last carry; the others have a row a step."""
    match program:
        case Scanned():
            return len(jax.tree.leaves(program.trees[0]))
        case Ended():
            return 1 + program.carry
        case Layers() | Buffered():
            return len(program.bodies[0].outputs) + 4
        case Chain():
            return program.carry
        case Rows():
            return 0
    raise TypeError(f"{type(program).__name__} has no budget")
