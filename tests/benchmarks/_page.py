"""The page of benchmarks, and the data of the tables that are too long for it."""

import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..tables import FOLDER, data
from ._gains import PAGE as GAINS
from ._gains import with_gains
from ._headlines import (
    PAGES,
    has_headlines,
    in_pictures,
    with_figures,
)
from ._once import Shown, shown
from ._plots import HEADLINES, PICTURES
from ._report import (
    CELLS,
    CLAIM_CELLS,
    cells,
    claim_cells,
    environments,
    missed,
    section,
)
from ._results import Record, Results, data_of, load, places, version_of
from ._style import AbstractPicture
from .groups import GROUPS

_PICTURES = "images/benchmarks"

# A group without a picture shows its figures here, if they are so few.
_FEW = 8

# Other programs than the one measured slow it down when they keep more cores busy.
_BUSY = 0.1

_INTRODUCTION = """\
# Benchmarks

eqloop beside JAX and other libraries. At the end are [how all of this is
measured](#how-this-is-measured), [where and when](#where-and-when), and the [claims
that are missed](#missed-claims). [All figures](tables.md) are in tables that you can
search.
"""

_IN_SHORT = """\
## In short

The table of the [front page](index.md), as a picture:
"""

_METHOD = """\
## How this is measured

Two commands measure everything again, on your machine, and write this page:

```sh
python -m pip install -e '.[bench]'
python -m tests.benchmarks --write docs/benchmarks.md
```

Everything that was measured is in [benchmarks.json](benchmarks.json).

- **Side by side.** The rows of a table solve the same problem, in float32, from the
  same inputs. One process runs them in turn, A B C A B C …, after a first run that does
  not count. The time of a row is the median of its runs.
- **One problem, one figure.** The first group that measures a problem shows it.
- **Time** is that of a compiled program whose inputs are on the device. For calls, it
  is the time that one takes in Python.
- **Temporary memory** is what XLA allocates for the program, besides its inputs and
  results. For calls that are not one program it is 0.
- **Trace and compile** starts with empty caches.
- **Difference** is the greatest one from a result of the first row with the same
  inputs, relative to the greatest entry of that array.
- **Peers** are called as their documentation recommends, in versions that the extra
  `bench` pins. Equinox's scan and while loop are internal to Equinox.
- **Claims** are bounds that this project has set for itself. On a CPU, a claimed ratio
  is one of the times that its cores were busy: the median of the ratios within a turn,
  with the bounds between which half of them are. A claim is missed if three of four
  turns miss it. Claims without such bounds were measured by the time that passed.

The *recurrent step* is `h = tanh(W @ tanh(W @ h + x))`, of width 64. It does little
work, so the cost of the loop itself shows. In the pictures eqloop is blue, and axes are
logarithmic.
"""

_PLATFORMS = {"cpu": "On a CPU", "gpu": "On a GPU", "tpu": "On a TPU"}

_NO_ACCELERATOR = """\
## On a GPU

There are no times yet; what was run on one has [its own page](on_a_gpu_and_a_tpu.md).
"""


def write(page: Path) -> None:
    """Writes a page and its pictures from its results."""
    results = load(data_of(page))
    page.write_text(text(results))
    for name, content in tables(results).items():
        (page.parent / FOLDER.name / name).write_text(content)
    folder = page.parent / _PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    for platform in _PLATFORMS:
        for name, comparisons in shown(_newest(results, platform)).items():
            outcomes = [one.outcome for one in comparisons]
            for picture in PICTURES.get(name, ()):
                picture.save(outcomes, folder / _file(platform, picture))
    if page.resolve().parent == PAGES[-1].parent:  # it is that of the documentation
        HEADLINES.save(in_pictures(results), folder / f"{HEADLINES.name}.svg")
        for other in PAGES:
            other.write_text(with_figures(other.read_text(), results))
        GAINS.write_text(with_gains(GAINS.read_text(), results))


def text(results: Results) -> str:
    """The page: what came out, then how, where and when, and what was missed."""
    parts = [_INTRODUCTION]
    if has_headlines(results):
        parts += [
            _IN_SHORT,
            f"![{HEADLINES.alt}]({_PICTURES}/{HEADLINES.name}.svg)\n",
        ]
    parts += (_platform(platform, results) for platform in _platforms(results))
    if not {"gpu", "tpu"} & set(results):
        parts.append(_NO_ACCELERATOR)
    parts += [_METHOD, "## Where and when"]
    parts += (_circumstances(results, place) for place in _in_turn(results))
    parts += ["## Missed claims", _missed_claims(results)]
    return "\n".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _platforms(results: Results) -> list[str]:
    return [one for one in _PLATFORMS if places(results, one)]


