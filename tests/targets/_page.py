"""The page about other devices: tables of what compilers say, and of what was run."""

import dataclasses
import json
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..benchmarks._report import table
from ..on_gpu import _page as times
from ..on_gpu import _rows
from ..tables import FOLDER, data
from ._verdicts import Found

# By kind of device, group and case, as `tests.targets` spells it.
Results = Mapping[str, Found]

_KINDS = {"h100": "NVIDIA H100", "v5e": "TPU v5e", "v6e": "TPU v6e"}
_GROUPS = {
    "steps": (
        "Schedules",
        "Gradients of the steps of the [benchmarks](benchmarks.md), in all inputs. "
        "There, `root` is the square root of the number of steps.",
    ),
    "budgets": (
        "Budgets",
        "`Budget` with a share of what `StoreAll` takes. A dash is a budget that is "
        "refused, as no plan fits into it.",
    ),
    "ways": ("Modes, and vmap", "Three examples in each batch."),
    "loops": ("Loops, maps and policies", "Their gradients."),
    "large": (
        "Steps that take long",
        "Gradients of loops that keep a GPU busy. Others of plain JAX are beside them.",
    ),
    "functions": (
        "Whole functions",
        "`Fit` with a share of what the plain gradient takes.",
    ),
}

_INTRODUCTION = """\
# On a GPU and a TPU

Most of this page is what compilers say. JAX's plug-ins for GPUs and TPUs contain the
compilers of these devices, which do not need the devices. They tell exactly how much
memory XLA gives a program, on the device and on its host, and, for a GPU, how many
kernels it starts. How long these take, they do not tell. One command compiles
everything again, on any machine, and writes this page:

```sh
python -m pip install -e '.[test,targets]'
python -m tests.targets --write docs/on_a_gpu_and_a_tpu.md
```

In the same way, [`planning_for`][eqloop.planning_for] plans your own loops for a device
that you do not have.

A weekly test compiles it all, and lists what is wrong:

- a gradient takes more memory than its plan says, by 15 % and 16 KiB,
- the processor of the host computes anything,
- a loop copies stored carries, or `xs`, in each of its iterations, or
- a GPU has to wait for its host in a loop whose length is known.

**Memory** is besides inputs and outputs. On a TPU, what fits into the memory close to
its cores is not counted, so that small loops take nothing. **Planned** is what the plan
has foreseen. **Kernels** are those that a GPU starts for each step of the loop, copies
among them, for the value and for the gradient. Small steps take about as long as it
takes to start these. A dash is a loop whose iterations are not known beforehand.
"""

_WAS_RUN = """\
These were run, too, by the same command on a machine with the device:

```sh
python -m tests.targets --run gpu --workers 8 --write docs/on_a_gpu_and_a_tpu.md
```

**Difference** is the greatest one from the gradient of plain JAX, or of the same loop
on the processor of the host, relative to the greatest entry of an array. Carries that
are stored in bfloat16 differ by more.
"""


def data_of(page: Path) -> Path:
    """Where the figures of a page are."""
    return page.with_name("targets.json")


def times_of(page: Path) -> Path:
    """Where the times of a page are, which `tests.on_gpu` measures."""
    return page.with_name("gpu.json")


def load(data: Path) -> dict[str, Found]:
    """The figures that there are."""
    if not data.exists():
        return {}
    known = json.loads(data.read_text())
    return {
        key: Found(**{**fields, "wrong": tuple(fields["wrong"])})
        for key, fields in known.items()
    }


def save(results: Results, data: Path) -> None:
    """Keeps the figures."""
    fields = {key: dataclasses.asdict(found) for key, found in results.items()}
    data.write_text(json.dumps(fields, indent=1) + "\n")


def write(page: Path) -> None:
    """Writes a page from its figures."""
    results = load(data_of(page))
    page.write_text(text(results, _rows.load(times_of(page))))
    for name, content in tables(results).items():
        (page.parent / FOLDER.name / name).write_text(content)


def text(results: Results, measured: _rows.Rows) -> str:
    """The page."""
    return "\n".join([_INTRODUCTION, times.text(measured), *_sections(results)])


def tables(results: Results) -> Mapping[str, str]:
    """The data of all figures, by the name of its file."""
    rows = (
        (title, _GROUPS[group][0], f"`{name}`" if "(" in name else name, *_row(found))
        for title, groups in _by_kind(results)
        for group, cases in groups.items()
        for name, found in cases.items()
    )
    columns = ("device", "group", "case", *_CELLS, "wrong")
    return {"targets.json": data(columns, rows)}


def _by_kind(
    results: Results,
) -> Iterator[tuple[str, Mapping[str, Mapping[str, Found]]]]:
    """The groups of each kind of device, what was run first."""
    kinds = dict.fromkeys(key.split(" | ")[0] for key in results)
    run = {kind: kind for kind in kinds if kind not in _KINDS}
    for kind, title in (run | _KINDS).items():
        groups = {
            group: {
                key.split(" | ")[2]: found
                for key, found in results.items()
                if key.startswith(f"{kind} | {group} | ")
            }
            for group in _GROUPS
        }
        if any(groups.values()):
            yield title, groups


def _sections(results: Results) -> Iterator[str]:
    for title, groups in _by_kind(results):
        yield f"## {title}\n"
        if title not in _KINDS.values():
            yield _WAS_RUN
        yield _summary(groups) + "\n"
        about = [
            f"- **{heading}**, {len(groups[group])} programs. {words}"
            for group, (heading, words) in _GROUPS.items()
            if groups[group]
        ]
        query = urllib.parse.urlencode({"targets": title})
        yield "\n".join(about) + "\n"
        yield f"[All its figures](tables.md?{query})\n"


def _summary(groups: Mapping[str, Mapping[str, Found]]) -> str:
    every = [found for cases in groups.values() for found in cases.values()]
    wrong = [
        (name, *found.wrong)
        for cases in groups.values()
        for name, found in cases.items()
        if found.wrong and not _is_refused(found)
    ]
    said = f"{len(every)} programs, of which {len(wrong)} are wrong."
    rows = [(name, "; ".join(f"`{w}`" for w in why)) for name, *why in wrong]
    return "\n\n".join([said, *[table(("wrong", "why"), rows)] * bool(rows)])


def _is_refused(found: Found) -> bool:
    return any("Budget: " in why for why in found.wrong)


def _row(found: Found) -> Iterator[str]:
    is_known = not found.wrong or found.temp or found.host
    for column, cell in _CELLS.items():
        if is_known or column in ("memory", "kernels a step"):
            yield cell(found) if is_known else "-"
        else:
            yield ""
    yield "; ".join(f"`{why}`" for why in found.wrong)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.3f} MB"


def _or_nothing(figure: float | None, form: str) -> str:
    return "" if figure is None else form.format(figure)


_CELLS: Mapping[str, Callable[[Found], str]] = {
    "memory": lambda found: _size(found.temp),
    "planned": lambda found: _size(found.planned),
    "on the host": lambda found: _size(found.host or None),
    "kernels a step": lambda found: _or_nothing(found.kernels, "{:.1f}") or "-",
    "difference": lambda found: _or_nothing(found.error, "{:.0e}"),
}
