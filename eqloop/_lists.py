"""Flat lists of arrays, and which of their entries are meant."""

from collections.abc import Sequence
from typing import Any, TypeAlias

Arrays: TypeAlias = Sequence[Any]
Flags: TypeAlias = tuple[bool, ...]


def pick(leaves: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    """The leaves that are marked."""
    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]


def put(leaves: Sequence[Any], flags: Sequence[bool], marked: Arrays) -> list[Any]:
    """The leaves, with the marked ones replaced."""
    new = iter(marked)
    return [
        next(new) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)
    ]


def split(leaves: Sequence[Any], *counts: int) -> Any:
    """Cuts `leaves` into consecutive lists of those lengths, and one with the rest."""
    pieces: list[list[Any]] = []
    start = 0
    for count in counts:
        pieces.append(list(leaves[start : start + count]))
        start += count
    return (*pieces, list(leaves[start:]))


def interleave(flags: Sequence[bool], others: Arrays, marked: Arrays) -> list[Any]:
    """One list of two: `marked` where there is a mark, and `others` elsewhere."""
    sources = iter(others), iter(marked)
    return [next(sources[flag]) for flag in flags]
