"""Scans that may end before their length."""

import dataclasses
import random
from typing import Any

import jax.numpy as jnp

from . import settings
from .grow import Features, Grower
from .programs import Arrays, Program, lengthened, parts_of, random_types
from .transforms import scan_while
from .values import Type
from .world import World


@dataclasses.dataclass(frozen=True)
class Ended(Program):
    """A scan until a counter has reached an input, or a number of the carry is high."""

    parameters: int = 0
    carry: int = 0
    is_counted: bool = True

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        (limit,), parameters, init, xs = parts_of(
            inputs, 1, self.parameters, self.carry
        )

        def cond(carry: Any) -> Any:
            goes_on = carry[0] < limit
            return goes_on if self.is_counted else goes_on & (jnp.mean(carry[1]) < 0.6)

        def step(carry: Any, x: Any) -> Any:
            out = world.run(self.bodies[0], [*parameters, *carry[1:], *x])
            return [carry[0] + 1, *out[: self.carry]], out[self.carry :]

        loop = scan_while(self.transform, world.is_written_out, cond, step)
        carry, ys, steps = loop([jnp.zeros((), jnp.int32), *init], xs)
        return [*carry, *ys, steps]


def ended(rng: random.Random, width: int, features: Features, length: int) -> Program:
    features = dataclasses.replace(features, effects=())
    length = min(max(length, 1), 7)
    kinds = features.kinds
    parameters = random_types(rng, width, kinds, rng.randint(0, 2))
    carry = [Type("f"), *random_types(rng, width, kinds, rng.randint(0, 2))]
    xs = random_types(rng, width, kinds, rng.randint(0, 2)) + features.seen
    ys = random_types(rng, width, "fib", rng.randint(0, 2))
    inner = [*parameters, *carry, *xs]
    body = Grower(rng, width, features, inner).body([*carry, *ys], rng.randint(2, 8))
    scanned = [lengthened(x, length) for x in xs]
    return Ended(
        (Type("i"), *parameters, *carry, *scanned),
        (body,),
        settings.while_loop(rng, ("ScanWhile",), length),
        parameters=len(parameters),
        carry=len(carry),
        is_counted=rng.random() < 0.5,
    )
