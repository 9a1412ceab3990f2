"""A case: a function of one row that has an operation in it, and rows for it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from eqloop._compat import form_of, form_params
from eqloop._programs import equations

from .values import is_inexact


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A function of one row that has an operation in it, and rows for it.

    Attributes:
        operation: The name of the primitive.
        label: What is special about this case.
        f: The function, from arrays to an array or several.
        args: The arrays, each with rows along its first axis.
        ulps: By how many units in the last place it may differ from JAX, if that is
            another number than for others.
        has_slope: Whether its gradient is looked at.
    """

    operation: str
    label: str
    f: Callable[..., Any]
    args: Sequence[Any]
    ulps: float | None = None
    has_slope: bool = True

    def __str__(self) -> str:
        types = ",".join(f"{x.dtype}{list(x.shape[1:])}" for x in self.args)
        return f"{self.operation}: {self.label} {types}".strip()

    def of_row(self, *args: Any) -> list[Any]:
        """The function, with a list of results."""
        return jax.tree.leaves(self.f(*args))

    @functools.cached_property
    def types(self) -> list[Any]:
        """The types of the arrays of one row."""
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.args]

    @functools.cached_property
    def program(self) -> jex.ClosedJaxpr:
        """The program of one row."""
        return jax.make_jaxpr(self.of_row)(*self.types)

    @functools.cached_property
    def found(self) -> list[jex.JaxprEqn]:
        """The equations of the operation."""
        return [e for e in equations(self.program) if name_of(e) == self.operation]

    @functools.cached_property
    def is_taken(self) -> bool:
        """Whether JAX has the operation for these types, and this version has it."""
        try:
            if self.found:
                jax.jit(jax.vmap(self.of_row)).lower(*self.args)
        except Exception:
            return False
        return bool(self.found)

    @functools.cached_property
    def moves(self) -> list[bool]:
        """By which of the arrays it is differentiated; by none if JAX cannot."""
        marks = [is_inexact(x.dtype) for x in self.args]
        if not self.has_slope or not any(marks):
            return [False] * len(marks)
        try:
            slope = jax.grad(loss(self.of_row, marks), 0)
            jax.jit(slope).lower(*self._split(marks))
        except Exception:  # JAX has no derivative of it
            return [False] * len(marks)
        return marks

    def _split(self, marks: Sequence[bool]) -> tuple[list[Any], list[Any]]:
        own = [x for x, mark in zip(self.types, marks, strict=True) if mark]
        return own, [x for x, mark in zip(self.types, marks, strict=True) if not mark]


def name_of(eqn: jex.JaxprEqn) -> str:
    """The primitive of an equation, and the class of a `hijax` one."""
    form = form_of(eqn)
    if form == "call_hi_primitive":
        return type(eqn.params["_prim"]).__name__
    # JAX 0.10 writes some of them in another way.
    return form.replace("_add", "-add") if form.startswith("scatter_") else form


def params_of(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation, those of a `hijax` primitive among them."""
    if form_of(eqn) == "call_hi_primitive":
        return eqn.params["_prim"].params
    return form_params(eqn)


def weighted(outs: Sequence[Any]) -> Any:
    """A number that depends on each entry of the results that are no integers."""
    total = jnp.zeros((), "float32")
    for out in outs:
        if is_inexact(out.dtype) and out.size:
            # Cotangents of ordinary size, whatever is in the results.
            weights = np.cos(np.arange(out.size)).reshape(out.shape)
            part = jnp.sum(out * jnp.asarray(weights, out.dtype))
            total = total + jnp.real(part).astype("float32")
    return total


def loss(f: Callable[..., Any], marks: Sequence[bool]) -> Callable[..., Any]:
    """A function of the arrays to differentiate by, and of the others."""

    def of(own: Sequence[Any], rest: Sequence[Any]) -> Any:
        return weighted(f(*merged(own, rest, marks)))

    return of


def merged(own: Sequence[Any], rest: Sequence[Any], marks: Sequence[bool]) -> list[Any]:
    left, right = iter(own), iter(rest)
    return [next(left) if mark else next(right) for mark in marks]


def apart(args: Sequence[Any], marks: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    own = [x for x, mark in zip(args, marks, strict=True) if mark]
    return own, [x for x, mark in zip(args, marks, strict=True) if not mark]
