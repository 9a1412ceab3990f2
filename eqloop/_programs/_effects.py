"""Effects of a step: references, callbacks, and checks.

A loop that recomputes runs steps more often than the user wrote. That makes no
difference to pure computations. A reference becomes a leaf of the carry, so it is
updated once. A check may be repeated: it finds the same again. Any other effect is an
error where it would be, as it is in `jax.checkpoint`. Only `jax.debug` is allowed,
which JAX repeats as well.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import jax.ref
import jax.tree_util as jtu

from .._compat import form_of
from .._types import AnyJaxpr, PyTree
from ._equations import aval_of, equations

# Compared by name, since JAX does not export these classes; see `tests/canaries/`.
_OF_CALLBACKS = ("IOEffect", "OrderedIOEffect")
_OF_CHECKS = ("ErrorEffect",)
_OF_AXES = "NamedAxisEffect"
_ORDERED = ("OrderedDebugEffect", "OrderedIOEffect")
# These say what a value depends on, and not that something happens.
_OF_VALUES = (_OF_AXES, "InternalMutableArrayEffect")


def makes_refs(program: jex.ClosedJaxpr) -> bool:
    """Whether a program, or one inside it, has references of its own."""
    outs = (var for eqn in equations(program) for var in eqn.outvars)
    return any(is_ref(aval_of(var)) for var in outs)


def is_ref(x: object) -> bool:
    """Whether something is a reference (`jax.new_ref`) or the type of one."""
    if isinstance(x, jax.ref.AbstractRef):
        return True
    is_array = isinstance(x, jax.core.Tracer | jax.ref.Ref)
    return is_array and isinstance(jax.typeof(x), jax.ref.AbstractRef)


def refuse_refs(owner: str, tree: PyTree, name: str) -> None:
    """Checks that there are no references in an argument."""
    leaves, _ = jtu.tree_flatten_with_path(tree)
    found = [name + jtu.keystr(path) for path, leaf in leaves if is_ref(leaf)]
    if found:
        raise TypeError(
            f"{owner}: {', '.join(found)} is a reference (`jax.new_ref`). Pass arrays, "
            f"`{found[0]}[...]`, or have the function close over the reference."
        )


def has_checks(effects: Iterable[jex.Effect]) -> bool:
    """Whether there is a `checkify.check` in a step."""
    return _any_of(effects, _OF_CHECKS)


def has_io(effects: Iterable[jex.Effect]) -> bool:
    """Whether there is an `io_callback` in a step."""
    return _any_of(effects, _OF_CALLBACKS)


def is_ordered(effects: Iterable[jex.Effect]) -> bool:
    """Whether something in a step must happen in the order of the steps."""
    return any(type(effect).__name__ in _ORDERED for effect in effects)


def does_something(effects: Iterable[jex.Effect]) -> bool:
    """Whether something happens that must not happen twice, or be left out."""
    return any(type(effect).__name__ not in _OF_VALUES for effect in effects)


def axes_named(effects: Iterable[Any]) -> set[Any]:
    """The named axes over which there are collectives."""
    return {e.name for e in effects if type(e).__name__ == _OF_AXES}


def refuse_callbacks(effects: Iterable[jex.Effect], when: str, instead: str) -> None:
    """Checks that no callback with effects is called more often than it should.

    `when` says in the message what would repeat them, and `instead` what else to do.
    """
    if has_io(effects):
        raise ValueError(
            f"{when}, and there is an `io_callback` in the step, whose effect would be "
            f"repeated. {instead}, or use a callback without effects: "
            f"`jax.pure_callback` for values, `jax.debug.callback` for messages."
        )


def refuse_refs_in_rules(program: AnyJaxpr, instead: str) -> None:
    """Checks that no backward rule of the user writes to a reference.

    The rule would write to the step's own reference, which is gone when it runs.
    """
    given = (eqn for eqn in equations(program) if form_of(eqn).startswith("custom_vjp"))
    if any(is_ref(var.aval) for eqn in given for var in eqn.invars):
        raise ValueError(
            "A function with a `jax.custom_vjp` in the step is given a reference "
            "(`jax.new_ref`), and the gradient of this loop runs the step with one of "
            f"its own. {instead}, or return what the rule would write as a cotangent."
        )


def _any_of(effects: Iterable[jex.Effect], names: tuple[str, ...]) -> bool:
    return any(type(effect).__name__ in names for effect in effects)
