"""A case: a program, what is evaluated of it, and where that stands."""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import eqloop as el

from . import modes
from .programs import Program
from .transforms import Transform
from .values import DIFFERENTIABLE, Precision, Type, random_value
from .world import World

AXIS, BATCH = "batch", 2
# How the library's may be run beside the default: in one of JAX's modes, which may also
# look for what is not a number in the reference, or with all of its inputs donated.
DONATING: dict[str, Callable[..., Any]] = {
    "donate": functools.partial(jax.jit, donate_argnums=0),
    "Jit": el.Jit(donate="all"),
}
SETTINGS = ("disable_jit", "debug_nans", *DONATING)
# XLA takes minutes for some ten thousand, and gigabytes for the next ten thousand.
MOST_EQUATIONS = 20_000


# Where a mode, or the run within it, may stand


def _plain(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
    return evaluate(run, *args)


def _looped(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
    """The derivative inside a loop."""
    body = lambda scale: evaluate(run, *(x * scale.astype(x.dtype) for x in args))
    return lax.map(body, jnp.array([1.0, 0.5], args[0].real.dtype))


def _in_cond(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
    one = lambda args: evaluate(run, *args)
    shapes = jax.eval_shape(one, args)
    other = lambda _: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(jnp.sum(args[0].real) < 1e3, one, other, args)


def _rematerialised(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
    return evaluate(jax.checkpoint(run), *args)


def _run_in_scan(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
    """The derivative of a loop that has the run in its body."""

    def outer(*args: Any) -> list[Any]:
        body = lambda total, scale: (
            total,
            run(*(x * scale.astype(x.dtype) for x in args)),
        )
        return lax.scan(body, 0, jnp.array([1.0, 0.5], args[0].real.dtype))[1]

    return evaluate(outer, *args)


# One loop that computes what is known and what is linear: JAX has to divide it.

Loop = Callable[..., Callable[..., Any]]


def _pushed(run: modes.Run, loop: Loop, args: Any, dots: Any) -> Any:
    """The outputs of a run and their tangents, by a loop that carries both inputs."""

    def step(carry: Any, weight: Any) -> Any:
        args, dots = carry
        outs = jax.jvp(modes.inexact(run), args, dots)
        after = [x * weight.astype(x.dtype) for x in args], dots
        return tuple(map(tuple, after)), outs

    xs = jnp.array([1.0, 0.5], args[0].real.dtype)
    _, outs = loop(step)((args, dots), xs)
    return jax.tree.map(lambda y: y[0] + y[1], outs)


def _in_rule(loop: Loop) -> Callable[..., Any]:
    """A run whose rule in forward mode is such a loop."""

    def place(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
        @jax.custom_jvp
        def ruled(*args: Any) -> list[Any]:
            return _pushed(run, loop, args, jax.tree.map(jnp.zeros_like, args))[0]

        ruled.defjvp(lambda args, dots: _pushed(run, loop, args, dots))
        return evaluate(ruled, *args)

    return place


def _transposed(loop: Loop) -> Callable[..., Any]:
    """The transpose of the tangents, which are linear beside outputs that are not."""

    def place(evaluate: Callable[..., Any], run: modes.Run, *args: Any) -> Any:
        def transposed(*args: Any) -> list[Any]:
            def linear(*dots: Any) -> list[Any]:
                outs, dots = _pushed(run, loop, args, dots)
                return [d * jnp.cos(o) for o, d in zip(outs, dots, strict=True)]

            out = jax.eval_shape(linear, *args)
            cts = modes.direction(
                jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), out)
            )
            return list(jax.linear_transpose(linear, *args)(cts))

        return evaluate(transposed, *args)

    return place


PLACES: dict[str, Callable[..., Any]] = {
    "plain": _plain,
    "looped": _looped,
    "in_cond": _in_cond,
    "rematerialised": _rematerialised,
    "run_in_scan": _run_in_scan,
    "in_rule": _in_rule(el.CheckpointedScan(base=2)),
    "transposed": _transposed(el.Scan(schedule=el.Binomial(2))),
}
# Where the library's loop stands in the place itself, JAX's is the reference.
REFERENCES = {
    "in_rule": _in_rule(lambda step: functools.partial(lax.scan, step)),
    "transposed": _transposed(lambda step: functools.partial(lax.scan, step)),
}
# Here JAX differentiates a loop or a `checkpoint` around the run, by its own rules.
THROUGH_JAX = ("rematerialised", "run_in_scan", *REFERENCES)


def _size(program: Any) -> int:
    """How many equations a jaxpr has, with those inside of others."""
    equations = getattr(program, "jaxpr", program).eqns
    inner = (jex.jaxprs_in_params(eqn.params) for eqn in equations)
    return len(equations) + sum(_size(program) for some in inner for program in some)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and what is evaluated of it.

    Attributes:
        seed: What it was made from.
        program: The program.
        mode: The name of a mode.
        place: Where it stands.
        vmap: `"inside"` for a derivative of the batched program, `"outside"` for a
            batch of derivatives, or `"none"`.
        is_jitted: Whether the library's is compiled as a whole.
        is_strict: Whether dtypes and ranks may not be promoted.
        precision: The dtypes.
        width: How long vectors are.
        differentiated: Which inputs are.
        batched: Which inputs are.
        has_axis: Whether `vmap` has a name.
        scalars: Which inputs are Python numbers.
        setting: How the library's is run: one of `SETTINGS`.
        is_spread: Whether each example of a batch is on a device of its own.
        is_checked: Whether JAX then tells what is the same on all devices from what is
            not.
        rescheduled: How loops of JAX's own are run, if they are.
        rescheduled_at: Of what: a `"call"`, a `"run"` of a batch of them, or the
            `"whole"` that is evaluated.
    """

    seed: int
    program: Program
    mode: str
    place: str
    vmap: str
    is_jitted: bool
    is_strict: bool
    precision: Precision
    width: int
    differentiated: tuple[int, ...]
    batched: tuple[bool, ...]
    has_axis: bool
    scalars: tuple[int, ...] = ()
    setting: str = "none"
    is_spread: bool = False
    is_checked: bool = False
    rescheduled: Transform | None = None
    rescheduled_at: str = "call"

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(self) if f.name != "program"]
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"Case({fields})\n{self.program}"

    @contextlib.contextmanager
    def environment(self) -> Iterator[None]:
        """JAX's settings for this case. It is run once, so compiling is to be quick."""
        dtypes, ranks = ("strict", "raise") if self.is_strict else ("standard", "allow")
        is_slow = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            with (
                jax.enable_x64(self.precision.x64),
                jax.numpy_dtype_promotion(dtypes),
                jax.numpy_rank_promotion(ranks),
            ):
                yield
        finally:
            jax.config.update("jax_disable_most_optimizations", is_slow)

    def values(self, nudge: float = 0.0) -> list[Any]:
        """The inputs."""
        rng = random.Random(self.seed)
        values = []
        for i, type in enumerate(self.program.inputs):
            is_batched = self.vmap != "none" and self.batched[i]
            shape = (BATCH, *type.shape) if is_batched else type.shape
            value = random_value(rng, Type(type.kind, shape), self.precision)
            if nudge and type.kind in DIFFERENTIABLE:
                value = value * (1 + nudge)
            values.append(float(value) if i in self.scalars else value)
        return values

    def evaluate(
        self, is_written_out: bool, is_jitted: bool = True, nudge: float = 0.0
    ) -> "Result":
        """The result, by the library or written out."""
        return self.evaluator(is_written_out, is_jitted)(nudge)

    def evaluator(
        self, is_written_out: bool, is_jitted: bool = True
    ) -> Callable[[float], "Result"]:
        """From how far the inputs are moved to the result; it is compiled once."""
        axis = AXIS if self.has_axis else None
        world = World(is_written_out, self.precision, self.width, axis)
        at = self.differentiated
        axes = [0 if b and self.vmap != "none" else None for b in self.batched]

        def derivative(values: Any, axes: Any) -> Any:
            def run(*given: Any) -> Any:
                full = [*values]
                for i, x in zip(at, given, strict=True):
                    full[i] = x
                call = lambda *full: self._run(world, full)
                call = self._rescheduled(call, "call", is_written_out)
                if axes is None:
                    return call(*full)
                return self._map(call, axes, is_written_out)(*full)

            run = self._rescheduled(run, "run", is_written_out)
            mode = getattr(modes, self.mode)
            places = PLACES | (REFERENCES if is_written_out else {})
            return places[self.place](mode, run, *(values[i] for i in at))

        def whole(values: Any) -> Any:
            if self.vmap == "none":
                return derivative(values, None)
            if self.vmap == "inside":
                return derivative(values, axes)
            one = lambda *values: derivative(values, None)
            return self._map(one, axes, is_written_out)(*values)

        evaluate = whole = self._rescheduled(whole, "whole", is_written_out)
        donates = self.setting in DONATING and not is_written_out
        if donates:
            evaluate = DONATING[self.setting](whole)
        elif is_jitted and not self.scalars:
            evaluate = jax.jit(whole)
            traced = lambda: evaluate.trace(self.values()).jaxpr
            if is_written_out and _size(traced()) > MOST_EQUATIONS:
                raise ValueError("too much to be written out")

        def result(nudge: float) -> Result:
            values = self.values(nudge)
            with self._mode(is_written_out):
                if donates:
                    jax.block_until_ready(evaluate(self.values(nudge)))
                    world.forget()
                out = jax.block_until_ready(evaluate(values))
                jax.effects_barrier()
            if (self.mode != "primal" and not self.rescheduled) or self.vmap != "none":
                return Result(out)  # how often it has effects is up to JAX
            return Result(
                out, [*map(float, world.log)], sorted(map(float, world.unordered))
            )

        return result

    def _run(self, world: World, values: Any) -> Any:
        if "ref" not in self.program.names():
            return self.program(world, values)
        world.ref = jax.new_ref(jnp.zeros((), self.precision.dtype("f")))
        out = self.program(world, values)
        return [*out, world.ref[...]]

    def _mode(self, is_written_out: bool) -> contextlib.AbstractContextManager[Any]:
        if self.setting == "debug_nans":
            return jax.debug_nans(True)
        if self.setting == "disable_jit" and not is_written_out:
            return jax.disable_jit()
        return contextlib.nullcontext()

    def _rescheduled(
        self, f: Callable[..., Any], at: str, is_written_out: bool
    ) -> Callable[..., Any]:
        is_here = self.rescheduled is not None and self.rescheduled_at == at
        return self.rescheduled.made(f) if is_here and not is_written_out else f

    def _map(
        self, f: Callable[..., Any], axes: Any, is_written_out: bool
    ) -> Callable[..., Any]:
        if self.is_spread and not is_written_out:
            if not self.is_checked:
                return _spread(f, axes, False)
            # What is differentiated on a device has a derivative on each.
            own = self.differentiated if self.vmap == "outside" else ()
            return _spread(f, axes, True, own)
        name = {"axis_name": AXIS} if self.has_axis else {}
        return jax.vmap(f, tuple(axes), axis_size=BATCH, **name)


def _spread(
    f: Callable[..., Any], axes: Any, is_checked: bool, own: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Runs each example on a device of its own: the same as `vmap` gives.

    Args:
        f: What is run.
        axes: Which inputs differ between devices, as `vmap` has it.
        is_checked: Whether JAX checks that.
        own: The inputs which each device has by itself, even if they are the same.
    """

    def on_device(*args: Any) -> Any:
        mine = [x if axis is None else x[0] for axis, x in zip(axes, args, strict=True)]
        for i in own:
            if axes[i] is None:
                mine[i] = lax.pcast(mine[i], AXIS, to="varying")
        return jax.tree.map(lambda y: y[None], f(*mine))

    mesh = Mesh(np.array(jax.devices()[:BATCH]), (AXIS,))
    specs = tuple(PartitionSpec(*[AXIS] * (axis is not None)) for axis in axes)
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(AXIS),
        check_vma=is_checked,
    )
    return jax.jit(run)


@dataclasses.dataclass
class Result:
    """What came of it: arrays, and what effects have seen, in order or in none."""

    arrays: Any
    ordered: Any = ()
    unordered: Any = ()
