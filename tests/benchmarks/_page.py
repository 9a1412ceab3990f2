"""The page of benchmarks: everything in the results, in words, pictures and tables."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ._gains import PAGE as GAINS
from ._gains import with_gains
from ._headlines import PAGES, with_figures
from ._once import Shown, shown
from ._plots import PICTURES
from ._report import all_claims, environment, folded, missed, section
from ._results import Record, Results, data_of, load
from ._style import AbstractPicture
from .groups import GROUPS

_PICTURES = "images/benchmarks"

# Other programs than the one measured slow it down when they keep more cores busy.
_BUSY = 0.1

_INTRODUCTION = """\
# Benchmarks

This page compares eqloop with JAX and with other libraries: gradients of long loops,
maps in chunks, and more. Two commands measure everything again, on your machine, and
write this page:

```sh
python -m pip install -e '.[bench]'
python -m tests.benchmarks --write docs/benchmarks.md
```

The figures are also in [benchmarks.json](benchmarks.json).

## How this is measured

- **Side by side.** The rows of a table solve the same problem, in float32, from the
  same inputs. One process runs them in turn, A B C A B C …, after a first run of each
  that does not count. The time of a row is the median of its runs. A claimed ratio of
  two times is the median of the ratios within a turn, because whatever slows the
  machine down for a while slows both.
- **One problem, one figure.** If several groups measure the same problem, the first of
  them shows its figures. The others link to it, and show only the ratios of their own
  runs.
- **Time** is the time of a compiled program whose inputs are on the device, until all
  of its results are there. For calls, it is the time that one takes in Python.
- **Temporary memory** is what XLA allocates for the program, besides its inputs and
  results, according to its own analysis. For calls that are not one program it is 0.
- **Trace and compile** starts from nothing: the caches of JAX and of eqloop are emptied
  first.
- **Difference** is the greatest difference between a result and that of the first row
  with the same inputs, relative to the greatest entry of that array. If a row computes
  something else, the text below the table says so.
- **Peers** are called as their documentation recommends. The extra `bench` pins their
  versions. Equinox's scan and while loop are internal to Equinox, and may change.
- **Claims** are bounds that this project has set for itself. The page lists all of
  them, and never folds away one that is missed.

The *recurrent step* is `h = tanh(W @ tanh(W @ h + x))`, of width 64. It does very
little work, so the cost of the loop itself shows. In the pictures eqloop is blue, and
axes are logarithmic.
"""

_PLATFORMS = {"cpu": "On a CPU", "gpu": "On a GPU", "tpu": "On a TPU"}

_NO_ACCELERATOR = """\
## On a GPU

Not measured yet. On a machine with a GPU, the command above adds this section and
leaves the figures for the CPU as they are.
"""


def write(page: Path) -> None:
    """Writes a page and its pictures from its results."""
    results = load(data_of(page))
    page.write_text(text(results))
    folder = page.parent / _PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for platform in set(_PLATFORMS) & set(results):
        for name, comparisons in shown(_in_order(results[platform])).items():
            outcomes = [one.outcome for one in comparisons]
            for picture in PICTURES.get(name, ()):
                picture.save(outcomes, folder / _file(platform, picture))
    if page.resolve().parent == PAGES[-1].parent:  # it is that of the documentation
        for other in PAGES:
            other.write_text(with_figures(other.read_text(), results["cpu"]))
        GAINS.write_text(with_gains(GAINS.read_text(), results))


def text(results: Results) -> str:
    """The page."""
    parts = [_INTRODUCTION]
    parts += (
        _platform(platform, results[platform])
        for platform in _PLATFORMS
        if platform in results
    )
    if not {"gpu", "tpu"} & set(results):
        parts.append(_NO_ACCELERATOR)
    parts += (
        _other_version(place, results[place])
        for place in sorted(set(results) - set(_PLATFORMS))
    )
    return "\n".join(parts)


def _platform(platform: str, groups: Mapping[str, Record]) -> str:
    """The section of one platform: what was measured on, then its groups in order."""
    known = _in_order(groups)
    parts = [f"## {_PLATFORMS[platform]}", *_circumstances(known)]
    parts += (_group(platform, *named) for named in shown(known).items())
    return "\n\n".join(parts) + "\n"


def _other_version(place: str, groups: Mapping[str, Record]) -> str:
    """The section of another version of JAX: what came of the claims."""
    platform, version = place.split(", ")
    known = _in_order(groups)
    outcomes = [outcome for record in known.values() for outcome in record.outcomes]
    parts = [f"## {_PLATFORMS[platform]}, with {version}", *_circumstances(known)]
    return "\n\n".join([*parts, all_claims(outcomes)]) + "\n"


def _in_order(groups: Mapping[str, Record]) -> Mapping[str, Record]:
    return {name: groups[name] for name in GROUPS if name in groups}


def _circumstances(groups: Mapping[str, Record]) -> Iterator[str]:
    """Machine, versions, commit and date; once, where all groups share them."""
    shared: dict[tuple[str, str], list[str]] = {}
    for name, record in groups.items():
        key = record.date, environment(record.environment)
        shared.setdefault(key, []).append(GROUPS[name].title)
    for (date, where), titles in shared.items():
        which = [] if len(shared) == 1 else [f"- {'; '.join(titles)}"]
        yield "\n".join((f"Measured on {date}:\n", *which, where))
    busiest = max((record.busy or 0.0 for record in groups.values()), default=0.0)
    if busiest >= _BUSY:
        yield (
            "**The machine was not quiet**: other programs kept up to "
            f"{busiest:.1f} of its cores busy. So times are longer than on a quiet "
            "machine, and ratios are less certain."
        )


def _group(platform: str, name: str, comparisons: Sequence[Shown]) -> str:
    """A group: its pictures with the tables folded away, or else its tables."""
    group = GROUPS[name]
    tables = "\n".join(
        section(one.outcome, one.rows, one.elsewhere) for one in comparisons
    )
    parts = [f"### {group.title}", group.about]
    if drawn := PICTURES.get(name, ()):
        parts += (_image(platform, picture) for picture in drawn)
        if missing := missed(one.outcome for one in comparisons):
            parts.append(missing)
        parts.append(folded("The figures", tables))
    else:
        parts.append(tables.rstrip())
    return "\n\n".join(parts)


def _image(platform: str, picture: AbstractPicture) -> str:
    return f"![{picture.alt}]({_PICTURES}/{_file(platform, picture)})"


def _file(platform: str, picture: AbstractPicture) -> str:
    return f"{platform}_{picture.name}.svg"
