"""The README keeps its word."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

import eqloop as el

README = Path(__file__).parents[2] / "README.md"


def test_example():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    namespace = {"__name__": "readme"}
    exec(example.replace("10_000", "30"), namespace)
    xs = jnp.ones((32, 30, 8))
    gradient = namespace["gradient"](namespace["loop"], xs)
    stored = el.Scan(namespace["loop"].f, schedule=el.StoreAll())
    expected = namespace["gradient"](stored, xs)
    for a, b in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-6)
