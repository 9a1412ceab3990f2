"""A case: a random program, what is evaluated of it, and where that stands.

A case is made from a seed alone, so a seed is all that it takes to have it again.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import modes
from .grow import Features
from .programs import Program, random_program
from .rules import RULES
from .values import DIFFERENTIABLE, Precision, Type, random_value
from .world import World

AXIS, BATCH = "batch", 2


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


PLACES: dict[str, Callable[..., Any]] = {
    "plain": _plain,
    "looped": _looped,
    "in_cond": _in_cond,
    "rematerialised": _rematerialised,
    "run_in_scan": _run_in_scan,
}
# Here JAX differentiates a loop or a `checkpoint` around the run, by its own rules.
THROUGH_JAX = ("rematerialised", "run_in_scan")


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
        with (
            jax.enable_x64(self.precision.x64),
            jax.numpy_dtype_promotion(dtypes),
            jax.numpy_rank_promotion(ranks),
        ):
            yield
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
        axis = AXIS if self.has_axis else None
        world = World(is_written_out, self.precision, self.width, axis)
        values = self.values(nudge)
        at = self.differentiated
        axes = [0 if b and self.vmap != "none" else None for b in self.batched]

        def derivative(values: Any, axes: Any) -> Any:
            def run(*given: Any) -> Any:
                full = [*values]
                for i, x in zip(at, given, strict=True):
                    full[i] = x
                call = lambda *full: self._run(world, full)
                if axes is None:
                    return call(*full)
                return self._map(call, axes)(*full)

            mode = getattr(modes, self.mode)
            return PLACES[self.place](mode, run, *(values[i] for i in at))

        def whole(values: Any) -> Any:
            if self.vmap == "none":
                return derivative(values, None)
            if self.vmap == "inside":
                return derivative(values, axes)
            return self._map(lambda *vs: derivative(vs, None), axes)(*values)

        evaluate = jax.jit(whole) if is_jitted and not self.scalars else whole
        out = jax.block_until_ready(evaluate(values))
        jax.effects_barrier()
        if self.mode != "primal" or self.vmap != "none":
            return Result(out)  # how often it has effects is up to JAX
        return Result(
            out, [*map(float, world.log)], sorted(map(float, world.unordered))
        )

    def _run(self, world: World, values: Any) -> Any:
        if "ref" not in self.program.names():
            return self.program(world, values)
        world.ref = jax.new_ref(jnp.zeros((), self.precision.dtype("f")))
        out = self.program(world, values)
        return [*out, world.ref[...]]

    def _map(self, f: Callable[..., Any], axes: Any) -> Callable[..., Any]:
        name = {"axis_name": AXIS} if self.has_axis else {}
        return jax.vmap(f, tuple(axes), axis_size=BATCH, **name)


@dataclasses.dataclass
class Result:
    """What came of it: arrays, and what effects have seen, in order or in none."""

    arrays: Any
    ordered: Any = ()
    unordered: Any = ()


# Random ones


def random_case(seed: int, left_out: frozenset[str] = frozenset()) -> Case:
    """The case that a seed stands for.

    Args:
        seed: The seed.
        left_out: What is not to be in it: names of modes, rules, effects or kinds of
            programs. Other choices are then other ones, so that it is part of the seed.
    """
    rng = random.Random(seed)
    pick = lambda names: rng.choice([n for n in names if n not in left_out])
    all_modes = [m.__name__ for m in modes.FIRST * 2 + modes.SECOND]
    mode, place = pick(all_modes), pick([*["plain"] * 5, *PLACES])
    vmap = pick(["none", "none", "inside", "outside"])
    effects = _effects(rng, mode, vmap, left_out)
    if effects:
        place = "plain"
    if mode == "primal" and place in ("looped", "rematerialised"):
        place = "plain"
    precision = rng.choice(
        [Precision()] * 8
        + [Precision(real="float32"), Precision(x64=False, real="float32")] * 2
        + [Precision(half="bfloat16"), Precision(half="float16")]
    )
    has_axis = vmap != "none" and rng.random() < 0.5
    is_second = mode in {m.__name__ for m in modes.SECOND}
    features = Features(
        kinds="fib"
        + "c" * _is_complex(rng, mode)
        + "k" * (rng.random() < 0.3)
        + "h" * (precision.half is not None),
        rules=_rules(rng, mode, is_second and place in THROUGH_JAX, left_out),
        effects=effects,
        has_axis=has_axis,
        while_loops=_while_loops(mode),
    )
    width = rng.choice([1, 2, 3, 3])
    length = rng.choice([0, 1, 2, 3, 4, 5, 6, 7] if is_second else [*range(13), 30])
    program = random_program(rng, width, features, length)
    differentiated = _differentiated(rng, program)
    count = len(program.inputs)
    batched = tuple(rng.random() < 0.5 for _ in range(count))
    return Case(
        seed=seed,
        program=program,
        mode=mode,
        place=place,
        vmap=vmap,
        is_jitted=rng.random() < 0.7,
        is_strict=rng.random() < 0.3,
        precision=precision,
        width=width,
        differentiated=differentiated,
        batched=batched,
        has_axis=has_axis,
        scalars=_scalars(rng, program, differentiated, vmap),
    )


def _effects(
    rng: random.Random, mode: str, vmap: str, left_out: frozenset[str]
) -> tuple[str, ...]:
    names = ["debug"]
    if vmap == "none" and mode in {m.__name__ for m in modes.WITH_REF}:
        names.append("ref")
    if vmap == "none" and mode == "primal":
        names.append("ordered")
    names = [name for name in names if name not in left_out]
    chance = 0.5 if mode == "primal" else 0.1
    return (rng.choice(names),) if names and rng.random() < chance else ()


def _is_complex(rng: random.Random, mode: str) -> bool:
    return mode in {m.__name__ for m in modes.COMPLEX} and rng.random() < 0.3


def _rules(
    rng: random.Random, mode: str, only_honest: bool, left_out: frozenset[str]
) -> tuple[str, ...]:
    if rng.random() < 0.4:
        return ()
    has_backward = mode in {m.__name__ for m in modes.WITHOUT_JVP}
    return tuple(
        name
        for name, rule in RULES.items()
        if name not in left_out
        and (rule.is_forward or has_backward)
        and (rule.is_honest or not only_honest)
    )


def _while_loops(mode: str) -> tuple[str, ...]:
    loops = ("BoundedWhileLoop", "CheckpointedWhileLoop")
    if mode in {m.__name__ for m in modes.FORWARD}:
        return (*loops, "lax.while_loop", "WhileLoop")
    return loops


def _differentiated(rng: random.Random, program: Program) -> tuple[int, ...]:
    """Up to three of the inputs that can be."""
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    return tuple(sorted(rng.sample(fits, rng.randint(1, min(3, len(fits))))))


def _scalars(
    rng: random.Random, program: Program, differentiated: Any, vmap: str
) -> tuple[int, ...]:
    if vmap != "none" or rng.random() < 0.8:
        return ()
    return tuple(
        i
        for i, type in enumerate(program.inputs)
        if type == Type("f") and i not in differentiated and rng.random() < 0.5
    )
