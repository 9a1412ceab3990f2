"""A bar that is moved from Python, for a loop of which Python runs the parts."""

import contextlib
from collections.abc import Callable, Iterator

from .._types import PyTree
from ._bar import ProgressBar
from ._display import require_tqdm


@contextlib.contextmanager
def host_bar(
    name: str, progress: ProgressBar | None, total: int, done: int, phase: str = ""
) -> Iterator[Callable[..., None]]:
    """Shows a bar, and closes it in the end.

    Args:
        name: What is written before it, unless the user says what.
        progress: The user's bar; `None` for none.
        total: How many steps there are.
        done: How many of them were run at another time: the rate is not theirs.
        phase: Which sweep it is of; empty for the loop itself.

    Yields:
        What moves it: a function of the number of steps that were run. It can be given
        a function `desc -> text` for a label that depends on them.
    """
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
