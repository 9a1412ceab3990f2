"""What all pictures of the page have in common. Needs matplotlib."""

import abc
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ._results import Outcome

# This project is blue.
OURS = "#0060b0"

# Narrow, with large type: a phone shows all of it at its own width.
_SETTINGS: Any = {
    "figure.figsize": (4.4, 4.0),
    "figure.facecolor": "white",
    "font.size": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "grid.color": "0.9",
    "svg.hashsalt": "eqloop",
}


@dataclasses.dataclass(frozen=True)
class AbstractPicture(abc.ABC):
    """A picture of a group.

    Args:
        name: of its file.
        alt: what it shows, for those who cannot see it.
        title: stands above it.
        xlabel: stands below the horizontal axis.
    """

    name: str
    alt: str
    title: str
    xlabel: str

    @abc.abstractmethod
    def draw(self, figure: Figure, outcomes: Sequence[Outcome]) -> None:
        """Draws the figures of a group into an empty figure."""

    def save(self, outcomes: Sequence[Outcome], path: Path) -> None:
        """Draws it into a file: the same file for the same outcomes."""
        with mpl.rc_context(_SETTINGS):
            figure = Figure()
            FigureCanvasAgg(figure)
            self.draw(figure, outcomes)
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(
                path, metadata=metadata, bbox_inches="tight", pad_inches=0.12
            )
