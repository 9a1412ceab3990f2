"""`Vmap`: `jax.vmap` as a PyTree around its function."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, SupportsIndex, final

import equinox as eqx
import jax

from .._arrays import AlongAxes, hashable_axes, pick
from .._calls import NewP, NewR, P, R, as_count, setting, value_in_words
from .._types import PyTree, Value
from ._abstract_map import AbstractAxesMap
from ._open_map import VARYING, OpenedRow, open_arguments, open_row


def _as_axis_size(size: SupportsIndex | None) -> int | None:
    if size is None:
        return None
    return as_count("Vmap", "axis_size", "the number of rows", size, least=0)


def _as_axis_name(name: Hashable) -> Hashable:
    try:
        hash(name)
    except TypeError:
        raise TypeError(
            f"Vmap: `axis_name` must be hashable, such as a string, not "
            f"{value_in_words(name)}."
        ) from None
    return name


@final
class Vmap(AbstractAxesMap[P, R]):
    """Vectorises a function over rows, all at once.

    Like `equinox.filter_vmap`: arguments and results can have leaves of any kind.
    Modules can be made inside, so `Vmap(make)(keys)` is an ensemble. Call it like `f`,
    with stacked arguments; keyword arguments are mapped as well. A single PRNG key that
    is passed as `key=` is split, one for each row.

    Args:
        axis_name: The name of the rows for `jax.lax.psum` and the other collectives.
        axis_size: How many rows there are; needed only if no argument is mapped.

    Raises:
        TypeError: `axis_size` is not an int; when called, an axis is not an axis, or a
            jaxtyping annotation of `f` is violated.
        ValueError: `axis_size` is negative; when called, the lengths of the mapped axes
            disagree, there is nothing to map, an axis is out of range, or a result for
            which `out_axes` is `None` differs from row to row.

    Examples:
        >>> import eqloop as el, equinox as eqx, jax, jax.numpy as jnp
        >>> make = lambda key: eqx.nn.Linear(2, 3, key=key)
        >>> ensemble = el.Vmap(make)(jax.random.split(jax.random.key(0), 10))
        >>> ensemble.weight.shape
        (10, 3, 2)
        >>> evaluate = el.Vmap(lambda model, x: model(x), in_axes={"x": None})
        >>> evaluate(ensemble, jnp.ones(2)).shape
        (10, 3)

    References:
        [`equinox.filter_vmap`](https://docs.kidger.site/equinox/api/transformations/#equinox.filter_vmap).
    """

    f: Callable[P, R]
    in_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    out_axes: PyTree = setting(default=eqx.if_array(0), converter=hashable_axes)
    axis_name: Hashable = setting(default=None, converter=_as_axis_name)
    axis_size: int | None = setting(default=None, converter=_as_axis_size)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Vmap[NewP, NewR]": ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f` for every row of its arguments.

        Args:
            *args: The arguments of `f`, with their rows along the axes of `in_axes`.
            **kwargs: Those that are given by keyword: along axis 0, unless `in_axes`
                names them.

        Returns:
            What `f` returns, with its arrays stacked along the axes of `out_axes`.

        Raises:
            TypeError: If an axis is neither an int nor `None`, or a jaxtyping
                annotation of `f` is violated.
            ValueError: If nothing is mapped, or if axes do not fit or differ in length.
        """
        arguments = open_arguments(
            "Vmap", self.f, args, kwargs, in_axes=self.in_axes, size=self.axis_size
        )
        row = open_row("Vmap", self.f, arguments.rest, self.out_axes)

        def apart(x: list[Value]) -> tuple[list[Value], list[Value]]:
            arrays = row.on_arrays(x)
            same = row.kept[0].same
            return pick(arrays, [not is_same for is_same in same]), pick(arrays, same)

        try:
            stacked, same = self._mapped(apart, arguments)
        except ValueError:
            # JAX names results by the places that they have here.
            self._check_same(row, arguments)
            raise
        outputs, _ = row.kept
        return outputs.join_stacked(stacked, same)

    def _mapped(self, f: Callable[..., PyTree], arguments: AlongAxes) -> PyTree:
        return jax.vmap(
            f,
            in_axes=(list(arguments.axes),),
            out_axes=(0, None),
            axis_name=self.axis_name,
            axis_size=arguments.length,
        )(arguments.arrays)

    def _check_same(self, row: OpenedRow, arguments: AlongAxes) -> None:
        """Raises if there are results that differ and that must not: says which."""
        if not row.has_kept:
            return
        outputs, _ = row.kept
        varying = [
            same and self._differs(row, arguments, index)
            for index, same in enumerate(outputs.same)
        ]
        outputs.check_same("Vmap", varying, VARYING)

    def _differs(self, row: OpenedRow, arguments: AlongAxes, index: int) -> bool:
        """Whether a result is not the same for every row, which JAX objects to."""
        only = lambda x: ([], row.on_arrays(x)[index])
        try:
            jax.eval_shape(lambda: self._mapped(only, arguments))
        except ValueError:
            return True
        return False
