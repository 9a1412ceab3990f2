"""Consts, carry and `xs`: what a formula takes, in groups, and as one list."""

from collections.abc import Sequence

from ..._partition import Flags, pick
from ..._tangents import zero_cotangent
from ..._typecheck import PyTree
from ..._types import Aval, Value
from ._forward import Active
from ._problem import merge


def flat(groups: Sequence[Flags]) -> Flags:
    """The flags of all groups, one group after the other."""
    return tuple(flag for group in groups for flag in group)


def with_tangents(groups: PyTree, active: Sequence[Flags]) -> PyTree:
    """The types of consts, carry and `xs`, behind each those of its tangents."""
    return tuple(
        [*avals, *(aval.to_tangent_aval() for aval in pick(avals, flags))]
        for avals, flags in zip(groups, active, strict=True)
    )


def tangents_behind(groups: PyTree, active: Sequence[Flags]) -> Flags:
    """Which entries are tangents, if each group has those of its active ones behind."""
    marks = (
        [False] * len(avals) + [True] * sum(flags)
        for avals, flags in zip(groups, active, strict=True)
    )
    return tuple(mark for group in marks for mark in group)


def spread(
    cts: PyTree, active: Active, avals: Sequence[Aval]
) -> tuple[list[Value], ...]:
    """Cotangents of the active inputs among zeros for the others."""
    zeros = [[zero_cotangent(aval) for aval in group] for group in avals]
    return merge(zeros, active, cts)
