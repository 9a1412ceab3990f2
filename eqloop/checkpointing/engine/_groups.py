"""Consts, carry and `xs`: what a formula takes, in groups, and as one list."""

from collections.abc import Sequence
from typing import Any

from ..._partition import Flags, pick
from ..._tangents import zero_cotangent
from ._forward import Active
from ._problem import merge


def flat(groups: Sequence[Flags]) -> Flags:
    """The flags of all groups, one group after the other."""
    return tuple(flag for group in groups for flag in group)


def with_tangents(groups: Any, active: Sequence[Flags]) -> Any:
    """The types of consts, carry and `xs`, behind each those of its tangents."""
    return tuple(
        [*avals, *(aval.to_tangent_aval() for aval in pick(avals, flags))]
        for avals, flags in zip(groups, active, strict=True)
    )


def tangents_behind(groups: Any, active: Sequence[Flags]) -> Flags:
    """Which entries are tangents, if each group has those of its active ones behind."""
    marks = (
        [False] * len(avals) + [True] * sum(flags)
        for avals, flags in zip(groups, active, strict=True)
    )
    return tuple(mark for group in marks for mark in group)


def spread(cts: Any, active: Active, avals: Any) -> tuple[list[Any], ...]:
    """Cotangents of the active inputs among zeros for the others."""
    zeros = [[zero_cotangent(aval) for aval in group] for group in avals]
    return merge(zeros, active, cts)
