"""The base classes of maps: the function, and the axes of arguments and results."""

import inspect
from collections.abc import Callable
from typing import Generic

import equinox as eqx

from .._calls import AbstractTransform, P, R
from .._types import PyTree


class AbstractMap(AbstractTransform[Callable[P, R]], Generic[P, R]):
    """A function that is called on every row of its arguments.

    Final classes declare `f` anew: pyright takes the type of a method that is decorated
    with a transform from what the class itself declares.

    Args:
        f: The function. Its own arrays are the same for every row.
    """

    f: Callable[P, R]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.f)


class AbstractAxesMap(AbstractMap[P, R]):
    """A map whose rows are along any axes of its arguments.

    Args:
        in_axes: Which axes of the arguments are mapped: an `int`, `None` to pass an
            argument whole, a function from a leaf to either, or a tree of these. A
            tuple has an entry for each positional argument, a dictionary one for each
            of the arguments that it names; other arguments are mapped over the leading
            axes of their arrays. Leaves that are not arrays are passed as they are.
        out_axes: The axes along which the rows of the results are stacked: an `int`, or
            a prefix tree for the result of `f`. `None` is for results that are the same
            for every row. A Python number is stacked if it is given an axis here, and
            by default comes back as it is.
    """

    in_axes: eqx.AbstractVar[PyTree]
    out_axes: eqx.AbstractVar[PyTree]
