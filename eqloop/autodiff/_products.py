"""`Vjp` and `Jvp`: products with the Jacobian, which is never formed."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, final

import equinox as eqx
import jax.numpy as jnp

from .._arrays import (
    describe,
    flatten,
    is_inexact_scalar,
    paths,
    structure_differences,
)
from .._calls import (
    AbstractSameCall,
    AbstractTransform,
    NewP,
    NewR,
    P,
    R,
    check_bool,
    enforce_annotations,
    setting,
    typed,
)
from .._types import PyTree, Value
from ._call import is_differentiable


@final
class Vjp(AbstractSameCall[P, PyTree]):
    """A function's value, and its pullback, like `equinox.filter_vjp`.

    Args:
        f: The function. Its arguments and its value may be any PyTrees.
        has_aux: Whether `f` returns a pair of its value, and anything else.

    Returns:
        When called, `(value, pull)`, or `(value, pull, aux)` with `has_aux`. `pull`
        takes a tree like the value, with a cotangent for each floating-point or complex
        array and `None` for all other leaves. It returns a tuple with such a tree for
        each positional argument. Arguments given by keyword are not differentiated.

    Raises:
        TypeError: If `has_aux` is not a bool.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> value, pull = el.Vjp(lambda w, x, name: w @ x)(jnp.eye(2), jnp.ones(2), "w")
        >>> pull(jnp.array([1.0, 0.0]))[1:]
        (Array([1., 0.], dtype=float32), None)

    References:
        [`equinox.filter_vjp`](https://docs.kidger.site/equinox/api/transformations/).
    """

    f: Callable[P, PyTree]
    has_aux: bool = setting(default=False)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, PyTree], /) -> "Vjp[NewP]": ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> PyTree:
        """Runs `f(*args, **kwargs)`, and keeps what `pull` needs.

        Args:
            *args: The arguments of `f`, by which it is differentiated.
            **kwargs: Passed on, and not differentiated.

        Returns:
            The value and `pull`, and what `has_aux` asks for.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
        """
        f = functools.partial(enforce_annotations(self.f), **kwargs)
        return eqx.filter_vjp(f, *args, has_aux=self.has_aux)

    def __check_init__(self) -> None:
        check_bool("Vjp", "has_aux", self.has_aux)


@final
class Jvp(AbstractTransform, Generic[R]):
    """The value of a function and its tangent, like `equinox.filter_jvp`.

    Args:
        f: The function. Its arguments and its value may be any PyTrees.

    Returns:
        When called, `(value, tangent)`. The tangent is a tree like the value, with
        `None` for leaves that have no tangent.

    Raises:
        TypeError: When called, if a tangent has another shape or dtype than its array.
        ValueError: When called, if the tangents are another tree than the primals.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> f = lambda tree: tree["gain"] * jnp.sin(tree["x"])
        >>> tree = {"gain": 2.0, "x": jnp.zeros(2)}
        >>> el.Jvp(f)((tree,), ({"gain": None, "x": jnp.ones(2)},))
        (Array([0., 0.], dtype=float32), Array([2., 2.], dtype=float32))

    References:
        [`equinox.filter_jvp`](https://docs.kidger.site/equinox/api/transformations/).
    """

    f: Callable[..., R]

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[..., NewR], /) -> "Jvp[NewR]": ...

    @typed
    def __call__(
        self, primals: Sequence[PyTree], tangents: Sequence[PyTree], **kwargs: PyTree
    ) -> tuple[R, PyTree]:
        """Differentiates `f(*primals, **kwargs)` in the direction of the tangents.

        Args:
            primals: The positional arguments.
            tangents: The same trees, with the tangents of arrays and numbers, and
                `None` for all leaves that do not change.
            **kwargs: Passed on, and not differentiated.

        Returns:
            The value, and its tangent.

        Raises:
            TypeError: If a tangent has another shape or dtype than its array.
            ValueError: If the tangents are another tree than the primals.
        """
        primals, tangents = tuple(primals), tuple(tangents)
        _check_tangents(primals, tangents)
        f = functools.partial(enforce_annotations(self.f), **kwargs)
        return eqx.filter_jvp(f, primals, tangents)


def _check_tangents(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> None:
    # JAX checks this as well, and does not say which of them do not fit.
    leaves, treedef = flatten(primals)
    tangent_leaves, tangent_treedef = flatten(tangents)
    if treedef != tangent_treedef:
        listing = "\n".join(
            f"  at primals{d.path}: {d.one or 'nothing'}, and in the tangents "
            f"{d.other or 'nothing'}"
            for d in structure_differences(primals, tangents, "")
        )
        raise ValueError(
            f"Jvp: primals and tangents must be the same trees:\n{listing}\nGive None "
            f"for each leaf without a tangent."
        )
    names = paths(primals, "primals")
    for name, leaf, tangent in zip(names, leaves, tangent_leaves, strict=True):
        if tangent is not None and not _fits(leaf, tangent):
            raise TypeError(
                f"Jvp: the tangent of {name}, which is {describe(leaf)}, cannot be "
                f"{describe(tangent)}. A tangent has the shape and dtype of its "
                f"primal, or is None."
            )


def _fits(leaf: Value, tangent: Value) -> bool:
    if is_inexact_scalar(leaf):
        leaf = jnp.asarray(leaf)
        tangent = jnp.asarray(tangent, leaf.dtype)
    return is_differentiable(leaf) and (
        jnp.shape(tangent) == leaf.shape and jnp.result_type(tangent) == leaf.dtype
    )
