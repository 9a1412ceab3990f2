"""The tables of the guide on `Fit`: its figures, from `docs/fits.json`."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import eqloop as el
from eqloop._calls import format_bytes
from eqloop._programs import lowered
from eqloop.checkpointing.planning._roofline import roofline
from eqloop.checkpointing.planning._work import rates

from ..benchmarks._report import table
from ..on_gpu import _gpt2 as gpt2
from ._measure import Row

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = DOCS / "fits.json", DOCS / "guides" / "fit.md"
# What costs at most so much time is in the table besides the least.
_MOST_TIME = 1.1
# The device of the model, what its head takes at a time by hand, and its budgets.
_DEVICE, _TOKENS, _BUDGETS = "h100", 512, ("4GiB", "2GiB", "1GiB")


def note(**found: Any) -> None:
    """Keeps what was found in place of what was found before, and writes the page."""
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    for part, rows in found.items():
        known[part] = known.get(part, {}) | rows
    DATA.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(PAGE.read_text(), known))


def page(text: str, known: dict[str, Any]) -> str:
    """The guide, with the tables of what is known."""
    for part, found in known.items():
        tables = {"model": _model, "functions": _functions, "rows": _rows}[part](found)
        ends = rf"(<!-- fits: {part} -->\n).*?(<!-- /fits -->)"
        text = re.sub(ends, rf"\1\n{tables}\n\n\2", text, flags=re.DOTALL)
    return text


def of_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a function, as they are kept."""
    return [dataclasses.asdict(row) for row in rows]


def model_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """GPT-2 small, divided by hand and by budgets, by the compiler of a GPU."""
    sizes = gpt2.sizes(lambda n: n)
    plain, by_hand = gpt2.gpt2(sizes), gpt2.gpt2(sizes, _TOKENS)
    args = jax.eval_shape(lambda: gpt2.inputs(sizes))
    losses: dict[str, Callable[..., Any]] = {
        "plain": plain.plain,
        "each": plain.by_parts,
        "head": by_hand.by_parts,
    }
    fit = lambda nbytes: el.Fit(plain.plain, nbytes, foreign=True)
    for name, loss in (losses | {n: fit(n) for n in _BUDGETS}).items():
        with el.planning_for(_DEVICE):
            compiled = lowered(jax.value_and_grad(loss), *args).compile()
            seconds = roofline(compiled.as_text(), rates()) / 1e9
        taken = compiled.memory_analysis().temp_size_in_bytes
        yield name, {"taken": taken, "seconds": seconds}


def _model(known: dict[str, Any]) -> str:
    names = {
        "plain": "as it is",
        "each": "by hand: `jax.checkpoint` on each layer",
        "head": f"by hand: and its head in chunks of {_TOKENS} tokens",
    }
    names |= {n: f'`el.Fit(loss, "{n}")`' for n in _BUDGETS}
    whole = known["plain"]["seconds"]
    rows = [
        (name, format_bytes(known[n]["taken"]), f"{known[n]['seconds'] / whole:.2f}")
        for n, name in names.items()
        if n in known
    ]
    return table(("GPT-2 small", "memory", "time, by the roofline"), rows)


def _functions(known: dict[str, Any]) -> str:
    cells = list[tuple[str, ...]]()
    for name, rows in known.items():
        by_name = {row["name"]: row for row in rows}
        whole = by_name["plain"]["taken"]
        both = lambda row, whole=whole: f"{row['taken'] / whole:.2f}, {row['time']:.2f}"
        budgets = [row for row in rows if row["budget"] and row["name"] != "again"]
        least = min(budgets, key=lambda row: row["taken"])
        quick = [row for row in budgets if row["time"] <= _MOST_TIME]
        of_quick = both(min(quick, key=lambda row: row["taken"])) if quick else ""
        by_hand = by_name.get("each part")
        of_hand = both(by_hand) if by_hand else ""
        cells.append((name, both(least), of_quick, of_hand))
    cells.sort(key=lambda row: row[1])
    head = f"at most {_MOST_TIME}: memory, time"
    by_hand = "`jax.checkpoint`: memory, time"
    return table(("function", "least: memory, time", head, by_hand), cells)


def _rows(known: dict[str, Any]) -> str:
    names = [row["name"] for row in next(iter(known.values()))]
    head = ("memory, time, compilations", *known)
    cells = [
        (
            name if name != "plain" else "as it is",
            *(_cell(of[i]) for of in known.values()),
        )
        for i, name in enumerate(names)
    ]
    return table(head, cells)


def _cell(row: dict[str, Any]) -> str:
    return f"{row['memory']:.3f}, {row['time']:.2f}, {row['planning']:.1f}"
