"""The plans of all loops in a function, as they will run."""

import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex

from .._arrays import (
    Rest,
    automatic_sharding,
    is_typed,
    partition,
    refuse_symbolic_plan,
)
from .._calls import KnownAs, OpenedCall, call_names, typed
from .._device import DeviceLike, check_device, planning_for_call
from .._programs import Place, pruned
from .._tracebacks import border
from .._types import PyTree, Value
from ._jax_loops import JaxPlan
from ._loop_finder import LoopFinder
from ._loop_plans import Plans
from .engine._listing import listing, unlisted


@typed(instead="Call the result with the arguments of f: `el.plans(f)(*args)`.")
def plans(
    f: Callable[..., PyTree], *, device: DeviceLike | None = None
) -> Callable[..., Plans]:
    """Finds the plans of all loops in a function, without running it.

    The function is traced. The result lists every loop of this library that is
    differentiated in reverse mode, with the plan that it will run: for its batch,
    whether the `vmap` is inside or outside of the gradient, and for the inputs that are
    differentiated. A loop that is not differentiated has no plan, and is not listed.

    The loops of JAX (`jax.lax.scan`, `map` and `fori_loop`) are listed as well, if they
    store anything for the way back, with what they take now, and what they would take
    with a schedule, which [`Reschedule`][eqloop.Reschedule] gives them. So this is what
    to call first if a program runs out of memory. Loops in the rules of a
    `jax.custom_vjp` or a `jax.custom_jvp`, such as those of Equinox and Diffrax, are
    listed with what the rule stores of them, which no schedule changes.

    While loops are listed as well; their plan is for the greatest number of steps that
    they may run. The loops of
    [`CheckpointedAdjoint`][eqloop.diffrax.CheckpointedAdjoint] are listed at the line
    that calls `diffeqsolve`.

    Args:
        f: Any function that takes a gradient, a training step for example.
        device: What the plans are for, as for [`planning_for`][eqloop.planning_for]:
            by default, the device on which `f` would run.

    Returns:
        A function of the arguments of `f`, where a `jax.ShapeDtypeStruct` can stand for
        an array. It returns a sequence of loops, each with its `plan`, the `name` of
        the transform, its `place` in the program, its `batch`, and its `depth` in other
        loops. Bytes are those of one device, where the arguments say how arrays are
        split over several. `peak_bytes` is what they take at once. Printed, it is a
        table.

    Raises:
        TypeError: If `f` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def loss(w, xs):
        ...     scan = el.CheckpointedScan(lambda h, x: (jnp.sin(w * h + x), None))
        ...     return scan(0.0, xs)[0]
        >>> gradients = jax.vmap(jax.grad(loss), (None, 0))
        >>> found = el.plans(gradients)(1.0, jnp.zeros((8, 256)))
        >>> found[0].plan.levels, found[0].batch
        (((16, 16),), 8)
        >>> print(found)
        loop              steps  batch  schedule           stored ...
        CheckpointedScan  256    8      Recursive(base=16) 32 carries ...
          ...
        at once: ...

        A loop of JAX:

        >>> def plain(w, xs):
        ...     return jax.lax.scan(lambda h, x: (jnp.sin(w * h + x), None), 0.0, xs)[0]
        >>> print(el.plans(jax.grad(plain))(1.0, jnp.zeros(256)))
        loop      steps  batch  schedule  stored     evaluations  memory
        lax.scan  256    1      none      residuals  256          ... KiB
          ...
          rescheduled: ...
        at once: ... KiB
        rescheduled: by el.Reschedule(loss, el.Recursive(16)), inside of the gradient
    """
    check_device("plans", device)
    return _finding(f, device, True)


def own_plans(f: Callable[..., PyTree]) -> Callable[..., Plans]:
    """The plans of the loops of this library alone."""
    return _finding(f, None, False)


def stored_by_rules(f: Callable[..., PyTree]) -> Callable[..., dict[Place | None, int]]:
    """What the rules of functions in another one store of their loops, in bytes.

    By where these functions are called.
    """

    def find(*args: PyTree) -> dict[Place | None, int]:
        stored, depth = dict[Place | None, int](), math.inf
        for loop in _finding(f, None, True)(*args):
            if loop.depth > depth:
                continue
            rule = loop.plan.rule if isinstance(loop.plan, JaxPlan) else None
            depth = loop.depth if rule else math.inf
            if rule is not None:
                size = stored.get(rule.place, 0) + loop.plan.peak_bytes
                stored[rule.place] = size
        return stored

    return find


def _finding(
    f: Callable[..., PyTree], device: DeviceLike | None, of_jax: bool
) -> Callable[..., Plans]:
    @border
    @functools.wraps(f)
    def find(*args: PyTree, **kwargs: PyTree) -> Plans:
        arrays, rest = partition((f, args, kwargs), is_typed)
        refuse_symbolic_plan("plans", arrays)
        trace = lambda: _program(f, args, kwargs, arrays, rest)
        with planning_for_call(device, arrays), listing() as decided:
            program = trace()
            finder = LoopFinder(decided, of_jax)
            finder.look_into(program)
            if any(map(finder.has_stand_ins, finder.of_jax.values())):
                with unlisted():
                    finder.see_run(trace())
            finder.split_as(program, list(map(automatic_sharding, arrays)))
            found = finder.of_program(program, 0, None)
        return Plans(tuple(found.loops), found.peak)

    return find


def _program(
    f: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, Any],
    arrays: list[Value],
    rest: Rest,
) -> jex.ClosedJaxpr:
    """The program of a call, from its arrays, or types of them, and what is left."""
    call = lambda f, args, kwargs: f(*args, **kwargs)
    take = lambda out: (eqx.filter(out, eqx.is_array), None)
    names = call_names(f, args, kwargs, rest.taken)
    opened = OpenedCall(rest.join, call, take, KnownAs("jit", f, names))
    # What no output needs, XLA does not run: of a Hessian, say, the gradient.
    return pruned(jax.make_jaxpr(opened.on_arrays)(arrays))
