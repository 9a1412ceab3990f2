"""How well the roofline foresees times, and the rates that it would do best with."""

import statistics
from collections.abc import Iterator, Sequence

import numpy as np

from eqloop._known_devices import rates_of

from ..benchmarks._report import table
from ._rows import Row

# What a time is foreseen to consist of: starting kernels, moving bytes, and products.
PARTS = "starts", "bytes", "products"


def fitted_rates(rows: Sequence[Row]) -> Iterator[str]:
    """How far off it is, and how far with rates that fit to what was measured.

    Rows of programs with slots on the host are left out: of these it knows nothing.
    """
    rows = [row for row in rows if row.seconds and row.foreseen and not row.host]
    if len(rows) < len(PARTS):
        yield "Too little was measured to tell."
        return
    parts = np.array([[row.foreseen[part] for part in PARTS] for row in rows])
    measured = np.array([statistics.median(row.seconds) for row in rows])
    factors = _factors(parts, measured)
    own = rates_of("gpu", rows[0].device)
    yield (
        f"Of {len(rows)} programs whose loops have known lengths. A time is off by a "
        f"factor, whichever way. The rates that fit best are those with the least sum "
        f"of squares of relative errors; the others are of the data sheet, in "
        f"`eqloop/_known_devices.py`."
    )
    yield table(
        ("", "a kernel starts in", "bytes", "float32", "off by, median", "off by, 0.9"),
        [
            (
                name,
                f"{1e6 * own.start * starts:.2f} us",
                _rate(own.memory, nbytes, "B/s"),
                _rate(own.float32, products, "flop/s"),
                *_off(parts @ (starts, nbytes, products), measured),
            )
            for name, (starts, nbytes, products) in {
                "as they are": np.ones(len(PARTS)),
                "that fit best": factors,
            }.items()
        ],
    )


def _factors(parts: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """By what to multiply the parts. What would be below zero takes no time."""
    relative, used = parts / measured[:, None], list(range(parts.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(relative[:, used], np.ones(len(measured)))
        if all(found >= 0):
            factors = np.zeros(parts.shape[1])
            factors[used] = found
            return factors
        used.pop(int(np.argmin(found)))


def _rate(rate: float, factor: float, unit: str) -> str:
    return f"{rate / factor / 1e12:.2f} T{unit}" if factor else "any"


def _off(foreseen: np.ndarray, measured: np.ndarray) -> tuple[str, str]:
    off = np.exp(np.abs(np.log(np.maximum(foreseen, 1e-9) / measured)))
    return f"{np.median(off):.2f} x", f"{np.quantile(off, 0.9):.2f} x"
