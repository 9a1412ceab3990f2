"""The case that a seed stands for: a program of `random_programs`, made larger."""

import dataclasses
import math
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

import eqloop as el

from ..random_programs import programs
from ..random_programs.bodies import Body, Op
from ..random_programs.buffers import Buffered, buffered
from ..random_programs.control import Within
from ..random_programs.endings import Ended, ended
from ..random_programs.grow import Features
from ..random_programs.programs import Program, Scanned, lengthened
from ..random_programs.settings import policy
from ..random_programs.transforms import Transform
from ..random_programs.values import DIFFERENTIABLE, Precision, Type
from .budgeted import Budgeted

KINDS = {
    programs.scanned: 8,
    programs.rows: 3,
    ended: 2,
    programs.layers: 2,
    buffered: 1,
}
# Of the values of a step, and of all steps, which `lax.scan` stores.
_LEAST, _LARGEST, _ALL = 2**12, 2**18, 2**25
# Of the products in all steps, as they are run.
_MOST_WORK = 3 * 10**9
# Loops within a step that go along a vector take one iteration for each number.
_LONGEST_WITHIN = 64
# What stores in another place, which on a CPU is in the memory of the device.
_NOT_WITHIN = ("Offload", "host=")


def random_case(seed: int) -> Budgeted:
    """The case that a seed stands for."""
    rng = random.Random(seed)
    precision = rng.choice(
        [Precision(x64=False, real="float32")] * 4
        + [Precision(), Precision(x64=False, real="float32", half="bfloat16")]
    )
    features = Features(
        kinds="fib"
        + "c" * (rng.random() < 0.1)
        + "k" * (rng.random() < 0.2)
        + "h" * (precision.half is not None),
        while_loops=("BoundedWhileLoop", "CheckpointedWhileLoop"),
        depth=rng.choice([0, 1, 1]),
    )
    while True:
        width = round(4 * 5000 ** rng.random())
        length = round(10 * 200 ** rng.random())
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        program = kind(rng, width, features, length)
        program = _with_budget(rng, program, length)
        if program is not None and has_its_size(program, width):
            break
    is_batched = rng.random() < 0.15 and not isinstance(program, Buffered)
    inputs = range(len(program.inputs))
    left_out = rng.choice([0, 0, 0.4])
    limit = rng.choice([3, program.transform.length, 10**6])
    others: dict[str, Any] = {"measure": rng.random() < 0.1}
    if program.transform.name != "ChunkedVmap":
        others |= _second_place(rng)
    return Budgeted(
        seed=seed,
        program=program,
        mode="grad",
        place="plain",
        vmap="inside" if is_batched else "none",
        is_jitted=True,
        is_strict=False,
        precision=precision,
        width=width,
        differentiated=_differentiated(rng, program),
        batched=tuple(i >= _parameters(program) for i in inputs),
        has_axis=False,
        more=1000 ** rng.random(),
        unused=tuple(i for i in range(8) if rng.random() < left_out),
        limit=limit,
        others=tuple(others.items()),
    )


def _second_place(rng: random.Random) -> dict[str, Any]:
    """The settings for room on the host, or in files, or for none."""
    nbytes = round(_LEAST * 10000 ** rng.random())
    chance = rng.random()
    if chance < 0.15:
        return {"host": nbytes}
    if chance < 0.25:
        return {"disk": nbytes, "directory": tempfile.gettempdir()}
    return {}


def _parameters(program: Program) -> int:
    """How many of the inputs come first that all examples of a batch have."""
    return getattr(program, "parameters", 0) + isinstance(program, Ended | Buffered)


def _differentiated(rng: random.Random, program: Program) -> tuple[int, ...]:
    """All inputs that can be, or some."""
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    count = len(fits) if rng.random() < 0.5 else rng.randint(1, len(fits))
    return tuple(sorted(rng.sample(fits, count)))


