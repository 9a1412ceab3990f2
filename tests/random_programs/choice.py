"""The case that a seed stands for: it is all that it takes to have it again."""

import random
from typing import Any

from . import modes
from .buffers import Buffered
from .cases import PLACES, REFERENCES, SETTINGS, THROUGH_JAX, Case
from .endings import Ended
from .grow import ON_DEVICES, Features
from .kinds import random_program
from .programs import Program, While
from .rules import RULES
from .values import DIFFERENTIABLE, Precision, Type

# In these, each example of a batch may end at its own time.
ENDING = (While, Ended, Buffered)


def random_case(seed: int, left_out: frozenset[str] = frozenset()) -> Case:
    """The case that a seed stands for.

    Args:
        seed: The seed.
        left_out: What is not to be in it: names of modes, places, rules and effects.
            Other choices are then other ones too, so that it is part of the seed.
    """
    rng = random.Random(seed)
    pick = lambda names: rng.choice([n for n in names if n not in left_out])
    all_modes = [m.__name__ for m in modes.FIRST * 2 + modes.SECOND]
    mode, place = pick(all_modes), pick([*["plain"] * 5, *PLACES])
    vmap = pick(["none", "none", "inside", "outside"])
    effects = _effects(rng, mode, vmap, left_out)
    if effects:
        place = "plain"
    precision = rng.choice(
        [Precision()] * 8
        + [Precision(real="float32"), Precision(x64=False, real="float32")] * 2
        + [Precision(half="bfloat16"), Precision(half="float16")]
    )
    is_spread = vmap != "none" and not effects and rng.random() < 0.2
    has_axis = vmap != "none" and rng.random() < 0.5
    is_second = mode in {m.__name__ for m in modes.SECOND}
    features = Features(
        kinds="fib"
        + "c" * _is_complex(rng, mode)
        + "k" * (rng.random() < 0.3)
        + "h" * (precision.half is not None),
        rules=_rules(rng, mode, place, left_out),
        effects=effects,
        has_axis=has_axis,
        while_loops=_while_loops(mode, place),
        devices=0 if is_spread else rng.randint(1, 4),
    )
    width = rng.choice([1, 2, 3, 3])
    length = rng.choice([0, 1, 2, 3, 4, 5, 6, 7] if is_second else [*range(13), 30])
    program = random_program(rng, width, features, length)
    differentiated = _differentiated(rng, program)
    scalars = _scalars(rng, program, differentiated, vmap, precision)
    # Operations one by one do not move between devices.
    is_on_devices = is_spread or any(name in str(program) for name in ON_DEVICES)
    names = [n for n in SETTINGS if not (is_on_devices and n == "disable_jit")]
    is_within = any(n in b.show() for n in ON_DEVICES for b in program.bodies)
    count = len(program.inputs)
    batched = tuple(rng.random() < 0.5 for _ in range(count))
    return Case(
        seed=seed,
        program=program,
        mode=mode,
        place=place,
        vmap=vmap,
        is_jitted=rng.random() < 0.7 or is_within,
        is_strict=rng.random() < 0.3,
        precision=precision,
        width=width,
        differentiated=differentiated,
        batched=batched,
        has_axis=has_axis,
        scalars=scalars,
        setting="none" if scalars else pick(["none"] * 8 + names),
        is_spread=is_spread and not (has_axis and isinstance(program, ENDING)),
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
    rng: random.Random, mode: str, place: str, left_out: frozenset[str]
) -> tuple[str, ...]:
    if rng.random() < 0.4:
        return ()
    is_pushed = place in REFERENCES
    is_second = mode in {m.__name__ for m in modes.SECOND}
    only_honest = is_pushed or (is_second and place in THROUGH_JAX)
    has_backward = mode in {m.__name__ for m in modes.WITHOUT_JVP} and not is_pushed
    return tuple(
        name
        for name, rule in RULES.items()
        if name not in left_out
        and (rule.is_forward or has_backward)
        and (rule.is_honest or not only_honest)
    )


def _while_loops(mode: str, place: str) -> tuple[str, ...]:
    loops = ("BoundedWhileLoop", "CheckpointedWhileLoop")
    if mode in {m.__name__ for m in modes.FORWARD} and place != "transposed":
        return (*loops, "lax.while_loop", "WhileLoop")
    return loops


def _differentiated(rng: random.Random, program: Program) -> tuple[int, ...]:
    """Up to three of the inputs that can be."""
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    return tuple(sorted(rng.sample(fits, rng.randint(1, min(3, len(fits))))))


def _scalars(
    rng: random.Random,
    program: Program,
    differentiated: Any,
    vmap: str,
    precision: Precision,
) -> tuple[int, ...]:
    """Which inputs are Python numbers; where JAX takes them for those of its width."""
    is_usual = precision.x64 == (precision.real == "float64")
    if vmap != "none" or rng.random() < 0.8 or not is_usual:
        return ()
    return tuple(
        i
        for i, type in enumerate(program.inputs)
        if type == Type("f") and i not in differentiated and rng.random() < 0.5
    )
