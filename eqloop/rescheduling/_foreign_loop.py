"""What a person would know a loop by that JAX runs."""

import dataclasses

import jax
import jax.extend.core as jex

from .._compat import scan_counts
from .._programs import Place, aval_of, loop_of_jax, place_of
from .._types import ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class ForeignLoop:
    """A loop of JAX's own, as `only` of a [`Reschedule`][eqloop.Reschedule] sees it.

    Attributes:
        name: What made it: `"lax.scan"`, `"lax.map"`, `"lax.fori_loop"` or
            `"lax.while_loop"`.
        length: The number of steps; `None` for a while loop.
        place: The line that calls it, with `file`, `line` and `function`, if that is
            known: in a library, if the loop is in a library.
        depth: How many other loops it is inside of.
        carry: The types of the arrays that are handed from step to step.
        scope: The scopes of `jax.named_scope` around it, such as `"train/decoder"`.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def total(xs):  # of a library, say
        ...     last, _ = jax.lax.scan(lambda h, x: (h + x, None), 0.0, xs)
        ...     return jax.lax.fori_loop(0, 3, lambda i, h: h * h, last)
        >>> def is_long(loop):
        ...     print(loop.name, loop.length, loop.place.function)
        ...     return loop.length > 10
        >>> last = el.Reschedule(total, el.Recursive(), only=is_long)(jnp.ones(20))
        lax.scan 20 total
        lax.fori_loop 3 total
    """

    name: str
    length: int | None
    place: Place | None
    depth: int
    carry: tuple[ShapeDtypeStruct, ...]
    scope: str = ""

    @property
    def is_of_gradient(self) -> bool:
        """Whether it is the way back of a loop, outside of any other."""
        return self.depth == 0 and "transpose(" in self.scope

    def __str__(self) -> str:
        steps = "" if self.length is None else f" of {self.length} steps"
        return f"{self.name}{steps} at {self.place or 'an unknown line'}"


def foreign_loop(eqn: jex.JaxprEqn, depth: int, around: Place | None) -> ForeignLoop:
    """The loop that an equation is."""
    is_scan, params = eqn.primitive.name == "scan", eqn.params
    carry = eqn.outvars[: scan_counts(params)[1]] if is_scan else eqn.outvars
    return ForeignLoop(
        name=f"lax.{loop_of_jax(eqn)}",
        length=params["length"] if is_scan else None,
        place=place_of(eqn.source_info) or around,
        depth=depth,
        carry=tuple(map(_type, map(aval_of, carry))),
        scope=str(eqn.source_info.name_stack),
    )


def _type(aval: object) -> ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(*(getattr(aval, name) for name in ("shape", "dtype")))
