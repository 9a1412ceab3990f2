"""Functions as data: a list of operations, which can be run, shown and cut."""

import dataclasses
from typing import Any

from .values import Type


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation: of which values, with which results.

    Attributes:
        name: What it does.
        args: The numbers of the values that it is given.
        results: The types of the values that it adds.
        bodies: The functions within, if it is a loop or a branch.
        setting: What is to be known beside: a schedule, a length.
    """

    name: str
    args: tuple[int, ...]
    results: tuple[Type, ...]
    bodies: tuple["Body", ...] = ()
    setting: Any = None


@dataclasses.dataclass(frozen=True)
class Body:
    """A function of values, which are numbered: first its inputs, then all results."""

    inputs: tuple[Type, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]

    @property
    def types(self) -> tuple[Type, ...]:
        return self.inputs + tuple(t for op in self.ops for t in op.results)

    @property
    def output_types(self) -> tuple[Type, ...]:
        return tuple(self.types[i] for i in self.outputs)

    def names(self) -> set[str]:
        """Of all operations, those within included."""
        inner = (body.names() for op in self.ops for body in op.bodies)
        return {op.name for op in self.ops}.union(*inner)

    def show(self, name: str = "f", indent: str = "") -> str:
        types = self.types
        inputs = ", ".join(f"v{i}: {t}" for i, t in enumerate(self.inputs))
        lines = [f"{indent}def {name}({inputs}):"]
        indent, at = indent + "    ", len(self.inputs)
        for op in self.ops:
            inner = [f"{name}{at}{chr(97 + i)}" for i in range(len(op.bodies))]
            lines += [b.show(n, indent) for n, b in zip(inner, op.bodies, strict=True)]
            results = range(at, at := at + len(op.results))
            given = [*inner, *(f"v{i}" for i in op.args)]
            given += [] if op.setting is None else [f"{op.setting}"]
            left = ", ".join(f"v{i}: {types[i]}" for i in results)
            lines.append(f"{indent}{left or '_'} = {op.name}({', '.join(given)})")
        returned = ", ".join(f"v{i}" for i in self.outputs)
        return "\n".join([*lines, f"{indent}return {returned}"])