def _with_budget(rng: random.Random, program: Program, length: int) -> Program | None:
    """The program with a loop or map that can have a budget, which it has not yet."""
    transform = program.transform
    name = {
        "CheckpointedScan": "Scan",
        "CheckpointedForLoop": "ForLoop",
        "Map": "ForLoop",
        "Vmap": "ChunkedVmap",
        "BoundedWhileLoop": "ScanWhile",
        "CheckpointedWhileLoop": "ScanWhile",
    }.get(transform.name, transform.name)
    kept = ("reverse", "backward", "start", "stop", "step", "reduce")
    settings: dict[str, Any] = {k: v for k, v in transform.settings if k in kept}
    if settings.get("reduce"):
        settings["reduce"] = "sum"  # that a mean takes more is said in the guide
    if name == "ScanWhile":
        settings["max_steps"] = length
    elif rng.random() < 0.3:
        settings["policy"] = policy(rng)
        if name in ("Scan", "SlicedScan", "StackedLayers") and rng.random() < 0.5:
            settings["policy"] = "auto"
    transform = Transform(name, tuple(settings.items()), length)
    program = dataclasses.replace(program, transform=transform)
    if rng.random() < 0.3:
        bodies = tuple(_with_inner_budgets(rng, body) for body in program.bodies)
        program = dataclasses.replace(program, bodies=bodies)
    if isinstance(program, Scanned):
        # Leaves that are not arrays take no memory.
        numbers = [_numbers(tree) for tree in program.trees]
        return dataclasses.replace(program, trees=tuple(numbers))
    if isinstance(program, Ended):
        first = 1 + program.parameters + program.carry
        given, xs = program.inputs[:first], program.inputs[first:]
        rows = (lengthened(Type(x.kind, x.shape[1:]), length) for x in xs)
        return dataclasses.replace(program, inputs=(*given, *rows))
    return program


def _with_inner_budgets(rng: random.Random, body: Body) -> Body:
    """The body with a budget for each loop in it that has a schedule."""

    def changed(op: Op) -> Op:
        bodies = tuple(_with_inner_budgets(rng, inner) for inner in op.bodies)
        op = dataclasses.replace(op, bodies=bodies)
        if not isinstance(op.setting, Within):
            return op
        transform = op.setting.transform
        if transform.get("schedule", False) is False:
            return op
        nbytes = round(2**16 * 100 ** rng.random())
        budget = ("schedule", el.Budget(nbytes, measure=False))
        others = (s for s in transform.settings if s[0] != "schedule")
        transform = dataclasses.replace(transform, settings=(*others, budget))
        setting = dataclasses.replace(op.setting, transform=transform)
        return dataclasses.replace(op, setting=setting)

    return dataclasses.replace(body, ops=tuple(map(changed, body.ops)))


def _numbers(tree: Any) -> tuple[int, ...]:
    return tuple(range(sum(isinstance(x, int) for x in jax.tree.leaves(tree))))


def has_its_size(program: Program, width: int) -> bool:
    """Whether the program is neither too large to run nor too small to matter."""
    length = program.transform.length
    if isinstance(program, Scanned) and program.has_key:
        return False  # the keys of all steps come on top, as the guide says
    steps = [_bytes(t) for body in program.bodies for t in _types(body)]
    if max(steps, default=0) > _LARGEST:
        return False
    if sum(steps) < _LEAST or sum(steps) * length > _ALL:
        return False
    if sum(map(_bytes, program.inputs)) > _ALL:  # also those that no step reads
        return False
    ops = [op for body in program.bodies for op in _operations(body)]
    products = {"matmul": 3, "solve": 3, "matvec": 2, "convolve": 2}
    work = sum(width ** products.get(op.name, 0) for op in ops) * length
    return work <= _MOST_WORK and all(map(_may_be_within, ops))


def _may_be_within(op: Op) -> bool:
    if not isinstance(op.setting, Within):
        return True
    transform = op.setting.transform
    return transform.length <= _LONGEST_WITHIN and not any(
        name in str(transform) for name in _NOT_WITHIN
    )


def _operations(body: Body) -> Iterator[Op]:
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from _operations(inner)


def _types(body: Body) -> Iterator[Type]:
    yield from body.types
    for op in body.ops:
        for inner in op.bodies:
            yield from _types(inner)


def _bytes(type: Type) -> int:
    return 4 * math.prod(type.shape)
