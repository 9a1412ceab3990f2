"""Cases in which a row of a batch can see the others, or how many there are.

What is run again must give what ran before. So a loop is as it is written out, also in
batches that the user did not write. A map in chunks has no such reference, as a row can
see its chunk: there each slope is compared with the values beside it (`judge_slopes`).
"""

import dataclasses
import random

import eqloop as el

from . import modes, programs
from .buffers import buffered
from .cases import PLACES, Case
from .endings import ended
from .grow import ON_DEVICES, Features
from .judging import Finding, judge, judge_slopes
from .operations import SEEING
from .programs import Program
from .rules import RULES
from .values import DIFFERENTIABLE, Precision

KINDS = {
    programs.scanned: 4,
    programs.looped: 5,
    programs.rows: 8,
    programs.composed: 3,
    programs.layers: 2,
    buffered: 2,
    ended: 4,
}
# These run rows in chunks or one by one, and `jax.vmap` all of them at once.
CHUNKED = ("ChunkedVmap", "Map", "ForLoop", "CheckpointedForLoop", *ON_DEVICES)
# These change the derivative alone, so that it is not that of the value.
_CHANGES_SLOPES = frozenset({"stop"})
# The gradient of a sort ends the process where XLA splits it unevenly over devices.
_UNSPLIT = frozenset({"sort", "sort2"})
SLOPES = ("slopes", *(mode.__name__ for mode in modes.SLOPES))
_BUDGETS = ("1KiB", "2KiB", "4KiB", "16KiB")


def seeing_case(seed: int, left_out: frozenset[str] = frozenset()) -> Case:
    """The case that a seed stands for; see `random_case`."""
    tries = (_case(seed, attempt, left_out) for attempt in range(10_000))
    return next(case for case in tries if case is not None)


def judge_seeing(case: Case) -> Finding | None:
    return (judge_slopes if case.mode in SLOPES else judge)(case)


def _case(seed: int, attempt: int, left_out: frozenset[str]) -> Case | None:
    """A case, if what was drawn makes sense."""
    rng = random.Random(f"{seed} {attempt}")
    pick = lambda names: rng.choice([n for n in names if n not in left_out])
    all_modes = [m.__name__ for m in modes.FIRST * 2 + modes.SECOND]
    mode = rng.choice(SLOPES) if rng.random() < 0.5 else pick(all_modes)
    place, vmap = pick([*["plain"] * 5, *PLACES]), pick(["none", "inside", "outside"])
    has_axis = vmap != "none" and rng.random() < 0.3
    honest = [n for n, rule in RULES.items() if rule.is_honest and rule.is_forward]
    features = Features(
        kinds="fib" + "k" * (rng.random() < 0.3),
        rules=tuple(n for n in honest if n not in left_out) * (rng.random() < 0.4),
        has_axis=has_axis,
        devices=rng.randint(1, 3),
        sees_batch=True,
        without=_CHANGES_SLOPES | _UNSPLIT | left_out,
    )
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    width = rng.choice([1, 2, 3])
    program = _budgeted(rng, kind(rng, width, features, rng.randint(1, 9)))
    if not program.names() & {*SEEING}:
        return None
    # There is no reference for rows that see their chunk or device.
    if any(f"{name}(" in str(program) for name in CHUNKED):
        mode = mode if mode in SLOPES else rng.choice(SLOPES)
    if mode in SLOPES and "backward=" in str(program):
        return None
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    some = rng.sample(fits, rng.randint(1, min(3, len(fits))))
    at = fits if mode in SLOPES else some
    return Case(
        seed=seed,
        program=program,
        mode=mode,
        place=place,
        vmap=vmap,
        is_jitted=True,
        is_strict=rng.random() < 0.2,
        precision=Precision(),
        width=width,
        differentiated=tuple(sorted(at)),
        # A loop has a carry that is batched from its first step on, as `lax.scan` has.
        # Written out, the first steps may have a key that is not, and draw others.
        batched=tuple(mode not in SLOPES or rng.random() < 0.6 for _ in program.inputs),
        has_axis=has_axis,
    )


def _budgeted(rng: random.Random, program: Program) -> Program:
    """The program, where a map may have a budget in place of a size of chunks."""
    transform = program.transform
    if transform.get("chunk_size") is None or rng.random() < 0.5:
        return program
    kept = [(k, v) for k, v in transform.settings if k != "chunk_size"]
    budget = ("chunk_size", el.Budget(rng.choice(_BUDGETS)))
    transform = dataclasses.replace(transform, settings=(budget, *kept))
    return dataclasses.replace(program, transform=transform)
