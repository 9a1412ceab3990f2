"""`Named`: a function whose operations carry a name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, final

import equinox as eqx
import jax

from .._calls import (
    AbstractSameCall,
    AbstractTransform,
    NewP,
    NewR,
    P,
    R,
    enforce_annotations,
)
from .._types import PyTree


@final
class Named(AbstractSameCall[P, R]):
    """Runs a function under a name, like `jax.named_scope`.

    Profiles, compiled programs and drawings show the name before those of the
    function's operations. The program itself is the same.

    Args:
        f: The function.
        name: The name.

    Raises:
        TypeError: If `name` is not a string.
        ValueError: If it is empty.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> @el.Named(name="encoder")
        ... def encode(x):
        ...     return jnp.sin(x)
        >>> text = jax.jit(encode).lower(1.0).as_text(debug_info=True)
        >>> "encoder" in text
        True

    References:
        [`jax.named_scope`](https://docs.jax.dev/en/latest/_autosummary/jax.named_scope.html).
    """

    f: Callable[P, R]
    name: str = eqx.field(static=True)

    if TYPE_CHECKING:

        @staticmethod
        def _of(f: Callable[NewP, NewR], /) -> "Named[NewP, NewR]": ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `f(*args, **kwargs)` within the name.

        Args:
            *args: The arguments of `f`.
            **kwargs: Its keyword arguments.

        Returns:
            What `f` returns.

        Raises:
            TypeError: If a jaxtyping annotation of `f` is violated.
        """
        with jax.named_scope(self.name):
            return enforce_annotations(self.f)(*args, **kwargs)

    def __check_init__(self) -> None:
        check_name("Named", self.name)


def check_name(owner: str, name: object) -> None:
    """Raises unless this can be a name in a program."""
    if not isinstance(name, str):
        raise TypeError(f"{owner}: `name` must be a string, not {name!r}.")
    if not name:
        raise ValueError(f"{owner}: `name` is empty; give it at least one character.")


def name_of(f: Callable[..., PyTree]) -> str:
    """The name of a function; for a transform, that of its class and of its function.

    >>> import eqloop as el
    >>> name_of(el.Remat(abs))
    'Remat_abs'
    """
    if isinstance(f, AbstractTransform):
        return f"{type(f).__name__}_{name_of(f.f)}"
    inner = getattr(f, "func", None)  # of a partial
    if callable(inner):
        return name_of(inner)
    return getattr(f, "__name__", type(f).__name__)
