"""Cases with loops that stop in a `jax.shard_map` where JAX checks what differs.

Each example of a batch is on a device of its own and stops at its own time. What is not
batched is the same on all devices, and is closed over or carried. The reference is the
batch, written out.
"""

import random

from . import modes, programs
from .buffers import buffered
from .cases import Case
from .endings import ended
from .grow import Features
from .judging import Finding, Skipped, judge
from .rules import RULES
from .values import DIFFERENTIABLE, Precision

KINDS = {programs.looped: 3, ended: 3, buffered: 1}


def checked_case(seed: int, left_out: frozenset[str] = frozenset()) -> Case:
    """The case that a seed stands for; see `random_case`."""
    rng = random.Random(f"checked {seed}")
    pick = lambda names: rng.choice([n for n in names if n not in left_out])
    mode = pick([m.__name__ for m in modes.FIRST * 2 + modes.SECOND])
    rules = [n for n, rule in RULES.items() if rule.is_honest and rule.is_forward]
    features = Features(
        kinds="fib" + "k" * (rng.random() < 0.2),
        rules=tuple(n for n in rules if n not in left_out) * (rng.random() < 0.3),
        without=left_out,
    )
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    width = rng.choice([1, 2, 3])
    program = kind(rng, width, features, rng.randint(1, 7))
    fits = [i for i, t in enumerate(program.inputs) if t.kind in DIFFERENTIABLE]
    batched = [rng.random() < 0.5 for _ in program.inputs]
    batched[rng.randrange(len(batched))] = True
    place = pick(["plain", "plain", "rematerialised"])
    vmap, is_strict = pick(["inside", "outside"]), rng.random() < 0.2
    some = rng.sample(fits, rng.randint(1, min(3, len(fits))))
    return Case(
        seed=seed,
        program=program,
        mode=mode,
        place=place,
        vmap=vmap,
        is_jitted=True,
        is_strict=is_strict,
        precision=Precision(),
        width=width,
        differentiated=tuple(sorted(some)),
        batched=tuple(batched),
        has_axis=False,
        is_spread=True,
        is_checked=True,
    )


# JAX's own branches and loops want such results to be cast by the user.
_UNCAST = (
    "branches must have equal output types",
    "so the manual axis types do not match",
)


def judge_checked(case: Case) -> Finding | None:
    """What is wrong with such a case, if anything is.

    Raises:
        Skipped: If plain JAX cannot evaluate it.
    """
    finding = judge(case)
    if finding is not None and any(text in finding.detail for text in _UNCAST):
        raise Skipped("the result of a branch or of a loop within needs a cast")
    return finding
