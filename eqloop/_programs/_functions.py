"""What tells functions of Python apart: their code, and what they read by name.

Comments, docstrings and formatting make no difference, nor do lines, paths and what
variables are called. It works for functions that are in no file, as in a notebook.
"""

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

# These may be somewhere else than other packages that are installed.
_OF_LIBRARIES = frozenset(("jax", "jaxlib", "equinox", "eqloop", "numpy"))


def code_parts(function: types.FunctionType) -> Iterator[Any]:
    """What a function does: its instructions, and what its names stand for."""
    known = _closed_over(function), function.__globals__
    yield from _instructions(function.__code__, *known)
    yield function.__defaults__, tuple((function.__kwdefaults__ or {}).items())


def name_of(x: Any) -> str:
    """What a function, a class, a module or a member of an enumeration is called."""
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None) or str(x)
    return f"{getattr(x, '__module__', None)}.{name}"


def is_of_library(value: object) -> bool:
    """Whether something is Python's, or of a package that was installed."""
    module = getattr(value, "__module__", getattr(value, "__name__", None)) or ""
    if module.partition(".")[0] in _OF_LIBRARIES | sys.stdlib_module_names:
        return True
    return "site-packages" in (getattr(sys.modules.get(module), "__file__", None) or "")


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    found = dict[str, Any]()
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return found


def _instructions(
    code: types.CodeType, closed_over: dict[str, Any], known: dict[str, Any]
) -> Iterator[Any]:
    module = None
    for step in dis.get_instructions(code):
        name, value = step.argval, step.arg
        if isinstance(name, types.CodeType):
            yield from _instructions(name, closed_over, known)
            continue
        if step.opcode in dis.hasconst:
            value = name
        elif step.opcode in dis.hasfree:
            value = closed_over.get(name, value)
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = known.get(name, name)
        elif step.opcode in dis.hasname:
            value = vars(module).get(name, name) if module else name
        is_own = isinstance(value, types.ModuleType) and not is_of_library(value)
        module = value if is_own else None
        is_named = hasattr(value, "__name__") and is_of_library(value)
        yield step.opname
        yield name_of(value) if is_named else value
