"""The cases, by what operations do."""

from ..case import Case
from . import control, elementwise, linear, moves, random, reductions

_FILES = elementwise, moves, reductions, linear, random, control


def all_cases() -> list[Case]:
    """All cases of all operations."""
    return [case for file in _FILES for case in file.cases()]
