"""Calls outside of `jit`: traced and compiled once, and remembered.

Under `jit` a call is traced once, for all times that the program is run. Outside of it,
each call would be traced and compiled anew, which takes a hundred times longer than to
run it. So `compiled_once` makes each such call one of a jitted function of its arrays,
and remembers that by all else: by the static leaves and the settings. What it depends
on further (types, shardings, axes, the settings of JAX), JAX remembers it by.

A function can read more than its arguments. What it closes over, and the globals that
it names, are looked at before each call (`Captures`), and if one of them is another
object than it was, then the call is traced anew. `jax.lax.scan`, which remembers by the
function as well, does not look. What changes within an object is not seen.

Nothing that is remembered keeps a function alive, and no tracer is remembered.
"""

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jex
import jax.tree_util as jtu
import jaxtyping
import numpy as np

from .._arrays import (
    Rest,
    StaticTree,
    as_array,
    bits,
    is_dynamic,
    is_scalar,
    partition,
    pick,
    put,
    same_static,
)
from .._programs import is_ref
from .._types import PyTree, Value
from ._changes import globals_of, parts_of
from ._transform import int_of

_AnyCall = TypeVar("_AnyCall", bound=Callable[..., Any])

# For each there is a compiled program, and the arrays that its function closes over.
_MOST_CALLS = 512


def compiled_when(when: Callable[..., bool]) -> Callable[[_AnyCall], _AnyCall]:
    """Has those calls outside of `jit` traced and compiled once for all."""
    # It is a method of a transform, or a function whose first argument is the name of
    # one.

    def decorate(call: Any) -> Any:
        @functools.wraps(call)
        def once(*args: PyTree, **kwargs: PyTree) -> PyTree:
            __tracebackhide__ = True
            if _applies() and when(*args, **kwargs):
                # A program has to know it, even if it is NumPy's.
                if (length := int_of(kwargs.get("length"))) is not None:
                    kwargs["length"] = length
                if (opened := _Opened.of(call, args, kwargs)) is not None:
                    with contextlib.suppress(_NotClosedError):
                        return _program_of(opened)(opened)
            return call(*args, **kwargs)

        return once

    return decorate


compiled_once = compiled_when(lambda *_, **__: True)


