"""Policies: which intermediate values a rematerialised function keeps.

A policy is asked about each operation of the function. It answers whether the result is
kept for the backward pass, moved to another memory, or computed again. These policies
do what their counterparts in `jax.checkpoint_policies` do. But they are also values:
hashable, readable when printed, and equal if they were made in the same way. So a
policy can be the setting of a module under `jax.jit` without causing a recompilation.
"""

import difflib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar, final

import equinox as eqx
import jax
import jax.extend.core as jex
from jax import ad_checkpoint, checkpoint_policies

from .._arrays import describe
from .._calls import typed
from .._types import Aval, PyTree

__all__ = [
    "Policy",
    "as_policy",
    "either",
    "name",
    "offload_names",
    "save_any_except",
    "save_dots",
    "save_dots_without_batch",
    "save_everything",
    "save_names",
    "save_nothing",
]

_Tree = TypeVar("_Tree")
_KEEP_ALL = checkpoint_policies.everything_saveable


@final
class Policy:
    """Which values to keep for the backward pass: an argument to [`eqloop.Remat`][].

    Made by the functions of `eqloop.policies`, not directly. A policy can be passed to
    `jax.checkpoint(..., policy=...)` as well. It is hashable, and equal to one that is
    made in the same way.

    Examples:
        >>> import eqloop as el
        >>> el.policies.save_names("a") == el.policies.save_names("a")
        True
    """

    def __init__(
        self, rule: Callable[..., PyTree], text: str, *identity: Hashable
    ) -> None:
        self._rule = rule
        self._text = text
        self._identity = identity or (text,)

    def __call__(self, prim: jex.Primitive, /, *avals: Aval, **params: Any) -> Any:
        """What `jax.checkpoint` asks: the fate of one operation's result.

        Args:
            prim: The operation, a primitive of JAX.
            *avals: The types of its operands.
            **params: Its parameters.

        Returns:
            Whether the result is kept, computed again or moved, in JAX's terms.
        """
        return self._rule(prim, *avals, **params)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"el.policies.{self._text}"


save_nothing = Policy(checkpoint_policies.nothing_saveable, "save_nothing")
"""Everything is computed again. For [`eqloop.Remat`][], the same as no policy.

Without a policy, a loop stores all residuals of a step that its schedule stores.
"""

save_everything = Policy(_KEEP_ALL, "save_everything")
"""Nothing is computed again, as if the function were not rematerialised.

With JAX's flag `jax_remat3`, `jax.checkpoint` takes it for a policy of names and dots:
give it JAX's own `everything_saveable` instead.
"""

save_dots = Policy(checkpoint_policies.dots_saveable, "save_dots")
"""Keeps the results of matrix products and convolutions."""

save_dots_without_batch = Policy(
    checkpoint_policies.dots_with_no_batch_dims_saveable, "save_dots_without_batch"
)
"""Keeps the results of those matrix products that have no batch dimension.

In a neural network these are the products with the weights: few and expensive, unlike
those of, say, attention scores.
"""


@typed
def save_names(*names: str) -> Policy:
    """Keeps the values that were tagged with one of these names by [`eqloop.name`][].

    Args:
        *names: One name or more.

    Returns:
        The policy.

    Raises:
        TypeError: A name is not a string.
        ValueError: There are no names.

    Examples:
        >>> import eqloop as el
        >>> el.policies.save_names("hidden", "gate")
        el.policies.save_names('gate', 'hidden')
    """
    names = _at_least_one("save_names", names)
    rule = checkpoint_policies.save_only_these_names(*names)
    return Policy(rule, _written("save_names", names))


@typed
def save_any_except(*names: str) -> Policy:
    """Keeps every value that was tagged by [`eqloop.name`][], except by these names.

    Values without a name are recomputed. (If they were kept, no value could be
    excepted: just before it is tagged, a value has no name.)

    Args:
        *names: The names. Without any, all tagged values are kept.

    Returns:
        The policy.

    Raises:
        TypeError: A name is not a string.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.Remat(policy=el.policies.save_any_except("large"))
        ... def f(x):
        ...     small = el.name(jnp.sin(x), "small")
        ...     large = el.name(jnp.outer(small, small), "large")
        ...     return jnp.sum(jnp.cos(large))
        >>> f(jnp.zeros(2))
        Array(4., dtype=float32)
    """
    names = _checked("save_any_except", names)
    rule = checkpoint_policies.save_any_names_but_these(*names)
    return Policy(rule, _written("save_any_except", names))


