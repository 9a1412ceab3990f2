"""The identity of a function, and what it reads besides its arguments.

Both are for those who remember something by a function: it must neither be kept alive
by that, nor be taken for what it was when it has changed.
"""

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .._arrays import is_scalar, same_static
from .._programs import is_ref
from .._types import Value


class OfOneCallError(TypeError):
    """A leaf is not a constant: it may have another value at the next call."""


def identity_of(leaf: object) -> object:
    """The identity of a static leaf. It does not keep a function alive.

    Raises:
        TypeError: If the leaf is not hashable, or cannot be referred to weakly; or if
            it is a reference.

    >>> identity_of(1) == identity_of(1.0), identity_of(len) == identity_of(len)
    (False, True)
    """
    if is_scalar(leaf):
        return type(leaf), repr(leaf)  # as `same_static` has it
    if isinstance(leaf, types.MethodType):
        return types.MethodType, identity_of(leaf.__self__), identity_of(leaf.__func__)
    if is_ref(leaf):
        raise OfOneCallError
    is_a_value = leaf is None or type(leaf).__hash__ is not object.__hash__
    if is_a_value or isinstance(leaf, np.ufunc):
        hash(leaf)
        return type(leaf), leaf
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
    """What functions read besides their arguments, at some time.

    It is what they close over and the globals that they name, their defaults, and what
    an object that is called has for attributes; and the same of functions of the same
    module that are found on the way. What is inside of these things is not looked at.
    """

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
    if isinstance(function, types.FunctionType):
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        names, scope = _names_in(function.__code__), function.__globals__
        named = [scope[name] for name in names if name in scope]
        defaults = (*(function.__defaults__ or ()),)
        return [*cells, *named, *defaults, *(function.__kwdefaults__ or {}).values()]
    if isinstance(function, types.MethodType):
        return [function.__func__, *_attributes(function.__self__)]
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    return _attributes(function)


def _attributes(x: object) -> list[Value]:
    is_plain = not isinstance(x, type | types.ModuleType)
    return list(getattr(x, "__dict__", {}).values()) if is_plain else []


def _is_part_of(x: object, module: str | None) -> bool:
    if isinstance(x, types.FunctionType):
        return x.__module__ == module
    return isinstance(x, types.MethodType | functools.partial)


def _contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return None


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names in a function, and in those that are defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return (*code.co_names, *(name for x in inner for name in _names_in(x)))


def _reference(x: object) -> Callable[[], object]:
    try:
        return weakref.ref(x)
    except TypeError:  # a number or a list, say
        return lambda: x


def _is_same(before: Callable[[], object], now: object) -> bool:
    return before() is now or (is_scalar(now) and same_static(before(), now))
