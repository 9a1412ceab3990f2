"""Pictures of lines: one for each library, on logarithmic axes. Needs matplotlib."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from matplotlib.ticker import LogLocator
from matplotlib.transforms import Bbox

from ._results import Outcome, Row
from ._style import OURS, AbstractPicture

Points = list[tuple[float, float]]

# Apart in hue and in lightness, so that they can be told apart with any eyes, and dark
# enough on white for text.
_STYLES: Mapping[str, tuple[str, str]] = {
    "lax.scan": ("#000000", "o"),
    "jax.checkpoint": ("#767676", "s"),
    "by hand": ("#00805a", "D"),
    "Equinox": ("#aa3377", "v"),
    "powerpax": ("#a87400", "^"),
    "brainstate": ("#d04a00", "X"),
    "Python loop": ("#000000", "o"),
    "Recursive(16)": (OURS, "P"),
    "Binomial(30)": (OURS, "*"),
    "Budget": (OURS, "."),
    "StackedLayers": (OURS, "."),
}
# Of labels from their points: near ones before far ones.
_OFFSETS = [(x, y) for y in (0, 9, -9, 16, -16) for x in (8, -8, 0) if x or y]
_OFFSETS += [(x, y) for y in (-26, -40, 26, 40, 54) for x in (8, -8, 24, -24)]


@final
@dataclasses.dataclass(frozen=True)
class Lines(AbstractPicture):
    """A line for each library.

    Args:
        across: what is drawn across, of an outcome and one of its rows.
        up: what is drawn upwards, of an outcome and one of its rows.
        xunit: how the ticks of the horizontal axis are written.
        yunit: how those of the vertical axis are written.
        labels: where the lines are labelled: in a column at their ends, or beside them.
    """

    across: Callable[[Outcome, Row], float]
    up: Callable[[Outcome, Row], float]
    xunit: Callable[[float], str]
    yunit: Callable[[float], str]
    labels: Literal["at the end", "beside"] = "at the end"

    def draw(self, figure: Figure, outcomes: Sequence[Outcome]) -> None:
        ax = figure.subplots()
        lines = self._lines(outcomes)
        for name, points in lines.items():
            _draw_line(ax, name, points)
        ax.set(xscale="log", yscale="log", title=self.title, xlabel=self.xlabel)
        ax.xaxis.set_major_formatter(lambda value, _: self.xunit(value))
        ax.yaxis.set_major_formatter(lambda value, _: self.yunit(value))
        ax.minorticks_off()
        low, high = ax.get_ylim()
        if high < 30 * low:
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        if self.labels == "beside":
            _label_beside(ax, lines)
        else:
            ticks = sorted({x for points in lines.values() for x, _ in points})
            ax.set_xticks(ticks)
            _label_ends(ax, lines)

    def _lines(self, outcomes: Sequence[Outcome]) -> Mapping[str, Points]:
        """The points of each line, from the rows that belong to one."""
        lines: dict[str, Points] = {}
        for outcome in outcomes:
            for row in outcome.rows:
                if row.line:
                    point = (self.across(outcome, row), self.up(outcome, row))
                    lines.setdefault(row.line, []).append(point)
        return lines


def _draw_line(ax: Axes, name: str, points: Points) -> None:
    colour, marker = _STYLES[name]
    ours = colour == OURS
    size = 9 if marker in "*PX." else 5.5
    ax.plot(
        *zip(*points, strict=True),
        color=colour,
        marker=marker,
        markersize=size,
        linewidth=2.0 if ours else 1.2,
        zorder=3 if ours else 2,
    )


def _label(ax: Axes, name: str, xy: tuple[float, float], **settings: Any) -> Annotation:
    colour, _ = _STYLES[name]
    weight = "bold" if colour == OURS else "normal"
    return ax.annotate(name, xy, color=colour, weight=weight, **settings)


def _label_ends(ax: Axes, lines: Mapping[str, Points]) -> None:
    """Labels in a column on the right, each as near to its line's end as can be."""
    ends = {name: points[-1] for name, points in lines.items()}
    order = sorted(ends, key=lambda name: ends[name][1])
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [to_axes.transform(ends[name])[1] for name in order]
    for name, height in zip(order, _spread(heights, gap=0.072), strict=True):
        _label(
            ax,
            name,
            ends[name],
            xytext=(1.14, height),
            textcoords="axes fraction",
            va="center",
            arrowprops=_leader(name),
        )


def _leader(name: str) -> dict[str, Any]:
    """A thin line from a label to its point."""
    return {
        "arrowstyle": "-",
        "color": _STYLES[name][0],
        "lw": 0.5,
        "relpos": (0, 0.5),
        "shrinkA": 1,
        "shrinkB": 5,
    }


def _spread(heights: Sequence[float], gap: float) -> np.ndarray:
    """Moves ascending heights apart, by little: those that touch move as one."""
    clusters = [[height] for height in heights]
    centre = lambda cluster: sum(cluster) / len(cluster)
    reach = lambda cluster: gap * len(cluster) / 2
    merged: list[list[float]] = []
    for cluster in clusters:
        merged.append(cluster)
        while len(merged) > 1 and (
            centre(merged[-2]) + reach(merged[-2])
            > centre(merged[-1]) - reach(merged[-1])
        ):
            last = merged.pop()
            merged[-1] = merged[-1] + last
    return np.concatenate(
        [
            centre(one) + gap * (np.arange(len(one)) - (len(one) - 1) / 2)
            for one in merged
        ]
    )


def _label_beside(ax: Axes, lines: Mapping[str, Points]) -> None:
    """Labels beside one of a line's points, where they cover nothing if possible."""
    ax.margins(0.1, 0.25)
    ax.autoscale_view()
    taken = [box for points in lines.values() for box in _covered(ax, points)]
    corner = ax.get_window_extent().min
    # Those of long lines have the most places to go to.
    for name, points in sorted(lines.items(), key=lambda line: len(line[1])):
        for label in _candidates(ax, name, points):
            box = _box(label)
            inside = np.all(box.min > corner)
            if inside and not any(box.overlaps(other) for other in taken):
                break
            label.remove()
        else:
            box = _box(_label(ax, name, points[0]))
        taken.append(box)


def _box(label: Annotation) -> Bbox:
    """Where the words are, without the thin line to them."""
    label.get_window_extent()  # puts it into its place
    return Text.get_window_extent(label)


def _covered(ax: Axes, points: Points) -> Iterator[Bbox]:
    """Small boxes along a line."""
    corners = ax.transData.transform(np.array(points))
    for start, end in itertools.pairwise((*corners, corners[-1])):
        for x, y in np.linspace(start, end, 12):
            yield Bbox.from_bounds(x - 5, y - 5, 10, 10)


def _candidates(ax: Axes, name: str, points: Points) -> Iterator[Annotation]:
    for x, y in _OFFSETS:
        for point in points:
            yield _label(
                ax,
                name,
                point,
                xytext=(x, y),
                textcoords="offset points",
                ha="left" if x > 0 else "right" if x < 0 else "center",
                va="center",
                arrowprops=_leader(name) if abs(y) > 16 else None,
            )
