"""`Reversible`: the schedule of loops whose steps can be undone."""

import dataclasses
from collections.abc import Callable
from typing import NoReturn, final

from .._calls import check_bool
from .._types import PyTree, Value
from ._schedules import AbstractSchedule, Recursive, make_count
from .engine._layout import Layout
from .engine._loop_spec import LoopSpec, Undo
from .engine.orders._inverted import Inverted


@final
@dataclasses.dataclass(frozen=True)
class Reversible(AbstractSchedule):
    """The backward pass computes each carry from the one after it, by an inverse.

    Memory does not grow with the length of the loop, and each step is evaluated three
    times: by the primal, by the inverse, and where it is reversed. Rounding errors of
    the inverse grow in the backward pass. With several `checkpoints` they grow over
    one part only, because each part starts from a stored carry.

    Leapfrog and reversible Heun are integrators that have an inverse. Layers that
    couple two halves of a state have one, too. See [the
    guide](../guides/reversible_loops.md).

    Many more steps have an inverse but for a small part of what they forget: the rim of
    a wave that is absorbed there, the size of an adaptive step. With `save`, each step
    stores that part, and the inverse is given it. Memory then grows by these rows
    alone. [`Cast`][eqloop.Cast], [`Offload`][eqloop.Offload] and
    [`Spill`][eqloop.Spill] store them as they store carries.

    Forward-mode derivatives of the gradient use the inverse as well, and so does the
    gradient of a batch. `Recursive(16)` is used instead for the gradient of a gradient
    in reverse mode, whose steps have no known inverse, for a loop whose step changes
    references, for a loop that stops and whose steps see their batch, and for a segment
    of another schedule.

    Args:
        inverse: `(carry, x) -> carry`, from the carry after a step and its `x` to the
            carry before it. It is called with `key=` if the loop is given a key. It may
            return leaves that no reversal reads, such as sums, unchanged. In
            `StackedLayers` it is called as `inverse(x, layer, *args)`. With `save`, it
            is called as `inverse(carry, x, saved)`, or `inverse(x, layer, saved,
            *args)`.
        save: `(carry, x) -> saved`, from the carry before a step and its `x` to a tree
            of arrays that the inverse of this step is given. It is called with `key=`
            if the loop is given a key, and in `StackedLayers` as `save(x, layer,
            *args)`. Arrays that the inverse does not read are not stored. No gradient
            passes through what is saved: it is there to restore the carry, and the
            derivative is that of the step.
        checkpoints: How many carries are stored, at the starts of parts of about equal
            length, including the initial carry. The last carry is also kept.
        check: Whether to compare the inverse with the step, at the first step of each
            gradient, on the values of that call; and what the way back comes to, with
            the carry from which the loop, or a part of it, has started.

    Raises:
        TypeError: If `inverse` or `save` cannot be called, or `checkpoints` is not an
            int. Where the loop is called, if `inverse` does not return such a carry, or
            does not take what it is given; if `save` returns something else than
            arrays.
        ValueError: If `checkpoints` is less than 1. While a gradient is computed, if
            the inverse does not undo the first step, or does not come back to the
            start, with how far it is off. A program that is compiled raises JAX's own
            error, with the same message.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> force = lambda q: -jnp.sin(q)
        >>> def leapfrog(carry, dt):
        ...     q, p = carry
        ...     q = q + 0.5 * dt * p
        ...     p = p + dt * force(q)
        ...     return (q + 0.5 * dt * p, p), None
        >>> undo = lambda carry, dt: leapfrog(carry, -dt)[0]
        >>> scan = el.Scan(leapfrog, schedule=el.Reversible(undo))
        >>> dts = jnp.full(1000, 0.01)
        >>> slope = jax.grad(lambda q, scan: scan((q, 0.0), dts)[0][0])
        >>> expected = slope(1.0, el.Scan(leapfrog))
        >>> bool(jnp.isclose(slope(1.0, scan), expected, rtol=1e-3))
        True
        >>> plan = scan.plan((1.0, 0.0), dts)
        >>> plan.slots, plan.evaluations
        (1, 3000)

        A step that forgets what its first entry was:

        >>> def forget(h, x):
        ...     return (h + x).at[0].set(0.0), jnp.sum(h**2)
        >>> def recall(h, x, first):
        ...     return (h - x).at[0].set(first)
        >>> schedule = el.Reversible(recall, save=lambda h, x: h[0])
        >>> plan = el.Scan(forget, schedule=schedule).plan(jnp.ones(8), jnp.ones(100))
        >>> print(plan)  # doctest: +ELLIPSIS
        Reversible(...)
          steps              100
          stored carries     1, ...
          saved of steps     100, ...
          ...

    References:
        S. McCallum and J. Foster, *Efficient, accurate and stable gradients for neural
        ODEs*, [arXiv:2410.11648](https://arxiv.org/abs/2410.11648); P. Kidger,
        J. Foster, X. Li and T. Lyons, *Efficient and accurate gradients for neural
        SDEs*, [arXiv:2105.13493](https://arxiv.org/abs/2105.13493).
    """

    inverse: Callable[..., PyTree]
    save: Callable[..., PyTree] | None = dataclasses.field(default=None, kw_only=True)
    checkpoints: int = dataclasses.field(default=1, kw_only=True)
    check: bool = dataclasses.field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.inverse):
            raise TypeError(
                f"Reversible: `inverse` must be a function `(carry, x) -> carry`, not "
                f"{self.inverse!r}."
            )
        if self.save is not None and not callable(self.save):
            raise TypeError(
                f"Reversible: `save` must be a function `(carry, x) -> saved`, or "
                f"None, not {self.save!r}."
            )
        make_count(self, "checkpoints", self.checkpoints)
        check_bool("Reversible", "check", self.check)

    @property
    def undo(self) -> Undo:
        """How a step is undone."""
        return Undo(self.inverse, self.save)

    def layout(self, loop: LoopSpec) -> Layout:
        """Parts that are reversed by the inverse, if there is one."""
        missed = _missed if self.check else None
        return layout_by_inverse(loop, self.checkpoints, self.check, missed)


def layout_by_inverse(
    loop: LoopSpec,
    checkpoints: int,
    checks: bool,
    missed: Callable[[str, Value, Value], NoReturn] | None,
) -> Layout:
    """Parts that are reversed by the inverse, if there is one.

    `missed` raises an error if the way back misses a carry.
    """
    if not loop.has_inverse:
        return Recursive().layout(loop)
    parts = min(checkpoints, loop.length)
    return Layout(Inverted(loop.length, parts, checks, missed))


def _missed(name: str, size: Value, off: Value) -> NoReturn:
    raise ValueError(
        f"Reversible: on its way back `inverse` does not come to the carry from which "
        f"the loop has started. At {name}, whose largest entry is {size:.3g}, it is "
        f"off by {off:.3g}, so the gradient is wrong. Either it does not undo some "
        f"step, or rounding errors have grown too large, as they do where a step "
        f"contracts: then store carries in between by `checkpoints=`. `check=False` "
        f"checks nothing."
    )
