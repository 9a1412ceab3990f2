"""Cases of programs with loops of JAX's own, which `el.Reschedule` runs.

A loop of JAX stays in the reference, but for a while loop: that has no reverse mode, so
a scan is in its place, whose steps do nothing from when it would have ended.
"""

import dataclasses
import random
from typing import Any

import eqloop as el

from . import modes, settings
from .cases import PLACES, THROUGH_JAX, Case
from .grow import CUSTOM, Features, Grower
from .programs import (
    Arrays,
    Program,
    composed,
    lengthened,
    parts_of,
    random_types,
)
from .rules import RULES
from .transforms import Transform, scan
from .values import DIFFERENTIABLE, Precision
from .world import World


@dataclasses.dataclass(frozen=True)
class Foreign(Program):
    """A `lax.scan`, which may be long."""

    parameters: int = 0
    carry: int = 0

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        parameters, init, xs = parts_of(inputs, self.parameters, self.carry)

        def step(carry: Any, x: Any) -> Any:
            out = world.run(self.bodies[0], [*parameters, *carry, *x])
            return out[: self.carry], out[self.carry :]

        carry, ys = scan(self.transform, world.is_written_out, step)(init, xs)
        return [*carry, *ys]


def foreign(rng: random.Random, width: int, features: Features, length: int) -> Program:
    kinds = features.kinds
    parameters = random_types(rng, width, kinds, rng.randint(0, 2))
    carry = random_types(rng, width, kinds, rng.randint(0, 2))
    xs = random_types(rng, width, kinds, rng.randint(0, 2))
    ys = random_types(rng, width, kinds, rng.randint(0, 2))
    inner = [*parameters, *carry, *xs]
    body = Grower(rng, width, features, inner).body([*carry, *ys], rng.randint(2, 8))
    return Foreign(
        (*parameters, *carry, *(lengthened(x, length) for x in xs)),
        (body,),
        settings.plain_scan(rng, length),
        parameters=len(parameters),
        carry=len(carry),
    )


@dataclasses.dataclass(frozen=True)
class Only:
    """Picks loops by their depth, and all those that have no reverse mode."""

    least: int = 0
    most: int = 9

    def __call__(self, loop: el.ForeignLoop) -> bool:
        return loop.length is None or self.least <= loop.depth <= self.most


def rescheduled_case(seed: int, left_out: frozenset[str] = frozenset()) -> Case:
    """The case that a seed stands for; see `random_case`."""
    rng = random.Random(f"rescheduled {seed}")
    pick = lambda names: rng.choice([n for n in names if n not in left_out])
    mode = pick([m.__name__ for m in modes.FIRST * 2 + modes.SECOND])
    place = pick([*["plain"] * 6, *PLACES])
    vmap = pick(["none", "none", "inside", "outside"])
    is_forward = mode in {m.__name__ for m in modes.FORWARD} and place != "transposed"
    effects = _effects(rng, mode, place, vmap, left_out)
    precision = rng.choice(
        [Precision()] * 6
        + [Precision(x64=False, real="float32"), Precision(half="bfloat16")]
    )
    is_complex = mode in {m.__name__ for m in modes.COMPLEX} and rng.random() < 0.2
    # A named axis or devices: where there are both, the axis would be in neither.
    has_axis = vmap != "none" and rng.random() < 0.4
    features = Features(
        kinds="fib"
        + "c" * is_complex
        + "k" * (rng.random() < 0.3)
        + "h" * (precision.half is not None),
        rules=_rules(rng, mode, place, left_out),
        effects=effects,
        has_axis=has_axis,
        devices=0 if has_axis else rng.choice([0, 0, 1, 2, 3]),
        is_foreign=True,
        wrappers=("jax.checkpoint", "jax.jit", *_custom(mode, place)),
        without=left_out,
    )
    width = rng.choice([1, 2, 3, 3])
    is_second = mode in {m.__name__ for m in modes.SECOND}
    length = rng.choice([0, 1, 2, 3, 4, 5] if is_second else [*range(10), 17])
    kind = rng.choice([foreign, composed])
    program = kind(rng, width, features, length)
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    if not fits:
        program = composed(rng, width, features, length)
        fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    some = rng.sample(fits, rng.randint(1, min(3, len(fits))))
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
        differentiated=tuple(sorted(some)),
        batched=tuple(rng.random() < 0.5 for _ in program.inputs),
        has_axis=has_axis,
        rescheduled=_how(rng, length, is_forward),
        rescheduled_at=_where(rng, program, is_forward, vmap),
    )


def _how(rng: random.Random, length: int, is_forward: bool) -> Transform:
    made: dict[str, Any] = {"schedule": settings.schedule(rng, length)}
    if rng.random() < 0.3:
        made["policy"] = settings.policy(rng, made["schedule"])
    if not is_forward or rng.random() < 0.5:
        # With a smaller base there are many levels, and XLA takes its time.
        made["whiles"] = rng.choice([1, 2, 3, 4, 5, 6, 7, el.Recursive(64)])
    if rng.random() < 0.3:
        made["only"] = rng.choice([Only(most=0), Only(most=1), Only(least=1)])
    return Transform("Reschedule", tuple(made.items()))


def _where(rng: random.Random, program: Program, is_forward: bool, vmap: str) -> str:
    """What is rescheduled: a call, a batch of calls, or the derivative itself."""
    has_while = "is_masked" in str(program)
    where = ["call"] * 3
    where += ["run"] * (vmap == "inside")
    where += ["whole"] * (is_forward or not has_while)
    return rng.choice(where)


def _effects(
    rng: random.Random, mode: str, place: str, vmap: str, left_out: frozenset[str]
) -> tuple[str, ...]:
    """Of one kind, which plain JAX has as often as the function is evaluated."""
    if place != "plain" or vmap != "none" or mode not in _NOTED or rng.random() < 0.6:
        return ()
    names = ["debug", "ref", *["ordered"] * (mode == "primal")]
    names = [name for name in names if name not in left_out]
    return (rng.choice(names),) if names else ()


_NOTED = ("primal", "jvp", "vjp", "grad")


def _rules(
    rng: random.Random, mode: str, place: str, left_out: frozenset[str]
) -> tuple[str, ...]:
    """Honest ones: JAX's own loops have other second derivatives of those that lie."""
    if rng.random() < 0.5:
        return ()
    return tuple(
        name
        for name, rule in RULES.items()
        if name not in left_out
        and rule.is_honest
        and (rule.is_forward or _has_backward(mode, place))
    )


def _custom(mode: str, place: str) -> tuple[str, ...]:
    return CUSTOM if _has_backward(mode, place) else CUSTOM[:1]


def _has_backward(mode: str, place: str) -> bool:
    """Whether functions with a rule for reverse mode only can be differentiated."""
    is_reverse = mode in {m.__name__ for m in modes.WITHOUT_JVP}
    return is_reverse and place not in THROUGH_JAX
