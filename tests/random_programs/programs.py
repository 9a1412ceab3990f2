"""Random programs, of several kinds: functions of arrays around one transform.

A program is run in a world, by the library or written out. Its inputs are arrays of
the types that it names.
"""

import abc
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from . import settings
from .bodies import Body
from .grow import ON_DEVICES, Features, Grower
from .transforms import (
    Transform,
    mapped,
    scan,
    while_loop,
    written_prefixes,
)
from .values import Type, pick, plant, random_tree
from .world import World

Arrays = Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Program(abc.ABC):
    """A function of arrays around a transform.

    Attributes:
        inputs: The types of the arrays.
        bodies: The functions that the transform is given.
        transform: Which one.
    """

    inputs: tuple[Type, ...]
    bodies: tuple[Body, ...]
    transform: Transform

    @abc.abstractmethod
    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        """Runs it."""

    def names(self) -> set[str]:
        """Those of all operations in it."""
        return set().union(*(body.names() for body in self.bodies))

    def __str__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        left = {"inputs", "bodies", "transform"}
        fields = [f.name for f in dataclasses.fields(self) if f.name not in left]
        others = "".join(f"\n{name} = {getattr(self, name)}" for name in fields)
        head = f"{type(self).__name__} {self.transform} of {inputs}{others}"
        names = ["f"] if len(self.bodies) == 1 else [f"f{i}" for i in range(9)]
        bodies = [b.show(n) for n, b in zip(names, self.bodies, strict=False)]
        return "\n".join([head, *bodies])


class _Module(eqx.Module):
    """A step with parameters, which are arrays of it."""

    parameters: list[Any]
    step: Any = eqx.field(static=True)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self.step(self.parameters, *args, **keywords)


def _with(parameters: Arrays, step: Any, is_module: bool) -> Any:
    """The step with its parameters: of a module, or closed over."""
    if is_module:
        return _Module(list(parameters), step)
    return lambda *args, **keywords: step(parameters, *args, **keywords)


def parts_of(values: Arrays, *counts: int) -> list[list[Any]]:
    """The first so many values, the next ones, and so on, and last those left."""
    parts, at = [], 0
    for count in counts:
        parts.append([*values[at : at + count]])
        at += count
    return [*parts, [*values[at:]]]


@dataclasses.dataclass(frozen=True)
class Scanned(Program):
    """A scan of trees."""

    trees: tuple[Any, Any, Any] = ((), (), ())  # of the carry, an x, and a y
    parameters: int = 0
    is_module: bool = False
    has_key: bool = False
    x_axes: tuple[int | None, ...] = ()

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        carry, x, y = self.trees
        count = len(self.x_axes), len(pick(carry, carry))
        parameters, init, xs, key = parts_of(
            inputs, self.parameters, count[1], count[0]
        )

        def step(parameters: Any, carry_: Any, x_: Any, key: Any = None) -> Any:
            keys = [] if key is None else [key]
            given = [*parameters, *pick(carry, carry_), *pick(x, x_), *keys]
            out = world.run(self.bodies[0], given)
            after, made = out[: count[1]], out[count[1] :]
            return plant(carry, after), plant(y, made)

        transform = self.transform
        axes = plant(x, self.x_axes)
        axes = jax.tree.map(lambda a: a if isinstance(a, int) else None, axes)
        transform = dataclasses.replace(
            transform, settings=(*transform.settings, ("in_axes", axes))
        )
        loop = scan(
            transform, world.is_written_out, _with(parameters, step, self.is_module)
        )
        keyword = {"key": key[0]} if self.has_key else {}
        last, ys = loop(plant(carry, init), plant(x, xs), **keyword)
        return [*pick(carry, last), *pick(y, ys)]


@dataclasses.dataclass(frozen=True)
class Rows(Program):
    """A map over rows, stacked or added up."""

    parameters: int = 0
    is_module: bool = False

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        parameters, xs = parts_of(inputs, self.parameters)
        step = lambda parameters, *x: world.run(self.bodies[0], [*parameters, *x])
        f = _with(parameters, step, self.is_module)
        return mapped(self.transform, world.is_written_out, f)(*xs)