@typed
def offload_names(*names: str, src: str = "device", dst: str = "pinned_host") -> Policy:
    """Moves the values tagged with one of these names to another memory, and back.

    Other values are recomputed.

    Args:
        *names: One name or more.
        src: The kind of memory that the values are in.
        dst: The kind of memory that they are kept in until the backward pass.

    Returns:
        The policy.

    Raises:
        TypeError: A name is not a string.
        ValueError: There are no names.

    Examples:
        >>> import eqloop as el
        >>> el.policies.offload_names("hidden")
        el.policies.offload_names('hidden')
    """
    names = _at_least_one("offload_names", names)
    rule = checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=names,
        offload_src=src,
        offload_dst=dst,
    )
    usual = {"src": "device", "dst": "pinned_host"}
    settings = {"src": src, "dst": dst}
    unusual = {k: v for k, v in settings.items() if v != usual[k]}
    return Policy(rule, _written("offload_names", names, **unusual))


@typed
def either(
    first: "Policy | Callable[..., Any] | str",
    second: "Policy | Callable[..., Any] | str",
) -> Policy:
    """Keeps what one of two policies keeps, or both.

    A value that one of them keeps and the other moves to another memory is kept.

    Args:
        first: A policy: one of `eqloop.policies`, one of `jax.checkpoint_policies`, or
            the name of one.
        second: Another.

    Returns:
        The policy.

    Raises:
        TypeError: One of them is not a policy.
        ValueError: One of them is not the name of a policy.

    Examples:
        >>> import eqloop as el
        >>> el.policies.either(el.policies.save_dots, el.policies.save_names("gate"))
        el.policies.either(el.policies.save_dots, el.policies.save_names('gate'))
    """
    a, b = _required("first", first), _required("second", second)

    def rule(prim: Any, *avals: Sequence[Aval], **params: Any) -> Any:
        answers = [_answer(policy(prim, *avals, **params)) for policy in (a, b)]
        if ad_checkpoint.Saveable in answers:
            return ad_checkpoint.Saveable
        moved = (x for x in answers if isinstance(x, ad_checkpoint.Offloadable))
        return next(moved, ad_checkpoint.Recompute)

    return Policy(rule, f"either({a!r}, {b!r})", "either", a, b)


@typed
def name(x: _Tree, name: str) -> _Tree:
    """Tags the arrays of a PyTree, for a policy to refer to them.

    Args:
        x: Any PyTree. Its leaves that are not arrays are left as they are.
        name: The name.

    Returns:
        `x`, unchanged.

    Raises:
        TypeError: The name is not a string.

    Examples:
        >>> import eqloop as el, jax.numpy as jnp
        >>> @el.Remat(policy=el.policies.save_names("hidden"))
        ... def f(x):
        ...     hidden = el.name(jnp.sin(x), "hidden")
        ...     return jnp.cos(hidden)
        >>> f(0.0)
        Array(1., dtype=float32, weak_type=True)
    """
    _checked("name", (name,))
    tag = lambda leaf: (
        ad_checkpoint.checkpoint_name(leaf, name) if eqx.is_array(leaf) else leaf
    )
    return jax.tree.map(tag, x)


@typed
def as_policy(
    policy: "Policy | Callable[..., Any] | str | None",
) -> "Policy | Callable[..., Any] | None":
    """Converts a policy that is given in any form to `None` or a callable.

    Args:
        policy: `None`, one of `eqloop.policies`, one of `jax.checkpoint_policies`, a
            function like theirs, or the name of one of those that take no arguments.

    Returns:
        `None`, or a callable that can be given to `jax.checkpoint` as its policy.

    Raises:
        TypeError: It is none of these.
        ValueError: It is not the name of a policy, or a function that makes policies,
            such as `save_names`, without having been called.

    Examples:
        >>> import eqloop as el
        >>> el.policies.as_policy("dots_saveable")
        el.policies.save_dots
    """
    return _policy_of("as_policy", policy)


def as_policy_or_wrong(
    policy: "Policy | Callable[..., Any] | str | None",
) -> "Policy | Callable[..., Any] | None":
    """As `as_policy`, and whatever is wrong as it is: the converter of a field.

    A converter does not know whose field it is. What is wrong is found later, by
    `as_jax_policy`.
    """
    given: Any = policy
    try:
        return _policy_of("policy", given)
    except (TypeError, ValueError):
        return given


def _policy_of(owner: str, policy: Any) -> "Policy | Callable[..., Any] | None":
    if policy is None or isinstance(policy, Policy):
        return policy
    if (maker := _maker(policy)) is not None:
        raise ValueError(_not_called(owner, maker))
    if isinstance(policy, str):
        return _from_name(owner, policy)
    if not callable(policy):
        raise TypeError(
            f"{owner}: `policy` must be one of `eqloop.policies`, one of "
            f"`jax.checkpoint_policies`, or the name of one, not {describe(policy)} of "
            f"type {type(policy).__name__}. {_the_names()}"
        )
    return policy


