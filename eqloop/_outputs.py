"""What the function of a loop or map returns: its arrays, and how they are stacked."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

from ._axes import Axis, resolve_axes
from ._lists import pick
from ._partition import Rest, as_arrays, flatten, is_dynamic, paths, split
from ._weak_types import is_weak, with_weak_types


@dataclasses.dataclass(frozen=True)
class Outputs:
    """What a function returned, without its arrays.

    Attributes:
        axes: For each of the arrays, the axis along which it is stacked; `None` for
            what is the same each time, and is not stacked.
        weak: Which of the arrays are weakly typed.
        names: The path of each of them.
        rest: All else.
    """

    axes: tuple[Axis, ...]
    weak: tuple[bool, ...]
    names: tuple[str, ...]
    rest: Rest

    @classmethod
    def of(
        cls, owner: str, tree: Any, out_axes: Any, *, name: str, scalars: bool = False
    ) -> tuple[list[Any], Self]:
        """The arrays of a tree, and what else there is to it.

        Args:
            owner: The name of the transform, for error messages.
            tree: What a function returned.
            out_axes: A prefix tree of axes for it.
            name: What it is called in error messages.
            scalars: Whether Python numbers are to be arrays.
        """
        tree = as_arrays(tree, scalars=scalars)
        axes = resolve_axes(
            owner, tree, out_axes, tree_name=name, spec_name="out_axes", new=True
        )
        dynamic = [is_dynamic(leaf) for leaf in flatten(tree)[0]]
        arrays, rest = split(tree, dynamic)
        names = pick(paths(tree, name), dynamic)
        axes, weak = tuple(pick(axes, dynamic)), tuple(map(is_weak, arrays))
        return arrays, cls(axes, weak, tuple(names), rest)

    @property
    def same(self) -> list[bool]:
        """Which of the arrays are the same each time."""
        return [axis is None for axis in self.axes]

    @property
    def stacked_axes(self) -> tuple[int, ...]:
        """The axes of those that are not."""
        return tuple(axis for axis in self.axes if axis is not None)

    def check_same(self, owner: str, varying: Sequence[bool], why: str) -> None:
        """Sees to it that what is to be the same each time is.

        Args:
            owner: The name of the transform, for error messages.
            varying: Which of the arrays are not.
            why: The reason, as an error message goes on from "gives None for".

        Raises:
            ValueError: If one is to be the same, and is not.
        """
        wrong = [
            f"  {name}"
            for name, same, varies in zip(self.names, self.same, varying, strict=True)
            if same and varies
        ]
        if wrong:
            listing = "\n".join(wrong)
            raise ValueError(
                f"{owner}: out_axes gives None for {why}:\n{listing}\nGive them an "
                f"int, the axis along which they are to be stacked."
            )

    def join(self, stacked: Sequence[Any], same: Sequence[Any]) -> Any:
        """The tree, with arrays that were stacked and those that are the same."""
        stacks, constants = iter(stacked), iter(same)
        arrays = [next(constants if axis is None else stacks) for axis in self.axes]
        return self.rest.join(with_weak_types(arrays, self.weak))
