"""The base class of maps with axes of their arguments and results."""

import equinox as eqx

from .._calls import AbstractSameCall, P, R
from .._types import PyTree


class AbstractAxesMap(AbstractSameCall[P, R]):
    """A map whose rows are along any axes of its arguments.

    Args:
        f: The function. Its own arrays are the same for every row.
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