def _in_turn(results: Results) -> Iterator[str]:
    """All places, the newest versions first."""
    for platform in _platforms(results):
        yield from places(results, platform)


def _newest(results: Results, platform: str) -> Mapping[str, Record]:
    """The groups of a platform, each with the newest version that has it."""
    found: dict[str, Record] = {}
    for place in places(results, platform):
        found = {**results[place], **found}
    return _in_order(found)


def _title(results: Results, place: str) -> str:
    platform, *_ = place.split(", ")
    return f"{_PLATFORMS[platform]}, with JAX {version_of(results[place])}"


def _platform(platform: str, results: Results) -> str:
    """The section of one platform: its groups."""
    newest, *older = places(results, platform)
    parts = [f"## {_title(results, newest)}"]
    for name, comparisons in shown(_newest(results, platform)).items():
        parts.append(_group(platform, name, comparisons))
        if name not in results[newest]:
            (place, *_) = [place for place in older if name in results[place]]
            parts.append(f"*This was measured with JAX {version_of(results[place])}.*")
    return "\n\n".join(parts) + "\n"


def tables(results: Results) -> Mapping[str, str]:
    """The data of all figures and of all claims, by the names of their files."""
    figures, claims = list[Sequence[str]](), list[Sequence[str]]()
    for place in _in_turn(results):
        title = _title(results, place).removeprefix("On a ")
        for name, comparisons in shown(_in_order(results[place])).items():
            for one in comparisons:
                where = title, GROUPS[name].title, one.outcome.title
                figures += ((*where, row.name, *cells(row)) for row in one.rows)
                claims += ((*where, *claim_cells(v)) for v in one.outcome.verdicts)
    where = "where", "group", "comparison"
    return {
        "benchmarks.json": data((*where, "case", *CELLS), figures),
        "claims.json": data((*where, *CLAIM_CELLS), claims),
    }


def _missed_claims(results: Results) -> str:
    parts: list[str] = []
    for place in _in_turn(results):
        known = _in_order(results[place])
        outcomes = [one for record in known.values() for one in record.outcomes]
        count = sum(len(outcome.verdicts) for outcome in outcomes)
        rows = missed(outcomes, version_of(results[place]))
        held = count - sum(not v.holds for one in outcomes for v in one.verdicts)
        parts.append(f"{_title(results, place)}, {held} of {count} claims hold.")
        if rows:
            parts.append(rows)
    return "\n\n".join(parts)


def _in_order(groups: Mapping[str, Record]) -> Mapping[str, Record]:
    return {name: groups[name] for name in GROUPS if name in groups}


def _circumstances(results: Results, place: str) -> str:
    """Machines, versions, commits and dates."""
    records = results[place].values()
    parts = [f"{_title(results, place)}:", environments(records)]
    busiest = max((record.busy or 0.0 for record in records), default=0.0)
    if busiest >= _BUSY:
        parts.append(
            "**The machine was not quiet**: other programs kept up to "
            f"{busiest:.1f} of its cores busy, so times are longer."
        )
    return "\n\n".join(parts) + "\n"


def _group(platform: str, name: str, comparisons: Sequence[Shown]) -> str:
    """A group: its pictures or else, if they are short, its tables."""
    group = GROUPS[name]
    parts = [f"### {group.title}", group.about]
    if drawn := PICTURES.get(name, ()):
        parts += (_image(platform, picture) for picture in drawn)
    elif sum(len(one.rows) for one in comparisons) <= _FEW:
        parts += (
            section(one.outcome, one.rows, one.elsewhere).rstrip()
            for one in comparisons
        )
    query = urllib.parse.urlencode({"benchmarks": group.title})
    return "\n\n".join([*parts, f"[All figures](tables.md?{query})"])


def _image(platform: str, picture: AbstractPicture) -> str:
    return f"![{picture.alt}]({_PICTURES}/{_file(platform, picture)})"


def _file(platform: str, picture: AbstractPicture) -> str:
    return f"{platform}_{picture.name}.svg"