def _applies() -> bool:
    # JAX has no other public way to ask. The answer decides about speed alone: a call
    # that is compiled within a program that is being traced means the same.
    extend: Any = jex
    is_traced = extend.unsafe_am_i_under_a_jit_DO_NOT_USE()
    # Whoever looks for tracers that leak wants each function traced.
    config: Any = jax.config
    return not (is_traced or config.jax_disable_jit or config.jax_check_tracer_leaks)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A call, with its arrays apart."""

    call: Callable[..., PyTree]
    name: str
    arrays: list[Value]
    rest: Rest
    key: tuple[Value, ...]

    @classmethod
    def of(
        cls,
        call: Callable[..., PyTree],
        args: tuple[Value, ...],
        kwargs: dict[str, Any],
    ) -> "_Opened | None":
        """The call, or `None` if there is nothing that it could be remembered by."""
        try:
            arrays, static = StaticTree.of((args, kwargs), is_dynamic, identity_of)
            key = call, not jaxtyping.config.jaxtyping_disable, static.identity
            hash(key)
        except TypeError:
            return None
        name = args[0] if isinstance(args[0], str) else type(args[0]).__name__
        return cls(call, name, arrays, static.rest, key)


# What a function is remembered by. It must neither be kept alive by that, nor be taken
# for what it was when it has changed.


class OfOneCallError(TypeError):
    """A leaf is not a constant: it may have another value at the next call."""


def identity_of(leaf: object) -> object:
    """The identity of a static leaf. It does not keep a function alive.

    >>> identity_of(1) == identity_of(1.0), identity_of(len) == identity_of(len)
    (False, True)
    """
    # It raises if the leaf is not hashable, or cannot be referred to weakly, or is a
    # reference.
    if isinstance(leaf, types.MethodType):
        return types.MethodType, identity_of(leaf.__self__), identity_of(leaf.__func__)
    if is_ref(leaf):
        raise OfOneCallError
    is_a_value = leaf is None or type(leaf).__hash__ is not object.__hash__
    if is_a_value or isinstance(leaf, np.ufunc):
        hash(leaf)
        return bits(leaf)
    return weakref.ref(leaf)


def weak_references(identity: object) -> Iterator[weakref.ref]:
    """Those in what `identity_of` gives, or in a tuple of such."""
    if isinstance(identity, weakref.ref):
        yield identity
    elif isinstance(identity, tuple):
        for part in identity:
            yield from weak_references(part)


def weakly(leaf: Value) -> Callable[[], Any]:
    """The leaf, as long as others keep it alive."""
    if isinstance(leaf, types.MethodType):
        owner, function = weakly(leaf.__self__), weakly(leaf.__func__)
        return lambda: types.MethodType(function(), owner())
    identity = identity_of(leaf)
    return identity if isinstance(identity, weakref.ref) else lambda: leaf


class Captures:
    """What functions read besides their arguments, at some time."""

    # It is what they close over and the globals that they name, their defaults, and
    # what an object that is called has for attributes; and the same of functions of the
    # same module that are found on the way. What is inside of these things is not
    # looked at.

    def __init__(self, functions: Iterable[Value]) -> None:
        self.objects = list(_all_read(functions))
        self._kept: list[Callable[[], object]] | None = None

    def let_go(self) -> None:
        """From now on refers to the objects weakly, where that can be done."""
        self._kept, self.objects = list(map(_reference, self.objects)), []

    def is_as(self, now: "Captures") -> bool:
        """Whether the same is read now, of what was let go."""
        kept = self._kept or []
        return len(kept) == len(now.objects) and all(map(_is_same, kept, now.objects))


def _all_read(functions: Iterable[Value]) -> Iterator[Value]:
    queue, seen = list(functions), set()
    while queue:
        function = queue.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        read = _read_by(function)
        yield from read
        module = getattr(function, "__module__", None)
        queue += [x for x in read if _is_part_of(x, module)]


def _read_by(function: object) -> list[Value]:
    if isinstance(function, type | types.ModuleType):
        return []
    read = [part for _, part in parts_of("", function)]
    if isinstance(function, types.FunctionType):
        read += [value for _, value, _ in globals_of(function)]
    if isinstance(function, types.MethodType):
        read += _read_by(function.__self__)
    return read


def _is_part_of(x: object, module: str | None) -> bool:
    if isinstance(x, types.FunctionType):
        return x.__module__ == module
    return isinstance(x, types.MethodType | functools.partial)


def _reference(x: object) -> Callable[[], object]:
    try:
        return weakref.ref(x)
    except TypeError:  # a number or a list, say
        return lambda: x


def _is_same(before: Callable[[], object], now: object) -> bool:
    return before() is now or (is_scalar(now) and same_static(before(), now))


# The program that a call is remembered with.

# What JAX raises where a function needs the values of what is traced.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class _NotClosedError(Exception):
    """Raised by a program for a call that it does not stand for."""


class _Program:
    """The jitted function of all calls that are remembered by the same."""

    def __init__(self, opened: _Opened, captures: Captures, forget: Any) -> None:
        self._traceable: Any = jax.jit(_of_arrays(opened))
        self._runnable: dict[int, tuple[Any, Callable[..., Any]]] = {}
        references = weak_references(opened.key)
        # References of its own, to be called back by: those of the key are shared.
        self._deaths = [weakref.ref(reference(), forget) for reference in references]
        self._is_closed = not any(map(_is_of_one_call, _leaves(captures.objects)))
        self._take_note(captures)

    def is_as(self, captures: Captures) -> bool:
        """Whether functions read what they did when they were traced."""
        return self._captures.is_as(captures)

    def __call__(self, opened: _Opened) -> PyTree:
        """What a call returns, with arrays of whatever types."""
        # It raises if the function closes over what is another in the next call, or
        # cannot be traced.
        __tracebackhide__ = True
        if not self._is_closed:
            raise _NotClosedError
        arrays = opened.arrays
        try:
            traced = self._traceable.trace(arrays)
        except Exception as error:
            # It may be that `f` needs the values of its arguments, and is not always
            # traced. All other errors are to come from the call itself, since JAX
            # writes beneath them which frames it hides.
            self._is_closed = not isinstance(error, NEEDS_VALUES)
            raise _NotClosedError from None
        jaxpr = traced.jaxpr
        if id(jaxpr) not in self._runnable:
            # JAX makes a tracer that the function closes over one more input.
            if len(jaxpr.in_avals) > len(arrays) or any(
                map(_is_of_one_call, jaxpr.consts)
            ):
                self._is_closed = False
                raise _NotClosedError
            self._runnable[id(jaxpr)] = jaxpr, _runnable(jaxpr, traced.fun_name)
            # What a function writes itself, a count of its traces say, is no change.
            self._take_note(_captures_of(opened))
        _, run = self._runnable[id(jaxpr)]
        taken, kept = jtu.tree_unflatten(traced.out_tree, run(jaxpr.consts, arrays))
        return kept.join(taken, arrays)

    def _take_note(self, captures: Captures) -> None:
        self._captures = captures
        captures.let_go()


def _leaves(objects: Iterable[Value]) -> Iterator[Value]:
    """The leaves of what is read: JAX would sort keys, and not end in a circle."""
    queue, seen = list(objects), dict[int, Value]()
    while queue:
        x = queue.pop()
        if jtu.all_leaves([x]):
            yield x
        elif id(x) not in seen:
            seen[id(x)] = x
            queue += [part for _, part in parts_of("", x)]


def _is_of_one_call(leaf: object) -> bool:
    return is_ref(leaf) or isinstance(leaf, jax.core.Tracer)


@jtu.register_static
@dataclasses.dataclass(frozen=True)
class _Result:
    """What a call returns besides the arrays that it computes.

    Attributes:
        given: For each array, its place among the arguments if it is one of them.
    """

    rest: Rest
    given: tuple[int | None, ...]

    def join(self, computed: list[Value], arguments: list[Value]) -> PyTree:
        new = iter(computed)
        return self.rest.join(
            [next(new) if i is None else as_array(arguments[i]) for i in self.given]
        )


def _of_arrays(opened: _Opened) -> Callable[..., PyTree]:
    """The call as a function of its arrays, which keeps no other function alive."""
    call, treedef, taken = opened.call, opened.rest.treedef, opened.rest.taken
    static = list(map(weakly, opened.rest.leaves))

    def run(arrays: list[Value]) -> tuple[list[Value], _Result]:
        leaves = put([leaf() for leaf in static], taken, arrays)
        args, kwargs = jtu.tree_unflatten(treedef, leaves)
        returned, rest = partition(call(*args, **kwargs))
        places = {id(array): i for i, array in enumerate(arrays)}
        given = tuple(places.get(id(x)) for x in returned)
        return pick(returned, [i is None for i in given]), _Result(rest, given)

    run.__name__ = run.__qualname__ = opened.name
    return run


def _runnable(jaxpr: jex.ClosedJaxpr, name: str) -> Callable[..., PyTree]:
    """A traced call, to be called with its constants and its arrays."""
    # What a jitted function closes over is written into its program, however large.

    def run(consts: list[Value], arrays: list[Value]) -> list[Value]:
        return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *arrays)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


_programs: dict[Any, _Program] = {}


def _program_of(opened: _Opened) -> _Program:
    captures = _captures_of(opened)
    program = _programs.get(opened.key)
    if program is None or not program.is_as(captures):
        # It holds on to the dictionary, which is gone before the last functions are.
        forget = functools.partial(_programs.pop, opened.key)
        program = _programs[opened.key] = _Program(opened, captures, forget)
        if len(_programs) > _MOST_CALLS:
            _programs.pop(next(iter(_programs)), None)
    return program


def _captures_of(opened: _Opened) -> Captures:
    return Captures(filter(callable, opened.rest.leaves))
