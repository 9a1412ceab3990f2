"""Scans whose steps have an inverse, which is what `Reversible` goes back by."""

import dataclasses
import random
from typing import Any

import jax.numpy as jnp

import eqloop as el

from . import settings
from .grow import Features, Grower
from .programs import Arrays, Program, lengthened, parts_of, random_types
from .transforms import Transform, scan
from .values import Type
from .world import World


@dataclasses.dataclass(frozen=True)
class Undone(Program):
    """A scan that adds to each half of its carry what a body makes of the other half.

    What is added is bounded: adding a large number, and subtracting it again, would
    leave the inverse with fewer digits than the step has. Or the step forgets one half,
    and saves it.
    """

    parameters: int = 0
    half: int = 1
    checkpoints: int = 1
    is_checked: bool = True
    has_key: bool = False
    forgets: bool = False

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        parameters, one, other, key, xs = parts_of(
            inputs, self.parameters, self.half, self.half, int(self.has_key)
        )

        def first(other: Any, x: Any, keys: Any) -> Any:
            return world.run(self.bodies[0], [*parameters, *other, *keys, *x])

        def second(one: Any, x: Any, keys: Any) -> Any:
            out = world.run(self.bodies[1], [*parameters, *one, *keys, *x])
            return out[: self.half], out[self.half :]

        def step(carry: Any, x: Any, key: Any = None) -> Any:
            (one, other), keys = carry, [] if key is None else [key]
            one = _added(one, first(other, x, keys), 0.5)
            by, ys = second(one, x, keys)
            other = list(map(jnp.zeros_like, other)) if self.forgets else other
            return (one, _added(other, by, 0.5)), ys

        def inverse(carry: Any, x: Any, *saved: Any, key: Any = None) -> Any:
            (one, other), keys = carry, [] if key is None else [key]
            if self.forgets:
                (other,) = saved
            else:
                other = _added(other, second(one, x, keys)[0], -0.5)
            return _added(one, first(other, x, keys), -0.5), other

        def save(carry: Any, x: Any, key: Any = None) -> Any:
            return carry[1]

        schedule = el.Reversible(
            inverse,
            save=save if self.forgets else None,
            checkpoints=self.checkpoints,
            check=self.is_checked,
        )
        transform = dataclasses.replace(
            self.transform, settings=(*self.transform.settings, ("schedule", schedule))
        )
        keyword = {"key": key[0]} if self.has_key else {}
        loop = scan(transform, world.is_written_out, step)
        (one, other), ys = loop((one, other), xs, **keyword)
        return [*one, *other, *ys]


def _added(terms: Any, others: Any, weight: float) -> Any:
    pairs = zip(terms, others, strict=True)
    return [x + jnp.asarray(weight, x.dtype) * jnp.tanh(y) for x, y in pairs]


def undone(rng: random.Random, width: int, features: Features, length: int) -> Program:
    # Where a step is differentiated, a rule with a primal of its own makes it another
    # step, which the inverse does not undo.
    rules = tuple(rule for rule in features.rules if rule != "own_primal")
    features = dataclasses.replace(features, effects=(), rules=rules)
    has_key = "k" in features.kinds and rng.random() < 0.5
    parameters = random_types(rng, width, features.kinds, rng.randint(0, 2))
    half = random_types(rng, width, "f", rng.randint(1, 2))
    xs = random_types(rng, width, features.kinds, rng.randint(0, 2))
    ys = random_types(rng, width, "fib", rng.randint(0, 2))
    key = [Type("k")] * has_key
    inner = [*parameters, *half, *key, *xs]
    bodies = tuple(
        Grower(rng, width, features, inner).body([*half, *made], rng.randint(1, 6))
        for made in ([], ys)
    )
    made: dict[str, Any] = {"reverse": rng.random() < 0.3}
    if rng.random() < 0.25:
        made["policy"] = settings.policy(rng)
    return Undone(
        (*parameters, *half, *half, *key, *(lengthened(x, length) for x in xs)),
        bodies,
        Transform("Scan", tuple(made.items()), length),
        parameters=len(parameters),
        half=len(half),
        checkpoints=rng.randint(1, 4),
        is_checked=rng.random() < 0.5,
        has_key=has_key,
        forgets=rng.random() < 0.4,
    )
