"""Whether a function has changed what it holds while it was traced.

A loop traces its step once, and often traces a copy of a module. So what the step
changes in place, such as a state that it keeps in an object, is lost, or is the same
for all steps. No other error would say so.
"""

import collections
import contextlib
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.core
import numpy as np

from .._arrays import describe
from .._types import PyTree

# More objects than these are not looked at.
_MOST = 2_000
_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)
_WHOLE = (str, bytes, type, types.ModuleType, types.BuiltinFunctionType, Iterator)
# Where a function has put something where nothing was. That is no state: who does that
# wants to look at it later, and may find that of an earlier trace there.
_put = weakref.WeakKeyDictionary[Any, set[str]]()

IN_THE_CARRY = "Put it into the carry, and return it from there"
_AS_AN_ARGUMENT = "Pass it as an argument, and return it"


@contextlib.contextmanager
def unchanged(
    owner: str, word: str, f: Callable[..., PyTree], instead: str = ""
) -> Iterator[None]:
    """Checks that a call of `f` does not change arrays or numbers that it holds."""
    before, put = _held(f, word), _put.setdefault(_code_of(f), set())
    try:
        yield
    finally:  # a call that fails has put there what it had seen until then
        after, lines = _held(f, word), list[str]()
        put |= after.keys() - before.keys()
    for path, (new, is_copy) in after.items():
        old, _ = before.get(path, (None, False))
        is_traced = isinstance(new, jax.core.Tracer)
        is_changed = is_traced or (is_copy and _differ(old, new))
        if is_changed and new is not old and path not in put:
            one, other = describe(old), describe(new)
            lines.append(f"  {path}: {one if one == other else f'{one}, then {other}'}")
    if lines:
        listing = "\n".join(lines)
        raise ValueError(
            f"{owner}: {word} changes what it holds, which is lost, as it is traced "
            f"once for all calls:\n{listing}\n{instead or _AS_AN_ARGUMENT}."
            f"{_of_flax()}"
        )


def _of_flax() -> str:
    if "flax" not in sys.modules:
        return ""
    return (
        " Of a module of `flax.nnx` it is the state of `structure, state = "
        "nnx.split(module)`: the step merges them, `module = nnx.merge(structure, "
        "state)`, and returns `nnx.state(module)`."
    )


def _differ(old: Any, new: Any) -> bool:
    return isinstance(new, jax.Array | np.ndarray) or bool(old != new)


def _held(f: Callable[..., PyTree], word: str) -> dict[str, tuple[Any, bool]]:
    """Arrays and numbers that `f` can reach, and which of them are in a PyTree."""
    # A PyTree may be traced as a copy. Of objects elsewhere, numbers of Python that
    # change are not lost: it may be that they count how often `f` is traced.
    found = dict[str, tuple[Any, bool]]()
    seen = dict[int, Any]()  # which keeps what it has the ids of
    queue = collections.deque([(word, f, True), *globals_of(f)])
    while queue and len(seen) < _MOST:
        path, x, is_copy = queue.popleft()
        if isinstance(x, _NUMBERS):
            found.setdefault(path, (x, is_copy))
        elif id(x) not in seen and not isinstance(x, _WHOLE):
            seen[id(x)] = x
            is_copy &= not jax.tree_util.all_leaves([x])
            parts = itertools.islice(parts_of(path, x), _MOST)
            queue.extend((name, part, is_copy) for name, part in parts)
    return found


def parts_of(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the paths of it."""
    if isinstance(x, dict):
        yield from ((f"{path}[{key!r}]", part) for key, part in x.items())
    elif isinstance(x, list | tuple):
        yield from ((f"{path}[{i}]", part) for i, part in enumerate(x))
    elif isinstance(x, functools.partial):
        yield from ((path, part) for part in (x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, types.MethodType):
        yield from ((path, x.__self__), (path, x.__func__))
    elif isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # it has no value yet
                yield name, cell.cell_contents
        defaults = *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()
        yield from ((path, part) for part in (*defaults, *vars(x).values()))
    elif not type(x).__module__.startswith(("jax.", "jaxlib.", "numpy.")):
        held = dict(getattr(x, "__dict__", {}))
        if not held and not jax.tree_util.all_leaves([x]):
            yield from ((path, part) for part in eqx.tree_flatten_one_level(x)[0])
            return
        for cls in type(x).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                with contextlib.suppress(AttributeError):
                    held.setdefault(name, getattr(x, name))
        yield from ((f"{path}.{name}", part) for name, part in held.items())


def _code_of(f: Any) -> Any:
    """What functions have in common that are made by the same lines."""
    while isinstance(f, functools.partial):
        f = f.func
    f = getattr(f, "__func__", f)
    return f.__code__ if isinstance(f, types.FunctionType) else type(f)


def globals_of(f: Any) -> Iterator[tuple[str, Any, bool]]:
    """The globals that a function mentions: a script's step closes over them."""
    while isinstance(f, functools.partial):
        f = f.func
    if not isinstance(f, types.FunctionType | types.MethodType):
        f = type(f).__call__
    function = getattr(f, "__func__", f)
    if isinstance(function, types.FunctionType):
        names, space = _names_in(function.__code__), function.__globals__
        yield from ((name, space[name], False) for name in names if name in space)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names in a function, and in those that are defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return (*code.co_names, *(name for x in inner for name in _names_in(x)))