def as_jax_policy(
    owner: str, policy: "Policy | Callable[..., Any] | str | None"
) -> Callable[..., Any] | None:
    """A policy in any form, as `jax.checkpoint` is to be given it.

    With its flag `jax_remat3`, JAX asks a policy about named values and dots alone. It
    keeps all others only for the one policy that it knows to keep everything.
    """
    policy = _policy_of(owner, policy)
    return _KEEP_ALL if _keeps_everything(policy) else policy


def _keeps_everything(policy: Any) -> bool:
    if not isinstance(policy, Policy):
        return policy is _KEEP_ALL
    kind, *parts = policy._identity
    of_either = kind == "either" and any(map(_keeps_everything, parts))
    return policy == save_everything or of_either


AUTO: Final = "auto"

_VALUES: dict[str, Policy] = {
    "save_nothing": save_nothing,
    "save_everything": save_everything,
    "save_dots": save_dots,
    "save_dots_without_batch": save_dots_without_batch,
    "nothing_saveable": save_nothing,
    "everything_saveable": save_everything,
    "dots_saveable": save_dots,
    "checkpoint_dots": save_dots,
    "dots_with_no_batch_dims_saveable": save_dots_without_batch,
    "checkpoint_dots_with_no_batch_dims": save_dots_without_batch,
}

# Functions that make policies: ours by name, and JAX's with our counterpart.
_MAKERS: dict[str, Callable[..., Any]] = {
    call.__name__: call for call in (save_names, save_any_except, offload_names, either)
}
_JAX_MAKERS = {
    "save_only_these_names": "save_names",
    "save_any_names_but_these": "save_any_except",
    "save_anything_except_these_names": "save_any_except",
    "save_and_offload_only_these_names": "offload_names",
    "offload_dot_with_no_batch_dims": "offload_names",
    "save_from_both_policies": "either",
}


def _maker(policy: Any) -> str | None:
    """The name of the function that makes policies, if one was given without a call."""
    of_jax = {text: getattr(checkpoint_policies, text, text) for text in _JAX_MAKERS}
    every = (_MAKERS | of_jax).items()
    return next((text for text, call in every if policy in (text, call)), None)


def _from_name(owner: str, text: str) -> Policy:
    if text in _VALUES:
        return _VALUES[text]
    if text == AUTO:
        raise ValueError(
            f"{owner}: `policy='auto'` is for scans and `StackedLayers`, whose "
            f"`schedule` is a `Budget`, which then chooses the policy as well. Here, "
            f"give one of `eqloop.policies`."
        )
    near = difflib.get_close_matches(text, [*_VALUES, *_MAKERS, AUTO], n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"{owner}: there is no policy named {text!r}. {hint}{_the_names()}"
    )


def _the_names() -> str:
    names = ", ".join(repr(text) for text in _VALUES)
    makers = ", ".join(f"`{call}`" for call in _MAKERS)
    return f"The names are {names}; see {makers} in `eqloop.policies` for others."


def _not_called(owner: str, maker: str) -> str:
    call = _JAX_MAKERS.get(maker, maker)
    arguments = "first, second" if call == "either" else "'a', 'b'"
    return (
        f"{owner}: `{maker}` is not a policy, but makes one from its arguments. Call "
        f"it, or `eqloop.policies.{call}({arguments})`."
    )


def _required(name: str, policy: Any) -> "Policy | Callable[..., Any]":
    found = _policy_of(f"either, `{name}`", policy)
    if found is None:
        raise TypeError(f"either: `{name}` must be a policy, but it is None.")
    return found


def _checked(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each once and sorted, as their order makes no difference."""
    for each in names:
        if not isinstance(each, str):
            raise TypeError(f"`{where}` takes names, which are strings, not {each!r}.")
    return tuple(sorted(set(names)))


def _at_least_one(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError(
            f"`{where}` needs at least one name. (To keep nothing at all there is "
            f"`eqloop.policies.save_nothing`.)"
        )
    return _checked(where, names)


def _written(call: str, names: tuple[str, ...], **settings: str) -> str:
    arguments = [*map(repr, names), *(f"{k}={v!r}" for k, v in settings.items())]
    return f"{call}({', '.join(arguments)})"


def _answer(answer: PyTree) -> Any:
    if isinstance(answer, bool):
        return ad_checkpoint.Saveable if answer else ad_checkpoint.Recompute
    return answer
