"""The case that a seed stands for: a whole function of one loop, or of several."""

import dataclasses
import random

from ..random_programs.bodies import Body
from ..random_programs.grow import Features, Grower
from ..random_programs.programs import lengthened, random_types
from ..random_programs.transforms import Transform
from ..random_programs.values import DIFFERENTIABLE, Precision, Type
from .budgeted import Budgeted
from .chains import Chain, Stage
from .choice import has_its_size, random_case

LOOPS = ("Scan", "Scan", "lax.scan", "lax.scan", "CheckpointedWhileLoop", "straight")
WRAPPERS = ("jax.jit", "jax.checkpoint", "Remat")


def random_whole(seed: int) -> Budgeted:
    """The case that a seed stands for."""
    rng = random.Random(f"whole {seed}")
    case = _of_one_loop(rng) if rng.random() < 0.5 else _of_several(rng)
    at, constants = _constants(rng, case)
    is_batched = case.vmap == "inside"
    whole = dataclasses.replace(
        case,
        seed=seed,
        differentiated=at,
        constants=constants,
        loss=rng.choice(["squares", "first", "sum"]),
        has_value=rng.random() < 0.5,
        is_inner=is_batched and rng.random() < 0.3,
        devices=2 * (is_batched and not case.is_fit and rng.random() < 0.3),
        within_jit=rng.random() < 0.3,
    )
    types = enumerate(case.program.inputs)
    fits = [i for i, x in types if len(x.shape) > 1 and x.kind in DIFFERENTIABLE]
    if is_batched or rng.random() < 0.5:
        return whole
    return dataclasses.replace(whole, transposed=tuple({*fits} - {*constants}))


def _of_one_loop(rng: random.Random) -> Budgeted:
    case = random_case(rng.getrandbits(30))
    transform = case.program.transform
    if transform.name == "ChunkedVmap":
        return case
    how = rng.choice(["Budget", "Reschedule", "Fit", "Fit foreign"])
    if how == "Budget":
        return case
    # A `Fit` has no second place, and only a budget chooses a policy.
    others = case.others if how == "Reschedule" else (("measure", False),)
    settings = [s for s in transform.settings if s != ("policy", "auto")]
    transform = dataclasses.replace(transform, settings=tuple(settings))
    program = dataclasses.replace(case.program, transform=transform)
    return dataclasses.replace(case, how=how, program=program, others=others)


def _of_several(rng: random.Random) -> Budgeted:
    precision = Precision(x64=False, real="float32")
    if rng.random() < 0.2:
        precision = Precision()
    while True:
        width, length = round(4 * 1000 ** rng.random()), round(8 * 60 ** rng.random())
        program = _chain(rng, width, length)
        if has_its_size(program, width):
            break
    inputs = range(len(program.inputs))
    fits = [i for i in inputs if program.inputs[i].kind in DIFFERENTIABLE]
    return Budgeted(
        seed=0,
        program=program,
        mode="grad",
        place="plain",
        vmap="inside" if rng.random() < 0.2 else "none",
        is_jitted=True,
        is_strict=False,
        precision=precision,
        width=width,
        differentiated=tuple(sorted(rng.sample(fits, rng.randint(1, len(fits))))),
        batched=tuple(i >= program.parameters for i in inputs),
        has_axis=False,
        more=30 ** rng.random(),
        how=rng.choice(["Fit", "Fit foreign"]),
    )


def _chain(rng: random.Random, width: int, length: int) -> Chain:
    """One to four parts, of which those that have rows go along as many."""
    parameters = random_types(rng, width, "fi", rng.randint(1, 2))
    carry = [Type("f", (width,)), *random_types(rng, width, "fi", rng.randint(0, 1))]
    rows = random_types(rng, width, "f", rng.randint(0, 2))
    given = [*parameters, *carry, *(lengthened(x, length) for x in rows)]
    features = Features(kinds="fib", depth=rng.choice([0, 0, 1]))
    bodies, stages = list[Body](), list[Stage]()
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(LOOPS)
        has_rows = name in ("Scan", "lax.scan")
        among = list(range(len(rows))) * has_rows
        xs = rng.sample(among, min(len(among), rng.randint(0, 2)))
        ys = [Type("f", rng.choice([(), (width,)]))] * (has_rows and rng.random() < 0.3)
        inner = [*parameters, *carry, *(rows[i] for i in xs)]
        grower = Grower(rng, width, features, inner)
        bodies.append(grower.body([*carry, *ys], rng.randint(2, 6)))
        backwards = (("reverse", True),) * (name == "Scan" and rng.random() < 0.2)
        wrapper = Transform(rng.choice(WRAPPERS)) if rng.random() < 0.3 else None
        transform = Transform(name, backwards, length)
        stages.append(Stage(transform, tuple(xs), wrapper))
        rows += ys
    return Chain(
        tuple(given),
        tuple(bodies),
        Transform("Chain", length=length),
        tuple(stages),
        len(parameters),
        len(carry),
    )


def _constants(
    rng: random.Random, case: Budgeted
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which inputs are differentiated, and which others the function closes over."""
    types, at = case.program.inputs, case.differentiated
    if rng.random() < 0.5:
        return at, ()
    at = tuple(sorted(rng.sample(at, rng.randint(1, len(at)))))
    others = [i for i in range(len(types)) if i not in at and types[i].kind != "k"]
    return at, tuple(i for i in others if rng.random() < 0.8)
