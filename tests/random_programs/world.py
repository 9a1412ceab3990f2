"""How a body is run, and in what: the world."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .bodies import Body, Op
from .control import CONTROL
from .operations import COLLECTIVE, EFFECTS, PURE, SEEING, WORLDLY
from .rules import RULES
from .values import Precision, Type


@dataclasses.dataclass
class World:
    """What a body is run in.

    Attributes:
        is_written_out: Whether the library's transforms are replaced by the loop
            written out, so that the result is the reference.
        precision: The dtypes.
        width: How long the vectors are.
        axis: The named axis that the program is mapped over, if any.
    """

    is_written_out: bool
    precision: Precision
    width: int
    axis: str | None = None
    log: list[Any] = dataclasses.field(default_factory=list)
    unordered: list[Any] = dataclasses.field(default_factory=list)
    ref: Any = None

    def forget(self) -> None:
        """Forgets what effects have seen."""
        self.log.clear()
        self.unordered.clear()

    def cast(self, x: Any, kind: str) -> Any:
        return lax.convert_element_type(x, self.precision.dtype(kind))

    def uniform(self, key: Any) -> Any:
        return jax.random.uniform(key, (self.width,), self.precision.dtype("f"))

    def index(self) -> Any:
        return self.cast(lax.axis_index(self.axis), "f")

    def constant(self, type: Type) -> Any:
        if type.kind == "k":
            return jax.random.wrap_key_data(jnp.full((*type.shape, 2), 7, jnp.uint32))
        return jnp.full(type.shape, True, self.precision.dtype(type.kind))

    def run(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """What the body makes of these values."""
        values = list(values)
        for op in body.ops:
            results = self._function(op)(*(values[i] for i in op.args))
            if op.results:
                values += results if isinstance(results, list | tuple) else [results]
        return [values[i] for i in body.outputs]

    def _function(self, op: Op) -> Callable[..., Any]:
        if op.name == "constant":
            return lambda: self.constant(op.results[0])
        if op.name in CONTROL:
            return functools.partial(CONTROL[op.name], op, self)
        if op.name in PURE:
            return PURE[op.name][1]
        if op.name in RULES:
            return RULES[op.name].f
        table = WORLDLY | COLLECTIVE | EFFECTS | SEEING
        return functools.partial(table[op.name][1], self)
