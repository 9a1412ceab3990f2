"""Which axes of the arrays in a program are independent rows.

Every axis of every array in a program has a class. Two axes are of one class if an
entry along the one is only ever computed from the same entry along the other: those of
the operands and the result of an addition, for example. An operation that mixes entries
along an axis (a slice, a reduction, a product of matrices) spoils its class. What is
left are axes along which the whole program is a map: its rows. It makes no difference
whether `vmap` has made them, or the user did.

One way of mixing is allowed: adding up over rows, as a gradient does for what all rows
share. Such a sum is *pending*. It may be scaled, moved and added to others, and leave
the program, and is computed once, at the end. Any other use of it is a collective.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.core
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from ..._programs import said
from ..._types import Aval, Value

Rows = frozenset[int]


NO_ROWS: Rows = frozenset()


# Primitives that do the same to their axes.
_KINDS = "sum", "prod", "max", "min", "and", "or", "xor"


REDUCTIONS = tuple(f"reduce_{kind}" for kind in _KINDS)


CUMULATIVE = "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"
OF_KEYS = tuple(
    f"random_{kind}" for kind in ("seed", "split", "bits", "unwrap", "wrap")
)
EMPTY = "empty", "empty2"
# Some have a hyphen in their names, and in other versions of JAX an underscore.
SCATTERS = tuple(
    f"scatter{sign}{kind}" if kind else "scatter"
    for kind in ("", "add", "sub", "mul", "min", "max")
    for sign in "-_"
)


@dataclasses.dataclass(eq=False)
class Val:
    """An array in a program.

    Attributes:
        aval: Its type.
        dims: A node for each of its axes; see `Classes`.
        literal: Its value, if that is a number in the program.
        pending: The classes over which it is yet to be added up.
    """

    aval: Aval
    dims: list[int]
    literal: Any = None
    pending: Rows = NO_ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


@dataclasses.dataclass(eq=False)
class Op:
    """An operation, with the programs in it.

    Attributes:
        eqn: It.
        ins: Its operands.
        outs: Its results.
        whole: The operation that it is a part of, if another one stands for it.
        inner: The programs in it.
    """

    eqn: jex.JaxprEqn
    ins: list[Val]
    outs: list[Val]
    whole: jex.JaxprEqn | None = None
    inner: "list[AxisProgram]" = dataclasses.field(default_factory=list)

    def said(self) -> str:
        """What it is for the user, and where."""
        return said(self.whole or self.eqn)

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params


@dataclasses.dataclass(eq=False)
class AxisProgram:
    """Operations one after the other."""

    ins: list[Val]
    outs: list[Val]
    ops: list[Op]

    def vals(self) -> Iterator[Val]:
        """All arrays in it."""
        yield from self.ins
        for op in self.ops:
            yield from op.outs
            for inner in op.inner:
                yield from inner.vals()


class Classes:
    """Classes of axes: a union-find over nodes, one for each axis of each array.

    Attributes:
        lifted: Constant arrays in the programs, which become further inputs.
        rows: Those that are taken to be rows.
        saves_work: Whether rows see by `unvmap` only what they may leave out: so it is
            in a loop whose rows stop by themselves, or else they would keep in step.
        is_kernel: Whether the programs are to be in a kernel.
    """

    def __init__(self, saves_work: bool = False, is_kernel: bool = True) -> None:
        self.saves_work, self.is_kernel = saves_work, is_kernel
        self._parent = list[int]()
        self._why = dict[int, Callable[[], str]]()
        self.lifted = list[tuple[Val, Value]]()
        self.rows: Rows = NO_ROWS

    def array(self, aval: Aval) -> Val:
        first = len(self._parent)
        self._parent += range(first, first + len(aval.shape))
        return Val(aval, list(range(first, len(self._parent))))

    def constant(self, value: Any) -> Val:
        """A number in the program, or an array that is one more input of it."""
        aval = jax.core.ShapedArray(np.shape(value), jax.typeof(value).dtype)
        val = self.array(aval)
        if not val.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            val.literal = np.asarray(value)[()]
        else:
            self.lifted.append((val, value))
        return val

    def find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def of(self, val: Val) -> list[int]:
        return [self.find(node) for node in val.dims]

    def same(self, a: Val, i: int, b: Val, j: int) -> None:
        """Two axes are of one class, unless one of them has a single entry."""
        if a.shape[i] != b.shape[j] or a.shape[i] == 1:
            return
        self.join(a.dims[i], b.dims[j])

    def join(self, one: int, other: int) -> None:
        """Makes one class of two, which has the node of the first one."""
        one, other = self.find(one), self.find(other)
        if one == other:
            return
        self._parent[other] = one
        if (why := self._why.pop(other, None)) is not None:
            self._why.setdefault(one, why)

    def tie(self, a: Val, b: Val) -> None:
        """All axes of two arrays of one shape."""
        for i in range(len(a.shape)):
            self.same(a, i, b, i)

    def spoil(self, root: int, why: Callable[[], str]) -> None:
        """There is something in the way of rows along the axes of a class."""
        self._why.setdefault(self.find(root), why)

    def why_not(self, root: int) -> str | None:
        """What mixes entries along the axes of a class, if anything does."""
        why = self._why.get(self.find(root))
        return why and why()

    def is_spoiled(self, root: int) -> bool:
        """Whether anything mixes entries along the axes of a class."""
        return self.find(root) in self._why


@dataclasses.dataclass(frozen=True)
class FoundRows:
    """The rows of a program.

    Attributes:
        roots: The classes that are rows, in the order of the rows.
        sizes: How many there are of each.
        reason: What is in the way of more rows, if anything is.
    """

    roots: tuple[int, ...]
    sizes: tuple[int, ...]
    reason: str | None = None

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


class NotInKernelError(TypeError):
    """A step cannot be in a kernel, because of one of its operations.

    It is raised where a loop with the schedule [`Fused`][eqloop.Fused] is run on a GPU,
    or with `interpret=True`. The message names the operation and its line.

    Examples:
        >>> import eqloop as el, jax, jax.numpy as jnp
        >>> step = lambda h, _: (jnp.fft.ifft(jnp.fft.fft(h)).real, None)
        >>> fused = el.Scan(step, schedule=el.Fused(interpret=True))
        >>> try:
        ...     jax.vmap(lambda h: fused(h, length=3)[0])(jnp.ones((2, 4)))
        ... except el.NotInKernelError:
        ...     result = jax.vmap(lambda h: el.Scan(step)(h, length=3)[0])
    """

    __module__ = "eqloop"


_INSTEAD = (
    "Compute it outside of the loop, or use another schedule, such as `el.Chunked(32)`."
)


def refuse(
    operation: str, why: str = "cannot be in a kernel", instead: str = _INSTEAD
) -> NoReturn:
    """Raises an error that names an operation and its line, as `said` does."""
    raise NotInKernelError(f"Fused: {operation} {why}. {instead}")
