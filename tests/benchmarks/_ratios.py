"""Pictures of ratios: a strip for each problem, and a line at 1."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from ._results import Outcome
from ._style import AbstractPicture

# Of a heading or a strip, in inches.
_LINE = 0.23


@dataclasses.dataclass(frozen=True)
class Series:
    """How the dots of one kind look.

    Args:
        label: what they are; in the legend, if it is not empty.
        colour: of the dots.
        marker: their shape.
        size: their diameter, in points.
        filled: whether they are more than an outline.
    """

    label: str
    colour: str
    marker: str = "o"
    size: float = 7.0
    filled: bool = True


@dataclasses.dataclass(frozen=True)
class Strip:
    """A horizontal strip of dots.

    Args:
        heading: stands above it, once for all the strips that share it.
        label: stands on its left.
        dots: the ratios, each with the series that it belongs to.
    """

    heading: str
    label: str
    dots: Sequence[tuple[Series, float]]


@final
@dataclasses.dataclass(frozen=True)
class Ratios(AbstractPicture):
    """Ratios on a logarithmic axis: less than 1 is on the left of a line.

    Args:
        strips: of an outcome.
    """

    strips: Callable[[Outcome], Iterator[Strip]]

    def draw(self, figure: Figure, outcomes: Sequence[Outcome]) -> None:
        strips = [strip for outcome in outcomes for strip in self.strips(outcome)]
        headings = dict.fromkeys(strip.heading for strip in strips)
        lines = len(strips) + len(headings)
        figure.set_size_inches(4.4, _LINE * lines + 0.9)
        ax = figure.subplots()
        ax.axvline(1.0, color="0.35", linewidth=1.2, zorder=1)
        heights = _draw_strips(ax, strips)
        ax.set(xlabel=self.xlabel, ylim=(lines - 0.4, -0.6))
        ax.set_yticks(heights, [strip.label for strip in strips], fontsize=10)
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        _scale(ax, [ratio for strip in strips for _, ratio in strip.dots])
        _, told = ax.get_legend_handles_labels()
        if told:
            ax.legend(
                bbox_to_anchor=(0.0, 1.0),
                borderpad=0.0,
                fontsize=10,
                frameon=False,
                handletextpad=0.1,
                loc="lower left",
                ncols=len(told),
            )
        ax.set_title(self.title, pad=24.0 if told else 6.0)


def _draw_strips(ax: Axes, strips: Sequence[Strip]) -> list[int]:
    """Draws the strips and their headings; returns how far down each strip is."""
    heights, heading, down = [], None, 0
    told: set[Series] = set()
    for strip in strips:
        if strip.heading != heading:
            heading = strip.heading
            _draw_heading(ax, heading, down)
            down += 1
        for series, ratio in strip.dots:
            label = series.label if series not in told else ""
            told.add(series)
            _draw_dot(ax, series, ratio, down, label)
        heights.append(down)
        down += 1
    return heights


def _draw_heading(ax: Axes, heading: str, down: float) -> None:
    ax.text(
        0.0,
        down,
        heading,
        transform=ax.get_yaxis_transform(),
        fontsize=10,
        weight="bold",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )


def _draw_dot(ax: Axes, series: Series, ratio: float, down: float, label: str) -> None:
    ax.plot(
        [ratio],
        [down],
        linestyle="none",
        color=series.colour,
        marker=series.marker,
        markersize=series.size,
        markerfacecolor=series.colour if series.filled else "none",
        label=label,
        zorder=3,
    )


def _scale(ax: Axes, ratios: Sequence[float]) -> None:
    """At least from a half to two, with room beside the outermost dots."""
    low, high = min(0.5, min(ratios) / 1.15), max(2.0, max(ratios) * 1.15)
    ax.set(xscale="log", xlim=(low, high))
    between = () if high > 100 * low else (2.0, 5.0)  # labels do not overlap
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, *between)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    ax.minorticks_off()
