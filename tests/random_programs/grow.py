"""Random bodies: operations are added one by one to the values that there are."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from . import settings
from .bodies import Body, Op
from .control import CONTROL, Within
from .operations import COLLECTIVE, EFFECTS, PURE, SEEING, WORLDLY
from .rules import RULES
from .transforms import Transform
from .values import Type

REAL = Type("f")


@dataclasses.dataclass(frozen=True)
class Features:
    """What a body may have in it.

    Attributes:
        kinds: The kinds of values.
        rules: The names of custom rules.
        effects: The names of effects.
        control: The names of loops and branches.
        has_axis: Whether there is a named axis.
        while_loops: Which while loops; JAX's own has no derivative in reverse mode.
        depth: How deep loops and branches are nested.
        devices: How many a function may be split over, the same throughout a program
            as in any with JAX; none where they are taken.
        sees_batch: Whether a row of a batch may see the others.
        without: Operations that are left out.
        is_foreign: Whether there are only loops and maps of JAX's own.
        wrappers: What may be around a function and leave its numbers as they are.
    """

    kinds: str = "fib"
    rules: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    control: tuple[str, ...] = tuple(CONTROL)
    has_axis: bool = False
    while_loops: tuple[str, ...] = ("BoundedWhileLoop", "CheckpointedWhileLoop")
    depth: int = 2
    devices: int = 0
    sees_batch: bool = False
    without: frozenset[str] = frozenset()
    is_foreign: bool = False
    wrappers: tuple[str, ...] = ("jax.checkpoint", "jax.jit", "Remat")

    @property
    def seen(self) -> list[Type]:
        """What a row is seen by: an integer of its own."""
        return [Type("i")] * self.sees_batch

    def on(self, transform: Transform) -> "Features":
        """What may be in a function that this may run on many devices."""
        if transform.name not in (*ON_DEVICES, *BY_JAX_ON_DEVICES):
            return self
        # JAX has no collectives of a `vmap` in a `shard_map` within it.
        return dataclasses.replace(self, devices=0, has_axis=False)

    def within(self, transform: Transform) -> "Features":
        """What may be in a loop or branch of this kind."""
        rules, is_plain = self.rules, transform.is_plain
        if is_plain:
            rules = tuple(name for name in rules if RULES[name].is_honest)
        # Under `vmap` examples run all branches, those of others as well. That theirs
        # have no cotangents is not told to collectives in a branch, by JAX either. And
        # devices that have ended do not meet those that go on.
        without = (*BRANCHES, *WHILES * (not self.devices))
        on = self.on(transform)
        # These run a function once, for each time that it is called.
        is_noted = self.is_foreign and transform.name in NOTED
        # JAX differentiates what is in a rule.
        is_rule = transform.name in CUSTOM
        if is_rule:
            rules = tuple(name for name in rules if RULES[name].is_forward)
            # In a program, JAX has no names of axes for a rule.
            on = dataclasses.replace(on, has_axis=False)
        has_axis = on.has_axis and transform.name not in without
        return dataclasses.replace(
            on,
            rules=rules,
            wrappers=self.wrappers[: 2 if is_rule else None],
            effects=self.effects if is_noted else (),
            has_axis=has_axis,
            while_loops=() if is_rule else self.while_loops,
            depth=self.depth - 1,
        )


WHILES = ("BoundedWhileLoop", "CheckpointedWhileLoop", "lax.while_loop", "WhileLoop")
ON_DEVICES = ("ParallelMap", "ShardMap")
BY_JAX_ON_DEVICES = ("jax.shard_map",)
CUSTOM = ("jax.custom_jvp", "jax.custom_vjp")
NOTED = ("lax.scan", "lax.fori_loop", "lax.map", "lax.cond", "lax.switch", "jax.jit")
BRANCHES = ("lax.cond", "lax.switch", "Cond", "Switch", "IfElse")


class Grower:
    """A body while it grows.

    Attributes:
        rng: Where the choices come from.
        width: How long vectors are.
        features: What it may have in it.
        types: The types of the values so far.
        ops: The operations so far.
    """

    def __init__(
        self,
        rng: random.Random,
        width: int,
        features: Features,
        inputs: Sequence[Type],
    ) -> None:
        self.rng, self.width, self.features = rng, width, features
        self.inputs, self.types = tuple(inputs), list(inputs)
        self.ops: list[Op] = []
        self.table = _table(features)

    def body(self, wanted: Sequence[Type], size: int, squash: bool = True) -> Body:
        """The body, of about so many operations, that returns these types.

        Floating-point results are bounded if `squash`, so that a carry stays so.
        """
        if REAL not in self.types:
            self.find(REAL)
        for _ in range(size):
            self.step()
        outputs = [self.result(type, squash) for type in wanted]
        return Body(self.inputs, tuple(self.ops), tuple(outputs))

    def result(self, type: Type, squash: bool) -> int:
        given = [i for i, t in enumerate(self.inputs) if t == type]
        if given and self.rng.random() < 0.12 - 0.1 * self.features.sees_batch:
            return self.rng.choice(given)  # handed through
        is_known = type.kind in "ib" and not self.features.sees_batch
        if is_known and self.rng.random() < 0.1:
            return self.add(Op("constant", (), (type,)))  # known from now on
        at = self.find(type)
        if type.kind == "f" and self.features.sees_batch:
            at = self.seeing(at)
        if type.kind == "i" and self.features.sees_batch:
            return self.add(Op("congruence", (at,), (type,)))  # another at each step
        if type.kind != "f" or not squash or self.rng.random() < 0.1:
            return at
        return self.add(Op(self.rng.choice(["sin", "tanh"]), (at,), (type,)))

    def seeing(self, at: int) -> int:
        """A value times what is seen of the batch, by an integer or a boolean."""
        name = self.rng.choice([*SEEING])
        kind = self.table[name].split()[1][0]
        given = [i for i, t in enumerate(self.inputs) if t == Type(kind)]
        by = self.rng.choice(given) if given else self.find(Type(kind))
        return self.add(Op(name, (at, by), (self.types[at],)))

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.2 and self.features.depth > 0 and self.features.control:
            self.control()
        elif chance < 0.25 and (self.features.has_axis or self.features.effects):
            self.operation(
                [*COLLECTIVE] * self.features.has_axis + [*self.features.effects]
            )
        elif chance < 0.4 and self.features.rules:
            shape = self.rng.choice([(), (self.width,)])
            at = self.find(Type("f", shape))
            name = self.rng.choice(self.features.rules)
            self.add(Op(name, (at,), (Type("f", shape),)))
        else:
            self.operation()

    def operation(self, names: Sequence[str] = ()) -> None:
        """One of these, or of all."""
        for _ in range(20):
            name = self.rng.choice(list(names or self.table))
            arguments, _, results = self.table[name].partition("->")
            bound: dict[str, tuple[int, ...]] = {}
            kinds = {token[0] for token in (arguments + results).split()}
            if not kinds <= set(self.features.kinds):
                continue
            found = [self.argument(token, bound) for token in arguments.split()]
            if None in found:
                continue
            types = [Type(t[0], self.shape(t[1:], bound)) for t in results.split()]
            self.add(Op(name, tuple(found), tuple(types)))
            return

    def argument(self, token: str, bound: dict[str, Any]) -> int | None:
        """A value for an argument, one of the last more often than not."""
        is_free = token[1:] == "S" and "S" not in bound
        fits = [
            i
            for i, type in enumerate(self.types)
            if type.kind == token[0]
            and (is_free or type.shape == self.shape(token[1:], bound))
        ]
        if not fits:
            return None
        i = (
            self.rng.choice(fits[-4:])
            if self.rng.random() < 0.6
            else self.rng.choice(fits)
        )
        if token[1:] == "S":
            bound["S"] = self.types[i].shape
        return i

    def shape(self, name: str, bound: dict[str, Any]) -> Any:
        shapes = {"0": (), "N": (self.width,), "NN": (self.width, self.width)}
        return shapes.get(name, bound.get("S"))

    def add(self, op: Op) -> int:
        """Adds an operation; which value its first result is."""
        self.ops.append(op)
        self.types += op.results
        return len(self.types) - len(op.results)

    def find(self, type: Type) -> int:
        """A value of this type, made from what there is if there is none."""
        fits = [i for i, t in enumerate(self.types) if t == type]
        if fits:
            return fits[-1] if self.rng.random() < 0.6 else self.rng.choice(fits)
        if type.kind == "f" and type.shape:
            if len(type.shape) == 1:
                return self.add(Op("spread", (self.find(REAL),), (type,)))
            at = self.find(Type("f", type.shape[1:]))
            return self.add(Op("square", (at,), (type,)))
        if type.kind == "f":
            for i, t in enumerate(self.types):
                if t.kind == "f":
                    return self.add(Op("mean", (i,), (type,)))
        if type.kind == "b":
            at = self.find(Type("f", type.shape))
            return self.add(Op("is_positive", (at,), (type,)))
        if type.kind == "i" and not type.shape:
            return self.add(Op("count", (self.find(Type("b")),), (type,)))
        if type.kind == "i" and type.shape == (self.width,):
            at = self.find(Type("f", type.shape))
            return self.add(Op("argsort", (at,), (type,)))
        if type.kind == "h":
            return self.add(Op("narrow", (self.find(Type("f", type.shape)),), (type,)))
        if type.kind == "c":
            at = self.find(Type("f", type.shape))
            return self.add(Op("complex", (at, at), (type,)))
        return self.add(Op("constant", (), (type,)))

    # Loops and branches

    def control(self) -> None:
        control = self.features.control
        if not self.features.while_loops:
            control = tuple(name for name in control if name != "while")
        name = self.rng.choice(control)
        getattr(self, f"_{name}")()

    def some(self, most: int, kinds: str = "fib") -> list[int]:
        """Some values, to be carried or closed over."""
        fits = [i for i, t in enumerate(self.types) if t.kind in kinds]
        return self.rng.sample(fits, min(len(fits), self.rng.randint(0, most)))

    def inner(
        self, transform: Transform, inputs: Sequence[Type], wanted: Sequence[Type]
    ) -> Body:
        features = self.features.within(transform)
        grower = Grower(self.rng, self.width, features, inputs)
        return grower.body(wanted, self.rng.randint(1, 4))

    def typed(self, values: Sequence[int]) -> list[Type]:
        return [self.types[i] for i in values]

    def _scan(self) -> None:
        names = ("lax.scan", "Scan", "Scan", "CheckpointedScan")
        carry, closed = [self.find(REAL), *self.some(2)], self.some(2)
        xs = [i for i in self.some(2, "f") if self.types[i].shape]
        is_foreign = self.features.is_foreign
        length = self.width if xs else self.rng.randint(0, 7 if is_foreign else 3)
        if is_foreign:
            transform = settings.plain_scan(self.rng, length)
        else:
            transform = settings.scan(self.rng, length, names)
        x_types = [Type(t.kind, t.shape[1:]) for t in self.typed(xs)]
        y_types = [REAL] * self.rng.randint(0, 1) if length == self.width else []
        inputs = [*self.typed(carry), *x_types, *self.typed(closed)]
        body = self.inner(transform, inputs, [*self.typed(carry), *y_types])
        results = [*self.typed(carry), *(Type("f", (length,)) for _ in y_types)]
        within = Within(transform, len(carry), len(xs))
        args = (*carry, *xs, *closed)
        self.add(Op("scan", args, tuple(results), (body,), within))

    def _fori_loop(self) -> None:
        carry, closed = [self.find(REAL), *self.some(2)], self.some(2)
        transform = Transform("lax.fori_loop", length=self.rng.randint(0, 3))
        inputs, results = self.typed([*carry, *closed]), self.typed(carry)
        body = self.inner(transform, inputs, results)
        within = Within(transform, len(carry))
        self.add(Op("fori_loop", (*carry, *closed), tuple(results), (body,), within))

    def _while(self) -> None:
        limit = self.find(Type("i"))
        carry, closed = [self.find(REAL), *self.some(2)], self.some(2)
        if self.features.is_foreign:
            transform = settings.plain_while(self.rng)
        else:
            transform = settings.while_loop(self.rng, self.features.while_loops)
        inputs, results = self.typed([*carry, *closed]), self.typed(carry)
        body = self.inner(transform, inputs, results)
        within, args = Within(transform, len(carry)), (limit, *carry, *closed)
        self.add(Op("while", args, tuple(results), (body,), within))

    def _map(self) -> None:
        names = ("jax.vmap", "ChunkedVmap", "Map", "ForLoop", "CheckpointedForLoop")
        devices = self.features.devices
        names += ON_DEVICES * (devices > 0)
        if self.features.is_foreign:
            names = ("lax.map", "lax.map", "jax.vmap")
            names += BY_JAX_ON_DEVICES * (devices > 0 and self.width % devices == 0)
        xs = [i for i, t in enumerate(self.types) if t.kind == "f" and t.shape]
        xs = self.rng.sample(xs, min(len(xs), self.rng.randint(1, 2)))
        xs, closed = xs or [self.find(Type("f", (self.width,)))], self.some(2)
        transform = settings.row_map(self.rng, self.width, names, devices)
        inputs = [Type(t.kind, t.shape[1:]) for t in self.typed(xs)]
        body = self.inner(transform, [*inputs, *self.typed(closed)], [REAL])
        within = Within(transform, 0, len(xs))
        results = (Type("f", (self.width,)),)
        self.add(Op("map", (*xs, *closed), results, (body,), within))

    def _branch(self) -> None:
        plain = BRANCHES[:2] if self.features.is_foreign else BRANCHES
        transform = Transform(self.rng.choice(plain))
        is_cond = transform.name in ("lax.cond", "Cond")
        which = self.find(Type("b" if is_cond else "i"))
        operands, closed = [self.find(REAL), *self.some(2)], self.some(2)
        inputs, results = self.typed([*operands, *closed]), self.typed(operands)
        count = 2 if is_cond else self.rng.randint(1, 3)
        bodies = [self.inner(transform, inputs, results) for _ in range(count)]
        within, args = Within(transform, len(operands)), (which, *operands, *closed)
        self.add(Op("branch", args, tuple(results), tuple(bodies), within))

    def _wrapper(self) -> None:
        names, devices = self.features.wrappers, self.features.devices
        is_foreign = self.features.is_foreign
        on_devices = BY_JAX_ON_DEVICES if is_foreign else ON_DEVICES[1:]
        names += on_devices * (devices > 0)
        transform = settings.wrapper(self.rng, names, devices)
        operands, closed = [self.find(REAL), *self.some(2)], self.some(2)
        if transform.name in CUSTOM:
            operands, closed = [*operands, *closed], []  # a rule closes over nothing
        inputs, results = self.typed([*operands, *closed]), self.typed(operands)
        body = self.inner(transform, inputs, results)
        within = Within(transform, len(operands))
        self.add(Op("wrapper", (*operands, *closed), tuple(results), (body,), within))


def _table(features: Features) -> dict[str, str]:
    """The signatures of the operations that may be used."""
    table = PURE | WORLDLY
    if features.has_axis:
        table = table | COLLECTIVE
    table = table | {name: EFFECTS[name] for name in features.effects}
    if features.sees_batch:
        table = table | SEEING
    return {
        name: signature
        for name, (signature, _) in table.items()
        if name not in features.without
    }
