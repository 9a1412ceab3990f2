"""`StackedLayers`: a deep model of equal layers, traced and compiled as one layer."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, SupportsIndex, TypeVar, final, overload

import equinox as eqx
import jax

from .._arrays import as_arrays, describe
from .._calls import as_count, as_int_if_index, compiled_when, setting, typed
from .._device import DeviceLike
from .._types import PRNGKey, PyTree, ShapeDtypeStruct
from ..checkpointing import AbstractSchedule, Plan, as_policy_or_wrong
from ._layer_step import NAME, WORDS, LayerStep, make_layer, state_at
from ._loop import AbstractPlanned, check_schedule, check_unroll, checks_no_values
from ._open_loop import LoopOpener
from ._opened_loop import OpenedLoop
from ._stack import (
    Depth,
    Layer,
    has_arrays,
    layers_at,
    num_layers,
    stack,
    state_of,
    with_array_state,
)

_NewLayer = TypeVar("_NewLayer")


@final
class StackedLayers(AbstractPlanned, Generic[Layer]):
    """Layers that differ only in their parameters, applied one after the other.

    The layers are stored as one layer whose arrays have a leading axis, with an entry
    for each layer. So a model of any depth is traced and compiled as a single layer,
    and a schedule can bound the memory of its gradient. A call gives the result of
    calling the layers in turn.

    Make it with `StackedLayers.init` or `StackedLayers.from_layers`. It is a module
    like any other, and its gradient is a `StackedLayers` with the gradients of all
    layers. Like a list, it has a length, and you can index, slice and iterate over it.
    Slices keep the settings. [`equinox.tree_at`][] edits single layers, too:
    `eqx.tree_at(lambda stack: stack[3].bias, stack, bias)`.

    **State.** If an argument of the call is an [`equinox.nn.State`][], then each layer
    gets its own part of it there, and returns `(x, state)`, and the call returns such a
    pair, too. All layers have one `StateIndex`, for values with a leading axis of
    layers, so [`equinox.nn.make_with_state`][] makes the state of a model that has
    stacked layers as it makes that of any other.

    Args:
        layers: A layer, `layer(x, *args) -> x`, each array of which has a leading axis.
        schedule: How to trade memory for recomputation in reverse mode. By default all
            residuals of all layers are stored.
        policy: Which residuals of a layer are stored when it is recomputed; `"auto"` to
            have a [`Budget`][eqloop.Budget] choose that as well.
        unroll: How many layers an iteration of the compiled loop runs; `True` for all.

    Raises:
        TypeError: If `layers` is not callable, or a setting is not of its type.
        ValueError: If the leading axes differ or are missing, if there are no arrays,
            if `unroll` is less than 1, if `policy` is not the name of a policy, or if
            it is `"auto"` and `schedule` is no `Budget`.

    Examples:
        >>> import equinox as eqx, jax, jax.numpy as jnp
        >>> import eqloop as el
        >>> def make(*, key):
        ...     return eqx.nn.Linear(8, 8, key=key)
        >>> layers = el.StackedLayers.init(make, 24, key=jax.random.key(0))
        >>> layers(jnp.ones(8)).shape, len(layers), layers[-1].weight.shape
        ((8,), 24, (8, 8))

        Gradients, with a policy for what is stored:

        >>> layers = el.StackedLayers(
        ...     layers.layers, schedule=el.Chunked(6), policy=el.policies.save_dots
        ... )
        >>> grads = eqx.filter_grad(lambda f, x: jnp.sum(f(x)))(layers, jnp.ones(8))
        >>> grads.layers.bias.shape
        (24, 8)

    References:
        [Scan over layers](https://docs.kidger.site/equinox/tricks/#improve-compilation-speed-with-scan-over-layers)
        in Equinox's tricks.
    """

    _made_otherwise: ClassVar[str] = (
        " `el.StackedLayers.init(make, depth, key=key)` makes the layers, and "
        "`el.StackedLayers.from_layers` stacks those that there are."
    )

    layers: Layer
    schedule: AbstractSchedule | None = eqx.field(
        default=None, static=True, kw_only=True
    )
    # Not static, so that `eqx.tree_at` reaches it.
    policy: Any = eqx.field(default=None, converter=as_policy_or_wrong, kw_only=True)
    unroll: int | bool = setting(default=1, converter=as_int_if_index)
    # Where no leaf is an array, as in a filter of the layers, nothing else knows it.
    _depth: Depth = eqx.field(static=True, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.layers):
            raise TypeError(
                f"{NAME}: `layers` must be one layer, each array of which has an "
                f"entry for each layer, but it is {describe(self.layers)}. To stack a "
                f"list of layers, use `{NAME}.from_layers`."
            )
        self._depth = Depth(num_layers(NAME, self.layers))

    def __check_init__(self) -> None:
        check_schedule(NAME, self.schedule)
        check_unroll(NAME, self.unroll)
        self._how()

    @classmethod
    @typed
    def init(
        cls,
        make: Callable[..., _NewLayer],
        depth: SupportsIndex,
        *,
        key: PRNGKey,
        **settings: Any,
    ) -> "StackedLayers[_NewLayer]":
        """Makes layers, each from its own key.

        Args:
            make: Makes one layer: `make(key=key)`, or `make(key)` if it has no
                parameter of that name. It is called once, under `vmap`.
            depth: How many layers.
            key: A PRNG key, which is split for them.
            **settings: Settings of the module: `schedule`, `policy` and `unroll`.

        Returns:
            The layers, stacked.

        Raises:
            TypeError: If `depth` is not an int.
            ValueError: If `depth` is negative, or if the layers hold no arrays.
        """
        what = "the number of layers"
        depth = as_count(f"{NAME}.init", "depth", what, depth, least=0)
        keys = jax.random.split(key, depth)
        make_one = lambda key: as_arrays(with_array_state(make_layer(make, key)))
        return StackedLayers(eqx.filter_vmap(make_one)(keys), **settings)

    @classmethod
    def from_layers(
        cls, layers: Sequence[_NewLayer], **settings: Any
    ) -> "StackedLayers[_NewLayer]":
        """Stacks existing layers.

        Args:
            layers: The layers. They must be alike in all but the values of their
                arrays.
            **settings: Settings of the module: `schedule`, `policy` and `unroll`. They
                are those of a stack and not of its layers, so if the layers come from
                another stack, pass its settings on: `schedule=stack.schedule`.

        Returns:
            The layers, stacked; `unstack` gives them back.

        Raises:
            TypeError: If `layers` is not a sequence, or if they differ in structure, in
                a shape or in a dtype: the error names the layer and the leaf.
            ValueError: If there are none, or if they differ in a leaf that is not an
                array.
        """
        if not isinstance(layers, list | tuple):
            raise TypeError(
                f"{NAME}.from_layers: `layers` must be a list or tuple of layers, not "
                f"{describe(layers)}."
            )
        if not layers:
            raise ValueError(f"{NAME}.from_layers: there is no layer to stack.")
        are_stacks = all(isinstance(layer, StackedLayers) for layer in layers)
        instead = "\nThese are stacks. For one of all their layers: `[*a, *b]`."
        stacked = stack(f"{NAME}.from_layers", layers, instead if are_stacks else "")
        return StackedLayers(stacked, **settings)

    def unstack(self) -> list[Layer]:
        """The layers, one by one.

        Returns:
            A list of modules that share nothing with the stack. They know nothing of
            its `schedule`, `policy` and `unroll`.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import eqloop as el
            >>> scale = jax.tree_util.Partial(lambda a, x: a * x, jnp.array([2.0, 3.0]))
            >>> [float(layer(1.0)) for layer in el.StackedLayers(scale).unstack()]
            [2.0, 3.0]
        """
        return [self[i] for i in range(len(self))]

    def __len__(self) -> int:
        if has_arrays(self.layers):
            return num_layers(NAME, self.layers)
        return self._depth.number

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.unstack())

    @overload
    def __getitem__(self, index: SupportsIndex) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> PyTree:
        """One of the layers, or a stack of some.

        Args:
            index: As for a list: an int, from the last if it is negative, or a slice.

        Returns:
            For an int a layer, for a slice a `StackedLayers`.

        Raises:
            TypeError: If it is neither, or if no leaf of the stack is an array, as in a
                filter, whose leaves stand for all layers.
            IndexError: If there is no such layer.
        """
        if not isinstance(index, slice):
            index = self._number_of(index)
        if not has_arrays(self.layers):
            half = len(self) // 2
            raise TypeError(
                f"{NAME}: none of the {len(self)} layers has leaves of its own here, "
                f"as no leaf is an array, and each stands for all layers. To treat "
                f"some of them in another way, to freeze them say, make two stacks, "
                f"`first, last = layers[:{half}], layers[{half}:]`. To edit one by "
                f"`eqx.tree_at`, replace arrays of all: `layers.w.at[{half}].set(new)`."
            )
        layers = layers_at(self.layers, index)
        if isinstance(index, slice):
            return dataclasses.replace(self, layers=layers)
        return layers

    def _number_of(self, index: SupportsIndex) -> int:
        try:
            number = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"{NAME}: an index must be an int or a slice, not {describe(index)}."
            ) from error
        depth = len(self)
        if not -depth <= number < depth:
            raise IndexError(
                f"{NAME}: there is no layer {number}, as there are {depth} layers, "
                f"counted from 0."
            )
        return number

    @compiled_when(checks_no_values)
    @typed
    def __call__(self, x: PyTree, *args: PyTree, key: PRNGKey | None = None) -> PyTree:
        """Applies the layers.

        Args:
            x: What passes through them. They must keep its shapes, its dtypes and its
                structure, and those of its leaves that are not arrays.
            *args: Further arguments, the same for each layer; except for a state, of
                which each layer gets its own part.
            key: A PRNG key. If it is given it is split, and each layer is called as
                `layer(x, *args, key=...)`.

        Returns:
            The output of the last layer; with a state, the pair `(output, state)`.

        Raises:
            TypeError: If a layer changes the type of `x`, or if a jaxtyping annotation
                of the layer is violated.
            ValueError: If a leaf of `x` that is not an array changes, or if the state
                is not that of these layers.
        """
        return self._run(False, x, args, key)[0]

    @compiled_when(checks_no_values)
    @typed
    def scan(
        self, x: PyTree, *args: PyTree, key: PRNGKey | None = None
    ) -> tuple[PyTree, PyTree]:
        """Applies the layers, and also returns the output of each layer.

        Args:
            x: As for the call.
            *args: As for the call.
            key: As for the call.

        Returns:
            The result of the call, and the outputs of all layers, stacked along a
            leading axis.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import eqloop as el
            >>> scale = jax.tree_util.Partial(lambda a, x: a * x, jnp.array([2.0, 3.0]))
            >>> x, every_x = el.StackedLayers(scale).scan(jnp.float32(1.0))
            >>> x, every_x
            (Array(6., dtype=float32), Array([2., 6.], dtype=float32))
        """
        return self._run(True, x, args, key)

    @typed
    def plan(
        self,
        x: PyTree,
        *args: PyTree,
        key: PRNGKey | ShapeDtypeStruct | None = None,
        device: DeviceLike | None = None,
    ) -> Plan:
        """The plan of a gradient of the call, without running the loop.

        Args:
            x: As for the call; a `jax.ShapeDtypeStruct` can stand for an array.
            *args: As for the call.
            key: As for the call.
            device: What the plan is for, as for [`planning_for`][eqloop.planning_for]:
                by default, the device on which the loop would run.

        Returns:
            The plan. Printed, it is a table.

        Raises:
            TypeError: As the call does.
            ValueError: As the call does, and if the schedule cannot be met.
        """
        return self._plan(device, x, *args, key=key)

    def _run(
        self, keep: bool, x: PyTree, args: tuple[PyTree, ...], key: PRNGKey | None
    ) -> PyTree:
        opened = self._open(x, *args, keep=keep, key=key)
        x, (state, every_x) = opened.run(NAME, **self._how())
        at = state_at(args)
        return x if at is None else (x, args[at].update(state)), every_x

    def _open(
        self, x: PyTree, *args: PyTree, keep: bool = False, **kwargs: PyTree
    ) -> OpenedLoop:
        state, apply = None, LayerStep(keep, state_at(args))
        if apply.state_at is not None:
            state = state_of(NAME, self.layers, args[apply.state_at], len(self))
        args = tuple(None if i == apply.state_at else a for i, a in enumerate(args))
        undo = self._schedule().undo
        opener = LoopOpener(
            name=NAME,
            in_axes=(eqx.if_array(0), None, eqx.if_array(0)),
            out_axes=eqx.if_array(0),
            unroll=self.unroll,
            words=dataclasses.replace(WORDS, f=f"one of {len(self)} layers"),
            undo=undo and apply.undone_by(undo),
        )
        return opener.open(apply, x, (self.layers, args, state), **kwargs)