@dataclasses.dataclass(frozen=True)
class While(Program):
    """A loop until a counter has reached an input, or a number of the carry is high."""

    parameters: int = 0
    is_counted: bool = True

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        (limit,), parameters, init = parts_of(inputs, 1, self.parameters)

        def cond(carry: Any) -> Any:
            goes_on = carry[0] < limit
            is_low = jnp.mean(carry[1]) < 0.6
            return goes_on if self.is_counted else goes_on & is_low

        def body(carry: Any) -> Any:
            return [carry[0] + 1, *world.run(self.bodies[0], [*parameters, *carry[1:]])]

        loop = while_loop(self.transform, world.is_written_out, cond, body)
        return loop([jnp.zeros((), jnp.int32), *init])


def _recurrence(one: Any, other: Any) -> Any:
    return [one[0] * other[0], other[0] * one[1] + other[1]]


def _matrices(one: Any, other: Any) -> Any:
    return [jnp.einsum("nij,njk->nik", a, b) for a, b in zip(one, other, strict=True)]


JOINS = {
    "sum": lambda a, b: jax.tree.map(jnp.add, a, b),
    "max": lambda a, b: jax.tree.map(jnp.maximum, a, b),
    "product": lambda a, b: jax.tree.map(jnp.multiply, a, b),
    "last": lambda a, b: b,
    "recurrence": _recurrence,
    "matrices": _matrices,
}


@dataclasses.dataclass(frozen=True)
class Prefixes(Program):
    """An associative scan."""

    join: str = "sum"

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        f, get = JOINS[self.join], self.transform.get
        if world.is_written_out:
            reverse = get("reverse", False)
            return written_prefixes(f, list(inputs), get("axis", 0), reverse)
        return self.transform.made(f)(list(inputs))


@dataclasses.dataclass(frozen=True)
class Layers(Program):
    """Stacked layers, applied in turn."""

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        count = len(self.bodies[0].output_types)
        x, stacked = parts_of(inputs, count)
        step = lambda parameters, x: world.run(self.bodies[0], [*x, *parameters])
        if not world.is_written_out:
            return self.transform.made(_Module(stacked, step))(x)
        for i in range(self.transform.length):
            x = step([leaf[i] for leaf in stacked], x)
        return x


@dataclasses.dataclass(frozen=True)
class Composed(Program):
    """Several transforms, one after the other and inside one another."""

    def __call__(self, world: World, inputs: Arrays) -> list[Any]:
        return world.run(self.bodies[0], inputs)


# Random ones

SCANS = ("Scan", "Scan", "Scan", "CheckpointedScan", "SlicedScan")
MAPS = ("ChunkedVmap", "ChunkedVmap", "Map", "Vmap", "ForLoop", "CheckpointedForLoop")
WHILES = ("BoundedWhileLoop", "CheckpointedWhileLoop")


def random_types(rng: random.Random, width: int, kinds: str, count: int) -> list[Type]:
    def one() -> Type:
        kind = rng.choice(kinds + "fff")
        shapes = [(), (width,)] if kind != "k" else [()]
        if kind == "f":
            shapes.append((width, width))
        return Type(kind, rng.choice(shapes))

    return [one() for _ in range(count)]


def lengthened(type: Type, length: int, axis: int | None = 0) -> Type:
    if axis is None:
        return type
    shape = (*type.shape[:axis], length, *type.shape[axis:])
    return Type(type.kind, shape)


def scanned(rng: random.Random, width: int, features: Features, length: int) -> Program:
    kinds, has_key = features.kinds, "k" in features.kinds and rng.random() < 0.5
    parameters = random_types(rng, width, kinds, rng.randint(0, 2))
    carry = [*random_types(rng, width, kinds, rng.randint(0, 3)), Type("f")]
    xs = random_types(rng, width, kinds, rng.randint(0, 2)) + features.seen
    ys = random_types(rng, width, kinds, rng.randint(0, 2))
    inner = [*parameters, *carry, *xs, *([Type("k")] * has_key)]
    body = Grower(rng, width, features, inner).body([*carry, *ys], rng.randint(2, 8))
    axes = [rng.choice([0, 0, 0, len(x.shape), None]) for x in xs]
    stacked = [lengthened(x, length, a) for x, a in zip(xs, axes, strict=True)]
    return Scanned(
        (*parameters, *carry, *stacked, *([Type("k")] * has_key)),
        (body,),
        settings.scan(rng, length, SCANS),
        trees=tuple(random_tree(rng, len(part)) for part in (carry, xs, ys)),
        parameters=len(parameters),
        is_module=rng.random() < 0.5,
        has_key=has_key,
        x_axes=tuple(axes),
    )


