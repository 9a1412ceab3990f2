"""What a user sets: `ProgressBar` and its short forms.

And a bar that is moved from Python, for a loop of which Python runs the parts.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex, final

from .._arrays import describe
from .._calls import check_least, check_takes, int_of
from .._classes import SettingMeta
from .._types import PyTree
from ._display import require_tqdm


@final
@dataclasses.dataclass(frozen=True)
class ProgressBar(metaclass=SettingMeta):
    """A progress bar, by [tqdm](https://tqdm.github.io), for a loop or a map.

    For the setting `progress`, `True` means `ProgressBar()`, and an `int` means
    `ProgressBar(every)`.

    The bar counts steps, and ends at the number of steps. It works in a compiled
    function, each time the function is called; under `vmap`, where the batch has one
    bar; and when the loop is differentiated. Then the backward sweep has its own bar,
    and steps that are run again are not counted. Loops within loops show their bars
    below each other. A bar changes neither the results nor their derivatives.

    Args:
        every: The number of steps after which the bar moves. By default it moves some
            25 times, and in a loop of unknown length every 100 steps. The bar of a
            backward sweep moves where the schedule allows it.
        desc: The text before the bar: a string, or a function `desc(i, carry, y)` that
            returns one. The function is called on the host each time the bar moves,
            with the number of the last step and what that step returned. Its arrays are
            NumPy arrays; under `vmap` they are those of the first example.
        total: The expected number of steps, for a loop that does not know it, such as a
            while loop.

    Raises:
        TypeError: If `every` or `total` is not an int, or `desc` neither a string nor
            a function.
        ValueError: If `every` is less than 1 or `total` less than 0. Calling the loop
            raises it too if `total` is not the number of its steps.
        ImportError: If the loop is called and tqdm is not installed.

    Examples:
        >>> import jax.numpy as jnp
        >>> import eqloop as el
        >>> scan = el.Scan(lambda h, x: (h + x, h), progress=True)
        >>> scan(0.0, jnp.arange(4.0))[0]
        Array(6., dtype=float32)
        >>> bar = el.ProgressBar(every=100, desc=lambda i, h, y: f"h = {h:.2f}")
        >>> scan = el.Scan(lambda h, x: (h + x, h), progress=bar)

    References:
        What is to be counted when a loop is differentiated, and how not to:
        [diffrax #396](https://github.com/patrick-kidger/diffrax/issues/396).
    """

    every: int | None = None
    desc: str | Callable[[int, PyTree, PyTree], str] | None = dataclasses.field(
        default=None, kw_only=True
    )
    total: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_count("every", self.every, 1, "after how many steps the bar moves")
        _check_count("total", self.total, 0, "how many steps are expected")
        if not (self.desc is None or isinstance(self.desc, str) or callable(self.desc)):
            raise TypeError(
                f"ProgressBar: `desc` must be a string, or a function `desc(i, carry, "
                f"y)` that returns one, not {describe(self.desc)}."
            )
        if callable(self.desc):
            check_takes("ProgressBar", "desc", self.desc, ["i", "carry", "y"])


def as_progress(progress: ProgressBar | bool | int | SupportsIndex | None) -> Any:
    """The bar that a setting `progress` means; other values stay the same."""
    if progress is False:
        return None
    if progress is True:
        return ProgressBar()
    every = int_of(progress)
    return progress if every is None or every < 1 else ProgressBar(every)


def check_progress(owner: str, progress: object) -> None:
    """Makes sure that `as_progress` has made a bar, or `None`, of a setting."""
    if int_of(progress) is not None:
        raise ValueError(
            f"{owner}: `progress`, the steps after which the bar moves, must be at "
            f"least 1, but it is {progress!r}."
        )
    if not (progress is None or isinstance(progress, ProgressBar)):
        raise TypeError(
            f"{owner}: `progress` must be `True`, an int (after how many steps the bar "
            f"moves) or an `el.ProgressBar(...)`, not {describe(progress)}."
        )


def _check_count(name: str, value: object, least: int, meaning: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"ProgressBar: `{name}` must be an int, {meaning}, not {describe(value)}."
        )
    check_least("ProgressBar", name, value, least)


@contextlib.contextmanager
def host_bar(
    name: str, progress: ProgressBar | None, total: int, done: int, phase: str = ""
) -> Iterator[Callable[..., None]]:
    """Shows a bar, and closes it in the end."""
    # What it yields moves the bar, to a number of steps that were run. It can be given
    # a function `desc -> text` for a label.
    if progress is None:
        yield lambda done, label=None: None
        return
    require_tqdm(name)
    import tqdm.auto

    desc = progress.desc
    title = desc if isinstance(desc, str) else name
    title = f"{title} ({phase})" if phase else title
    with tqdm.auto.tqdm(total=total, initial=done, desc=title) as bar:

        def move(done: int, label: Callable[[PyTree], str] | None = None) -> None:
            if label is not None and callable(desc):
                bar.set_description(label(desc), refresh=False)
            bar.update(done - bar.n)

        yield move
