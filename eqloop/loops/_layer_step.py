"""One layer of a stack: how it is made, and as the step of a loop."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._arrays import paths
from .._calls import argument_names, call_traced, check_takes, explained, parameters_of
from .._types import PyTree, Value
from ..checkpointing import Undo
from ._carry import Shown, Words, shown_call
from ._open_loop import undoing_call
from ._stack import check_returned
from ._step_checks import check_wants_key

NAME = "StackedLayers"


@dataclasses.dataclass(frozen=True)
class LayerStep:
    """One step: `x` through one layer.

    Attributes:
        keep: Whether the step returns `x` for each layer.
        state_at: Which of the arguments of a layer is its state.
    """

    keep: bool
    state_at: int | None

    def __call__(self, x: Value, inputs: PyTree, **keywords: PyTree) -> PyTree:
        layer, args, state = inputs
        args = self._with(state, args)
        check_wants_key(NAME, layer, (x, *args), keywords, "a layer")
        x = call_traced(NAME, layer, (x, *args), keywords, word="a layer")
        if self.state_at is not None:
            x, state = check_returned(NAME, x)
        return x, (state, x if self.keep else None)

    def undone_by(self, undo: Undo) -> Undo:
        """How a layer is undone, as that is done with a step."""

        def as_of_step(name: str, of_layer: Callable[..., PyTree]) -> Any:
            def of_step(
                x: PyTree, inputs: PyTree, *saved: PyTree, **keywords: PyTree
            ) -> PyTree:
                layer, args, state = inputs
                given = (x, layer, *saved, *self._with(state, args))
                names = ["x", "layer", *["saved"] * len(saved), *["*args"] * bool(args)]
                return undoing_call(name, of_layer, names, given, keywords)

            return of_step

        inverse = as_of_step("inverse", undo.inverse)
        return Undo(inverse, undo.save and as_of_step("save", undo.save))

    def _with(self, state: PyTree, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        return tuple(state if i == self.state_at else a for i, a in enumerate(args))


def state_at(args: tuple[PyTree, ...]) -> int | None:
    """Which of the arguments of a layer is its state."""
    at = [i for i, arg in enumerate(args) if isinstance(arg, eqx.nn.State)]
    if len(at) > 1:
        raise ValueError(
            f"{NAME}: there can be one state among the arguments, but there are "
            f"{len(at)}. The state of a model holds that of all of its parts."
        )
    return at[0] if at else None


def _call_of_a_layer(x: PyTree, inputs: PyTree, keywords: dict[str, Any]) -> Shown:
    _, args, _ = inputs
    return shown_call("layer", {"x": x}, keywords, ["*args"] if args else [])


def _names_of_a_layer(
    _: PyTree, x: PyTree, inputs: PyTree
) -> tuple[Any, list[str], list[str]]:
    layer, args, state = inputs
    first, *others = argument_names(layer, (x, *args))
    of_inputs = paths(layer, "self")
    for name, arg in zip(others, args, strict=True):
        of_inputs += paths(arg, name)
    return layer, paths(x, first), [*of_inputs, *paths(state, "state")]


WORDS = Words("x", "x", "a layer", "layer", _call_of_a_layer, names=_names_of_a_layer)


def make_layer(make: Callable[..., PyTree], key: jax.Array) -> PyTree:
    owner, shown = f"{NAME}.init", {"key": key}
    try:
        if _takes(make, key=key):
            with explained(owner, "`make(key=key)`", shown):
                return make(key=key)
        if not _takes(make, key):
            is_named = "key" in parameters_of(make)
            given = ([], ["key"]) if is_named else (["key"], [])
            check_takes(owner, "make", make, given[0], keywords=given[1])
        with explained(owner, "`make(key)`", shown):
            return make(key)
    except Exception:
        if isinstance(make, eqx.Module) and not isinstance(make, eqx.Partial):
            name = type(make).__name__
            raise TypeError(
                f"{owner}: `make` must be a function that makes a layer, as "
                f"`lambda key: {name}(..., key=key)` does, but it is a {name} itself. "
                f"To stack layers that there are, use `{NAME}.from_layers`."
            ) from None
        raise


def _takes(make: Callable[..., PyTree], *args: Value, **keywords: Value) -> bool:
    try:
        inspect.signature(make).bind(*args, **keywords)
    except TypeError:
        return False
    except ValueError:  # it has no signature that Python knows
        return not keywords
    return True
