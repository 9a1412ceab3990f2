"""A step with a bar in it, and a loop around such a step.

The bar takes three scalars of the carry: its number, how often it has moved, and how
many steps there were since. They are of a float type for the sake of derivatives. The
tangents of the three are the same for the bar of the tangents, and their cotangents are
those of the backward sweep, which passes each step once. So whoever differentiates,
batches or checkpoints the loop need not know that there is a bar.

A bar is opened by the first step that finds the number zero. All of it is in the step:
what stands around the loop only keeps outputs and reports together.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from .._equations import map_equations, map_params
from .._formula import Doubled, Formula
from .._lists import Arrays, Flags, pick, put
from .._tangents import instantiated, is_inexact, is_zero
from ._meter import BACKWARD, TANGENTS, Gauge, Meter, tied

# How many leaves of the carry the bar takes.
LEAVES = 3
_ALL = frozenset({(), (TANGENTS,), (BACKWARD,), (TANGENTS, BACKWARD)})


class Tell(Formula):
    """`(state, values) -> state`: before each step or after it, for the bar to move.

    Attributes:
        gauge: The bar.
        is_after: Whether the step has been run. Before it, the bar is opened.
        told: Which of the sweeps that come of it show their bar: that of the steps
            itself, `()`, that of its tangents, and those of their backward sweeps.
    """

    gauge: Gauge
    is_after: bool
    told: frozenset[tuple[str, ...]]

    def __init__(self, gauge: Gauge, is_after: bool, told: Any, in_avals: Any):
        self.in_avals = in_avals
        self.out_aval = in_avals[0]
        self.params = dict(gauge=gauge, is_after=is_after, told=told)
        super().__init__()

    @classmethod
    def now(
        cls, gauge: Gauge, is_after: bool, told: Any, state: Arrays, values: Arrays
    ) -> list[Any]:
        """The state, once the bar has been told."""
        args = (list(state), list(values))
        return cls(gauge, is_after, told, jax.tree.map(jax.typeof, args))(*args)

    def expand(self, state: Arrays, values: Arrays) -> list[Any]:
        if () not in self.told:
            return list(state)
        return self.gauge.step(state, values, self.is_after)

    def doubled(self, moves: Flags) -> Doubled:
        told = _ALL if (TANGENTS,) in self.told else frozenset()
        formula = type(self)(self.gauge.tangents, self.is_after, told, self.in_avals)
        of_state = (True,) * LEAVES
        of_values = (False,) * len(self.in_avals[1])
        return Doubled(
            formula,
            uses=(*[False] * LEAVES, *[True] * len(of_values)),
            takes=(*of_state, *of_values),
            ins=(*of_state, *of_values),
            gives=of_state,
            outs=of_state,
        )

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        zeros = self.zero_cts()
        if all(map(is_zero, cts)) or self.gauge.is_backward:
            return zeros
        told = frozenset(phase[:-1] for phase in self.told if BACKWARD in phase)
        # What is last there is first on the way back.
        gauge, is_after = self.gauge.backward, not self.is_after
        values = [] if is_after or self.gauge.total is not None else inputs[0][1:]
        return Tell.now(gauge, is_after, told, instantiated(cts), values), zeros[1]

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [any(moves_in[:LEAVES])] * LEAVES

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        # One bar for all examples: it is that of the last to stop, and tells of the
        # first.
        (state, values), (state_dims, dims) = args, dims
        batched = any(dim is not None for dim in state_dims)
        if batched:
            lead = lambda x, dim: _lead(x, dim, axis_data.size)
            state = list(map(lead, state, state_dims))
        one = _in_front if self.gauge.is_backward else _first
        values = list(map(one, values, dims))
        types = jax.tree.map(jax.typeof, (state, values))
        formula = Tell(self.gauge, self.is_after, self.told, types)
        return formula, (state, values), [0 if batched else None] * LEAVES

    def muted(self, backward: bool) -> Self:
        kept = frozenset(p for p in self.told if BACKWARD in p and not backward)
        return self.with_params(told=kept)


class Enter(Formula):
    """`inputs -> (state, inputs)`: the state that a bar starts with.

    The cotangents of the inputs come with those of the state: there the backward sweep
    has come to its end.
    """

    gauge: Gauge

    def __init__(self, gauge: Gauge, in_avals: Any):
        self.in_avals = in_avals
        state = jax.make_jaxpr(_no_steps)().out_avals
        self.out_aval = (list(state), in_avals[0])
        self.params = dict(gauge=gauge)
        super().__init__()

    def expand(self, inputs: Arrays) -> Any:
        return _no_steps(), list(inputs)

    def doubled(self, moves: Flags) -> Doubled:
        dots = [aval.to_tangent_aval() for aval in pick(self.in_avals[0], moves)]
        gives = (*[True] * LEAVES, *moves)
        return Doubled(
            Enter(self.gauge.tangents, (dots,)),
            uses=(False,) * len(moves),
            takes=moves,
            ins=(True,) * len(dots),
            gives=gives,
            outs=(True,) * sum(gives),
        )

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        state, cts = cts
        marks = [not is_zero(ct) for ct in cts]
        state, given = instantiated(state), pick(cts, marks)
        return (put(cts, marks, Leave.now(self.gauge.backward, state, given)),)

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return [*[any(moves_in)] * LEAVES, *moves_in]

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        formula = Enter(self.gauge, jax.tree.map(jax.typeof, args))
        return formula, args, [*[None] * LEAVES, *dims[0]]


class Leave(Formula):
    """`(state, outputs) -> outputs`, so that nobody gets them without the reports."""

    gauge: Gauge

    def __init__(self, gauge: Gauge, in_avals: Any):
        self.in_avals = in_avals
        self.out_aval = in_avals[1]
        self.params = dict(gauge=gauge)
        super().__init__()

    @classmethod
    def now(cls, gauge: Gauge, state: Arrays, outputs: Arrays) -> list[Any]:
        """The outputs, with the reports."""
        args = (list(state), list(outputs))
        return cls(gauge, jax.tree.map(jax.typeof, args)).apply(*args)

    def expand(self, state: Arrays, outputs: Arrays) -> list[Any]:
        number = self.gauge.close(state, outputs)
        return tied(number, list(outputs))

    def doubled(self, moves: Flags) -> Doubled:
        takes = (*[True] * LEAVES, *moves[LEAVES:])
        (state, outputs) = self.in_avals
        avals = pick([*state, *outputs], takes)
        dots = [aval.to_tangent_aval() for aval in avals]
        formula = Leave(self.gauge.tangents, (dots[:LEAVES], dots[LEAVES:]))
        gives = moves[LEAVES:]
        return Doubled(
            formula,
            uses=(False,) * len(moves),
            takes=takes,
            ins=(True,) * len(dots),
            gives=gives,
            outs=(True,) * sum(gives),
        )

    def pull(self, perturbed: Any, inputs: Any, cts: Any) -> Any:
        return self.zero_cts()[0], cts

    def moves_out(self, moves_in: Sequence[bool]) -> list[bool]:
        return list(moves_in[LEAVES:])

    def batched(
        self, axis_data: Any, args: Any, dims: Any
    ) -> tuple[Formula, Any, list[int | None]]:
        (state, outputs), (state_dims, out_dims) = args, dims
        args = (list(map(_in_front, state, state_dims)), list(outputs))
        return Leave(self.gauge, jax.tree.map(jax.typeof, args)), args, list(out_dims)


@dataclasses.dataclass(frozen=True)
class Watched:
    """A loop that has bars.

    Attributes:
        meter: The bars.
        at: Where in the carry their state is.
    """

    meter: Meter
    at: int = 0

    def step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`(consts, carry, x) -> (carry, y)` with the state in its carry."""
        gauge, label = self.meter.gauge, self.meter.source.label

        def run(consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            state, carry = self._split(carry)
            state = Tell.now(gauge, False, _ALL, state, [])
            carry, y = step(consts, carry, x)
            values = label.pick(carry[self.at :], y) if label else []
            state = Tell.now(gauge, True, _ALL, state, values)
            return self._join(state, carry), y

        return run

    def init(self, init: Arrays) -> list[Any]:
        """The initial carry of that step."""
        return self._join(_no_steps(), init)

    def run(self, loop: Callable[..., Any], *inputs: Arrays) -> tuple[Any, Any]:
        """Runs a loop of such a step, from consts, carry and `xs` to carry and `ys`."""
        flat, tree = jax.tree.flatten(inputs)
        marks = list(map(is_inexact, flat))
        marked = pick(flat, marks)
        enter = Enter(self.meter.gauge, (list(map(jax.typeof, marked)),))
        state, marked = enter.apply(marked)
        consts, init, xs = tree.unflatten(put(flat, marks, marked))
        outputs = loop(consts, self._join(state, self._split(init)[1]), xs)
        flat, tree = jax.tree.flatten(outputs)
        state = self._split(outputs[0])[0]
        return tree.unflatten(Leave.now(self.meter.gauge, state, flat))

    def close(self, carry: Arrays) -> list[Any]:
        """The final carry without the state."""
        return self._split(carry)[1]

    def _split(self, carry: Arrays) -> tuple[list[Any], list[Any]]:
        end = self.at + LEAVES
        return list(carry[self.at : end]), [*carry[: self.at], *carry[end:]]

    def _join(self, state: Arrays, carry: Arrays) -> list[Any]:
        return [*carry[: self.at], *state, *carry[self.at :]]


def silent(program: Any) -> Any:
    """A step beside whose tangents it is run once more: these alone have a bar."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tell):
            return value
        return value.with_params(told=frozenset(p for p in value.told if TANGENTS in p))

    return map_equations(program, lambda eqn: map_params(eqn, change))


def _no_steps() -> list[Any]:
    return [jnp.zeros((), jnp.float32)] * LEAVES


def _in_front(x: Any, dim: int | None) -> Any:
    return x if dim is None else jnp.moveaxis(x, dim, 0)


def _lead(x: Any, dim: int | None, size: int) -> Any:
    return jax.lax.broadcast(x, (size,)) if dim is None else jnp.moveaxis(x, dim, 0)


def _first(x: Any, dim: int | None) -> Any:
    return x if dim is None else jnp.take(x, 0, dim)
