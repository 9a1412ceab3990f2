"""Why operations stay slower in a loop: what nothing is done about."""

from collections.abc import Mapping

# By name, or by name and `"value"` or `"gradient"`.
REASONS: Mapping[str | tuple[str, str], str] = {}