def rows(rng: random.Random, width: int, features: Features, length: int) -> Program:
    length, features = max(length, 1), dataclasses.replace(features, effects=())
    parameters = random_types(rng, width, features.kinds, rng.randint(0, 2))
    xs = [Type("f"), *random_types(rng, width, features.kinds, rng.randint(0, 2))]
    xs += features.seen
    names = MAPS + ON_DEVICES * 2 * (features.devices > 0)
    transform = settings.row_map(rng, length, names, features.devices)
    is_reduced = transform.name == "ChunkedVmap" and rng.random() < 0.3
    wanted = random_types(rng, width, features.kinds, rng.randint(1, 2))
    if is_reduced:
        wanted = [Type("f"), Type("f", (width,))]
        how = ("reduce", rng.choice(["sum", "mean"]))
        transform = dataclasses.replace(transform, settings=(*transform.settings, how))
    inner = [*parameters, *xs]
    grower = Grower(rng, width, features.on(transform), inner)
    body = grower.body(wanted, rng.randint(2, 8))
    inputs = (*parameters, *(lengthened(x, length) for x in xs))
    module = rng.random() < 0.5
    return Rows(inputs, (body,), transform, len(parameters), module)


def looped(rng: random.Random, width: int, features: Features, length: int) -> Program:
    features = dataclasses.replace(features, effects=())
    parameters = random_types(rng, width, features.kinds, rng.randint(0, 2))
    carry = [Type("f"), *random_types(rng, width, features.kinds, rng.randint(0, 2))]
    carry += features.seen
    inner = [*parameters, *carry]
    body = Grower(rng, width, features, inner).body(carry, rng.randint(2, 8))
    names = tuple(dict.fromkeys((*WHILES, *features.while_loops)))
    names = tuple("WhileLoop" if name.startswith("lax") else name for name in names)
    most = min(max(length, 1), 7)
    transform = settings.while_loop(rng, names, max(most, 7))
    inputs = (Type("i"), *inner)
    return While(inputs, (body,), transform, len(parameters), rng.random() < 0.6)


def prefixes(
    rng: random.Random, width: int, features: Features, length: int
) -> Program:
    join, length = rng.choice(list(JOINS)), max(length, 1)
    settings_: dict[str, Any] = {"reverse": rng.random() < 0.4}
    if rng.random() < 0.6:
        settings_["chunk_size"] = rng.randint(1, length + 1)
    types = [Type("f", (width,))] * rng.randint(1, 2)
    if join == "recurrence":
        types = [Type("f", (width,))] * 2
    if join == "matrices":
        types = [Type("f", (width, width))]
    elif rng.random() < 0.4:
        settings_["axis"] = rng.choice([1, -1])
    inputs = tuple(lengthened(t, length, settings_.get("axis", 0) % 2) for t in types)
    transform = Transform("AssociativeScan", tuple(settings_.items()), length)
    return Prefixes(inputs, (), transform, join)


def layers(rng: random.Random, width: int, features: Features, length: int) -> Program:
    depth = max(length, 1)
    x = [Type("f", (width,))]
    parameters = random_types(rng, width, "f", rng.randint(1, 3)) + features.seen
    inner = [*x, *parameters]
    body = Grower(rng, width, features, inner).body(x, rng.randint(2, 7))
    made = {"schedule": settings.schedule(rng, depth)}
    if rng.random() < 0.3:
        made["policy"] = settings.policy(rng, made["schedule"])
    transform = Transform("StackedLayers", tuple(made.items()), depth)
    stacked = (lengthened(t, depth) for t in parameters)
    return Layers((*x, *stacked), (body,), transform)


def composed(
    rng: random.Random, width: int, features: Features, length: int
) -> Program:
    inputs = [Type("f"), *random_types(rng, width, features.kinds, rng.randint(1, 3))]
    grower = Grower(rng, width, features, inputs)
    for _ in range(rng.randint(1, 3)):
        grower.control()
    wanted = [Type("f"), *random_types(rng, width, "fi", 1)]
    body = grower.body(wanted, rng.randint(0, 3))
    return Composed(tuple(inputs), (body,), Transform("composed"))
