"""What happens to the cotangent of a carry on its way back from step to step.

The function that a user gives may also return a log of the step. It comes out as the
cotangent of an argument, a row for each step, which no step reads: so it is stacked,
batched, summed over devices and computed once for each step as any other cotangent of
`xs` is, under every schedule. Where there is no such argument, it is dropped.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn, TypeAlias, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._arrays import (
    Flags,
    as_array,
    axes_of,
    describe,
    flatten,
    is_dynamic,
    is_inexact,
    is_scalar,
    is_symbolic,
    paths,
    stack_type,
    strongly_typed,
    structure_differences,
    tangent_types,
    vary,
    varying_type,
    with_batch_axis,
    zero_array,
)
from .._calls import (
    KnownAs,
    argument_names,
    array_names,
    as_count,
    check_takes,
    explained,
)
from .._classes import SettingMeta
from .._programs import Doubled, Formula
from .._types import Aval, BatchAxis, PyTree, Value


@final
@dataclasses.dataclass(frozen=True)
class Truncate(metaclass=SettingMeta):
    """Cuts the gradient every so many steps: truncated backpropagation through time.

    Steps are counted from 0, in the order of running. Before the steps `every`,
    `2 * every`, and so on, `jax.lax.stop_gradient` is applied to the carry, and so in
    forward mode its tangent is zero there. Outputs are differentiated at every step,
    back to the cut before that step.

    There is no cut before step 0: an initial carry that is learned has a gradient, by
    the first `every` steps. If it comes from an earlier part of the same sequence,
    apply `jax.lax.stop_gradient` to it yourself. With an `every` that is not less than
    the length of the loop, nothing is cut.

    Steps that no output needs are not reversed, and take no memory for it. For a scan
    without outputs, these are all steps before the last cut. For a
    [`SlicedScan`][eqloop.SlicedScan], these are the steps before the last cut that
    precedes the first output.

    Args:
        every: How many steps lie between two cuts.

    Raises:
        TypeError: If `every` is not an int.
        ValueError: If it is less than 1.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> total = lambda c, x: (c + x, None)
        >>> scan = el.Scan(total, backward=el.Truncate(3))
        >>> jax.grad(lambda xs: scan(0.0, xs)[0])(jnp.ones(8))
        Array([0., 0., 0., 0., 0., 0., 1., 1.], dtype=float32)

    References:
        R. J. Williams and J. Peng, *An efficient gradient-based algorithm for on-line
        training of recurrent network trajectories*, Neural Computation 2(4), 1990.
    """

    every: int

    def __post_init__(self) -> None:
        what = "the number of steps between two cuts"
        every = as_count("Truncate", "every", what, self.every)
        object.__setattr__(self, "every", every)


Backward: TypeAlias = Truncate | Callable[[Any], Any]


def in_words(backward: Backward | None) -> str | None:
    """What a plan says of it."""
    if isinstance(backward, Truncate):
        return f"{backward}: steps that it cuts off are not reversed, nor counted here"
    return getattr(backward, "__qualname__", repr(backward)) if backward else None


def refuse_cuts(owner: str, backward: object) -> None:
    """Checks that a loop whose steps are undone by an inverse is not truncated."""
    if isinstance(backward, Truncate):
        # An inverse of the jvp would have to recover tangents from before the cut,
        # which are zero after it.
        raise ValueError(
            f"{owner}: `backward={backward!r}` cuts the derivative of a "
            f"step, which the inverse of `Reversible` cannot undo. Use another "
            f"schedule, such as `el.Recursive(16)`."
        )


def cuts_of(
    every: int, length: Value, *, start: int = 0, reverse: bool = False
) -> Value:
    """Before which steps the carry is cut, in the order of `xs`.

    >>> cuts_of(2, 5).tolist(), cuts_of(2, 3, start=2).tolist()
    ([False, False, True, False, True], [True, False, True])
    """
    # They are a NumPy array if the length is known: a constant of the program, which
    # takes no memory while that runs.
    xp = jnp if is_symbolic(length) else np
    steps = start + xp.arange(length)
    cuts = (steps > 0) & (steps % every == 0)
    return xp.flip(cuts) if reverse else cuts


def cut_before(carry: PyTree, is_cut: PyTree) -> PyTree:
    """The carry before a step, without a derivative if there is a cut."""

    def cut(x: Value) -> Value:
        if not (is_dynamic(x) and is_inexact(x)):
            return x
        return jnp.where(is_cut, lax.stop_gradient(x), x)

    return jax.tree.map(cut, carry)


def passed_back(
    owner: str, carry: PyTree, backward: Callable[[PyTree], PyTree], log: PyTree
) -> PyTree:
    """The carry before a step, whose cotangent a function is applied to."""
    moving, rest = eqx.partition(carry, _has_cotangent)
    axes = _axes_of_all(moving)
    moving, log = jax.tree.map(lambda x: vary(x, axes), (moving, log))
    leaves, structure = jax.tree.flatten(moving)
    types = tuple(map(jax.typeof, leaves))
    moving = structure.unflatten(_Backwards(types, owner).apply(*leaves))

    @jax.custom_vjp
    def identity(moving: PyTree, log: PyTree) -> PyTree:
        return moving

    def pull(log: PyTree, cotangent: PyTree) -> tuple[PyTree, PyTree]:
        result, logged = _applied_to(owner, backward, cotangent)
        if log is not None:
            _check_log(owner, log, logged)
        return result, None if log is None else _varied_as(logged, log)

    known_as = _known_as(backward, moving, log)
    identity.defvjp(lambda moving, log: (moving, log), pull)
    # Before anything runs, and not first in a gradient.
    jax.eval_shape(known_as.name(pull), log, moving)
    return eqx.combine(identity(moving, log), rest)


class _Backwards(Formula):
    """The identity, which has no forward mode if it has an owner."""

    # JAX's own error of functions with a rule for reverse mode alone does not say what
    # has one. This comes where tangents are evaluated: in reverse mode they never are.

    owner: str
    refuses: bool

    def __init__(self, types: tuple[Aval, ...], owner: str, refuses: bool = False):
        self.in_avals, self.out_aval = types, list(types)
        self.params = dict(types=types, owner=owner, refuses=refuses)
        super().__init__()

    def expand(self, *arrays: Value) -> list[Value]:
        if self.refuses:
            raise TypeError(
                f"{self.owner}: a `backward` that changes cotangents has no forward "
                f"mode (`jax.jvp`, `jax.jacfwd`), where there are none. Use reverse "
                f"mode (`jax.grad`, `jax.jacrev`), or leave `backward` out."
            )
        return list(arrays)

    def doubled(self, nonzeros: Flags) -> Doubled:
        types = (*self.in_avals, *tangent_types(self.in_avals, nonzeros))
        formula = _Backwards(types, self.owner, refuses=bool(self.owner))
        return Doubled.of(formula, (nonzeros,), (nonzeros,))

    def settled(self, nonzeros: Flags, reverse: bool) -> "_Backwards":
        return _Backwards(self.in_avals, "")

    def sweep_forward(
        self, perturbed: PyTree, *inputs: Value
    ) -> tuple[PyTree, PyTree, PyTree]:
        # The inputs are not stored for the way back.
        marks = self._marks(perturbed)
        return self.settled(marks, True)(*inputs), (), self.nonzeros_out(marks)

    def sweep_back(self, residuals: PyTree, cts: PyTree) -> PyTree:
        return tuple(cts)

    def pull(self, perturbed: PyTree, inputs: PyTree, cts: PyTree) -> PyTree:
        return tuple(cts)

    def nonzeros_out(self, nonzeros_in: Sequence[bool]) -> list[bool]:
        return list(nonzeros_in)

    # Each example has cotangents of its own, of what all examples share as well: a
    # function of all of them together may be about to change these.

    def reached_out(self, marks: Sequence[bool], axis_name: Hashable) -> list[bool]:
        return list(marks) if axis_name is None else [any(marks)] * len(marks)

    def batched(
        self, axis_data: BatchAxis, args: PyTree, dims: PyTree
    ) -> tuple[Formula, PyTree, list[int | None]]:
        # Before the rule, which JAX refuses to batch in forward mode (`jax.jacfwd`).
        pairs = zip(self.expand(*args), dims, strict=True)
        args = tuple(with_batch_axis(x, dim, axis_data) for x, dim in pairs)
        types = tuple(map(jax.typeof, args))
        return _Backwards(types, self.owner, self.refuses), args, [0] * len(args)


def empty_log(owner: str, carry: PyTree, backward: object, length: int) -> PyTree:
    """Zeros for the log of each step, from a carry of which only the types matter."""
    if isinstance(backward, Truncate) or not callable(backward):
        _refuse_missing(owner)
    moving = eqx.filter(carry, _has_cotangent)
    axes = _axes_of_all(moving)
    types = jax.tree.map(lambda x: varying_type(jax.typeof(x), axes), moving)
    known_as = _known_as(backward, moving)
    log_of = known_as.name(lambda moving: _applied_to(owner, backward, moving)[1])
    program, shapes = jax.make_jaxpr(log_of, return_shape=True)(types)
    if shapes is None:
        _refuse_missing(owner)
    rows = [zero_array(stack_type(aval, length)) for aval in program.out_avals]
    return jax.tree.unflatten(jax.tree.structure(shapes), rows)


def _known_as(
    backward: Callable[[PyTree], PyTree], moving: PyTree, log: PyTree = None
) -> KnownAs:
    """What JAX is to call the function, and each array that it is called on."""
    (name,) = argument_names(backward, [moving])
    names = [*array_names(log, "log"), *array_names(moving, name)]
    return KnownAs("custom_vjp bwd", backward, names)


def check_taken(owner: str, log: PyTree, backward: object) -> None:
    """Checks what a call is given for its log."""
    if log is None:
        return
    if isinstance(backward, Truncate) or not callable(backward):
        _refuse_missing(owner)
    for path, leaf in zip(paths(log, "log"), flatten(log)[0], strict=True):
        is_rows = leaf is None or (_has_cotangent(leaf) and leaf.ndim)
        if not is_rows:
            raise TypeError(
                f"{owner}: `log` must be arrays of floating-point numbers with a row "
                f"for each step, but {path} is {describe(leaf)}. Its cotangent is the "
                f"log. `empty_log` of the loop, called with the same arguments, makes "
                f"one that fits."
            )


def _refuse_missing(owner: str) -> NoReturn:
    raise ValueError(
        f"{owner}: there is no log, since `backward` does not return one. Give it a "
        f"function from the cotangent of the carry to a pair, `(cotangent, log)`, or "
        f"`el.ClipCotangent(max_norm, log=True)`."
    )


def _has_cotangent(leaf: Value) -> bool:
    return is_dynamic(leaf) and is_inexact(leaf)


def _axes_of_all(moving: PyTree) -> frozenset[str]:
    """The axes that cotangents vary along."""
    # In `shard_map`, each device has a cotangent of its own, of all leaves.
    return frozenset[str]().union(*map(axes_of, jax.tree.leaves(moving)))


def _applied_to(
    owner: str, backward: Callable[[PyTree], PyTree], cotangent: PyTree
) -> tuple[PyTree, PyTree]:
    """What the function makes of a cotangent, and its log, or `None`."""
    # The cotangent that it returns has to be like the one that it was given.
    with explained(owner, "`backward(cotangent)`", {"cotangent": cotangent}):
        check_takes(owner, "backward", backward, ["cotangent"])
        result, log = backward(cotangent), None
    if _has_log(result, cotangent):
        result, log = result
    said = "cotangent", "came in", "came out"
    if changes := _changes(cotangent, result, *said):
        raise TypeError(
            f"{owner}: `backward` must return a cotangent of the same structure, "
            f"shapes and dtypes as it was given, or a pair of one and a log, but it "
            f"changed them:\n" + "\n".join(changes)
        )
    axes = _axes_of_all(cotangent)
    log = jax.tree.map(lambda x: vary(x, axes), _as_log(owner, log))
    return _varied_as(result, cotangent), log


def _has_log(result: PyTree, cotangent: PyTree) -> bool:
    """Whether something that was returned is a pair of a cotangent and a log."""
    # A carry may itself be a pair. Then what has the structure of its cotangent is one:
    # that is never the structure of a pair whose first part has it, too.
    if type(result) is not tuple or len(result) != 2:
        return False
    structure = jax.tree.structure(cotangent)
    if jax.tree.structure(result[0]) == structure:
        return True
    is_pair = type(cotangent) is tuple and len(cotangent) == 2
    return not is_pair


def _as_log(owner: str, log: PyTree) -> PyTree:
    """A log as a cotangent, which consists of floating-point numbers."""
    names = iter(paths(log, "log"))

    def converted(leaf: Value) -> Value:
        path = next(names)
        if leaf is None:
            return None
        x = as_array(leaf) if is_dynamic(leaf) or is_scalar(leaf) else None
        if x is None or not any(jnp.issubdtype(x.dtype, kind) for kind in _NUMBERS):
            raise TypeError(
                f"{owner}: the log that `backward` returns must consist of arrays of "
                f"numbers, but {path} is {describe(leaf)}."
            )
        return strongly_typed(x if is_inexact(x) else x.astype(float))

    return jax.tree.map(converted, log, is_leaf=lambda x: x is None)


_NUMBERS = (np.number, np.bool)


def _check_log(owner: str, log: PyTree, logged: PyTree) -> None:
    """Checks that a log fits into what was given to take it."""
    if logged is None:
        _refuse_missing(owner)
    said = "log", "of each step was passed", "was logged"
    if changes := _changes(log, logged, *said):
        raise TypeError(
            f"{owner}: `log` must have a row for each step that is like the log which "
            f"`backward` returns:\n"
            + "\n".join(changes)
            + "\n`empty_log` of the loop, called with the same arguments, makes one "
            "that fits."
        )


def _changes(
    before: PyTree, after: PyTree, name: str, came: str, went: str
) -> list[str]:
    """Where two trees have other structures, or else other types, a line for each."""
    line = lambda path, one, other: f"  {path}: {one} {came}, {other} {went}"
    if found := list(structure_differences(before, after, name)):
        return [line(d.path, d.one, d.other) for d in found]
    leaves = flatten(before)[0], flatten(after)[0]
    return [
        line(path, describe(one), describe(other))
        for path, one, other in zip(paths(before, name), *leaves, strict=True)
        if not _same_type(one, other)
    ]


def _varied_as(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, other: vary(x, axes_of(other)), tree, like)


def _same_type(one: Value, other: Value) -> bool:
    if one is None or not is_dynamic(other):
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype
