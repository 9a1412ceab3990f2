"""What is refused of the arguments of a loop, and of what its step returns."""

import inspect
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import numpy as np

from .._arrays import axes_of_keys, describe, listing
from .._calls import parameters_of
from .._types import PyTree, Value


def refuse_iterators(owner: str, xs: PyTree) -> None:
    """Checks that no leaf of `xs` is a generator or another iterator."""
    # It is not an array, so each step would be given all of it, and the first one that
    # is traced would use it up.
    if found := listing(xs, "xs", lambda leaf: isinstance(leaf, Iterator), repr):
        raise TypeError(
            f"{owner}: `xs` must be arrays, along which the loop goes, and not an "
            f"iterator:\n{found}\nStack its items first: "
            f"`jnp.stack(list(iterator))`. If they do not fit into memory, "
            f"`el.Resumable` takes a function in their place, `(start, stop) -> xs`."
        )


def check_wants_key(
    owner: str,
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    keywords: PyTree,
    word: str = "f",
) -> None:
    """Checks that a step is given a key if it wants one, and only then."""
    parameters = parameters_of(f)
    if "key" in keywords:
        kinds = [p.kind for p in parameters.values()]
        if parameters and "key" not in parameters and _ANY_NAME not in kinds:
            names = ", ".join(parameters)
            raise TypeError(
                f"{owner}: the call was given a `key`, which each step gets by that "
                f"name, but {word} has no parameter `key`: it takes ({names}). Add "
                f"one, or leave out `key`."
            )
        return
    wanted = parameters.get("key")
    is_given = wanted is not None and list(parameters).index("key") < len(args)
    if wanted is not None and not is_given and wanted.default is wanted.empty:
        raise TypeError(
            f"{owner}: {word} wants a `key`, but the call was given none. Pass one, "
            f"`key=jax.random.key(0)`, and each step gets a key of its own."
        )


_ANY_NAME = inspect.Parameter.VAR_KEYWORD


def is_truth(tree: PyTree) -> bool:
    """Whether it is one boolean."""
    if isinstance(tree, jax.Array | np.ndarray):
        return not tree.shape and tree.dtype == bool
    return isinstance(tree, bool | np.bool_)


def pair_of(owner: str, out: PyTree) -> tuple[PyTree, PyTree]:
    """The pair that a step returns."""
    if not isinstance(out, tuple | list) or len(out) != 2:
        what = eqx.tree_pformat(out)
        hint = "If there is nothing to stack, return `(carry, None)`."
        if isinstance(out, tuple | list):
            what = f"a {type(out).__name__} of {len(out)}, {what}"
            if len(out) > 2:
                hint = "To stack several things, return `(carry, (a, b))`."
        elif is_truth(out):
            hint = "A condition comes first: `el.ScanWhile(cond, f, max_steps=...)`."
        raise TypeError(
            f"{owner}: f must return a pair `(carry, y)`, but it returned {what}. "
            f"{hint}"
        )
    return out[0], out[1]


def check_one_key(owner: str, key: Value) -> None:
    """Checks that a `key=` that a user passed is one key."""
    if (axes := axes_of_keys(key)) is None:
        raise TypeError(
            f"{owner}: `key` must be a PRNG key, as `jax.random.key(0)` makes it, not "
            f"{describe(key)}."
        )
    if axes:
        raise ValueError(
            f"{owner}: `key` must be one key, which is split for the steps, but it is "
            f"{describe(key)}. To give each step a key of your own, pass the keys in "
            f"`xs`."
        )
