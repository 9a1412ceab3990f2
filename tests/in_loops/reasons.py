"""Why operations stay slower in a loop: what nothing is done about."""

from collections.abc import Mapping

_CORES = "outside of loops XLA divides it among the cores"
_ROWS = "and the loop copies its row of `xs` first, which takes as long"

# By name, or by name and `"value"` or `"gradient"`.
REASONS: Mapping[str | tuple[str, str], str] = {
    "tanh": _CORES,
    "exp(x) / (1 + x * x)": _CORES,
    "softmax": _CORES,
    "softmax along the first axis": _CORES,
    "maximum in windows": _CORES,
    "concatenation": _CORES,
    "reversal": _CORES,
    "sum of rows": f"{_CORES}, {_ROWS}",
    "sum of columns": f"{_CORES}, {_ROWS}",
    "rows added by number": _CORES,
    "products of a batch": _CORES,
}
