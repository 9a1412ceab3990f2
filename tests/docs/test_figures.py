"""The figures of the README and of other pages: those of the benchmarks, or XLA's own.

XLA's are those of one version of JAX on a CPU, as the pages say, and tested with that.
"""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from tests.benchmarks import _results, rims, wide_sums

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
HOW_IT_WORKS = (ROOT / "docs" / "how_it_works.md").read_text()
MEASURED = _results.load(ROOT / "docs" / "benchmarks.json")
PICTURE = (ROOT / "docs" / "images" / "gigabytes.svg").read_text()


def with_jax(version):
    """A test of figures that are those of one version on a CPU."""
    return pytest.mark.skipif(
        jax.__version__ != version or jax.default_backend() != "cpu",
        reason=f"the page has the figures of JAX {version} on a CPU",
    )


class Plain(eqx.Module):
    """`jax.lax.scan` over a cell, called as a scan of ours is."""

    f: eqx.Module

    def __call__(self, init, xs):
        return jax.lax.scan(lambda h, x: self.f(h, x), init, xs)


def rows(group, title):
    """What a comparison of the benchmarks found on a CPU, by the names of its rows."""
    newest, *_ = _results.places(MEASURED, "cpu")
    (found,) = (o for o in MEASURED[newest][group].outcomes if title in o.title)
    return {row.name: row for row in found.rows}


def temporary(gradient, loop, xs):
    """The bytes that a gradient allocates beside its inputs and outputs."""
    compiled = gradient.lower(loop, xs).compile().compiled
    return compiled.memory_analysis().temp_size_in_bytes


def example(page):
    """The names that the first program of a page defines."""
    # Without a name of its own, its classes would be those of the module `builtins`.
    names = {"__name__": "example"}
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(program.rstrip().rpartition("\n")[0], names)  # all but the gradient's call
    return names


def figures(pattern, page):
    """The numbers of a sentence."""
    (found,) = re.findall(pattern, " ".join(page.split()))
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


def test_guides_have_the_figures_of_the_benchmarks():
    of_layers = rows("layers", "24 transformer layers")
    stacked, plain = of_layers["StackedLayers"], of_layers["Python loop"]
    guide = " ".join((ROOT / "docs/guides/stacked_layers.md").read_text().split())
    assert "takes about a ninth of the time that a Python loop takes" in guide
    assert round(plain.compile_seconds / stacked.compile_seconds) == 9
    assert [round(row.temp_bytes / 1e6, 1) for row in (stacked, plain)] == figures(
        r"took ([\d.]+) MB of memory instead of ([\d.]+) MB", guide
    )
    of_bars = rows("progress", "Progress bars")
    added = of_bars["Scan, with a bar"].seconds - of_bars["Scan, no bar"].seconds
    guide = (ROOT / "docs/guides/progress.md").read_text()
    assert [round(1e3 * added)] == figures(
        r"times, which takes\s+about (\d+) ms", guide
    )


def test_front_page_has_the_program_of_the_readme():
    program = re.compile(r"```python\n(.*?)```", re.DOTALL)
    assert program.findall(README)[0] == program.findall(INDEX)[0]


@pytest.mark.slow
@with_jax("0.12.0.1")
def test_memory_of_the_front_page():
    names = example(README)
    gradient, loop = names["gradient"], names["loop"]
    xs = jnp.ones((32, 10_000, 8))
    theirs = temporary(gradient, Plain(loop.f), xs)
    assert figures(r"\*\*([\d.]+) GB with `jax.lax.scan`", README) == [
        pytest.approx(theirs / 1e9, rel=5e-3)
    ]
    # Memory is told by the estimated plan as well as by the measured one.
    budget = el.Budget(loop.schedule.nbytes, measure=False)
    few = temporary(gradient, el.Scan(loop.f, schedule=budget), xs[:, :500])
    assert few < budget.nbytes < theirs


def _listed(words):
    """Of "1, 2 and 3", each."""
    return re.split(", | and ", words)


def test_answers_have_the_figures_of_the_benchmarks():
    page = (ROOT / "docs" / "asked_elsewhere.md").read_text()
    filled = rows("buffers", "a row written")
    names = "`lax.scan`", "Recursive(16)", "StoreAll()"
    assert [round(1e3 * filled[name].seconds) for name in names] == figures(
        r"(\d+) ms \[become (\d+)\].*?and (\d+) with `StoreAll", page
    )
    layers = rows("regret", "12 transformer layers")
    budgets, peaks = re.findall(
        r"budgets of (.*?) MB take (.*?) MB", " ".join(page.split())
    )[0]
    taken = [layers[f"budget of {nbytes} MB"].temp_bytes for nbytes in _listed(budgets)]
    assert [f"{nbytes / 1e6:.1f}" for nbytes in taken] == _listed(peaks)
    assert taken == sorted(taken)


@pytest.mark.slow
@with_jax("0.12.0.1")
def test_memory_of_rims():
    page = (ROOT / "docs" / "guides" / "reversible_loops.md").read_text()
    of_memory = lambda row: row.split("|")[1:3]
    found = [of_memory(cost.in_words) for cost in rims.costs(rounds=0)]
    assert found == [of_memory(r) for r in page.splitlines() if " MB |" in r]


@pytest.mark.slow
@with_jax("0.12.0.1")
def test_memory_of_wide_sums():
    page = (ROOT / "docs" / "recipes" / "precision.md").read_text()
    without_times = lambda row: row.split("|")[1:4]
    found = [without_times(cost.in_words) for cost in wide_sums.costs(rounds=0)]
    assert found == [without_times(r) for r in page.splitlines() if " KiB |" in r]


@pytest.mark.slow
@with_jax("0.12.0.1")
def test_memory_of_the_first_picture():
    names, xs = example(README), jnp.ones((32, 100, 8))
    a_step = temporary(names["gradient"], Plain(names["loop"].f), xs) / 100
    theirs, ours = figures(r"lax.scan: ([\d.]+) GB, eqloop: ([\d.]+) GB", PICTURE)
    assert theirs == pytest.approx(100_000 * a_step / 1e9, rel=0.1)
    assert ours <= names["loop"].schedule.nbytes / 1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(r"stores (\d+) KiB.*?reports (\d+),", marks=with_jax("0.12.0.1")),
        pytest.param(
            r"GRU: (\d+) KiB by the plan, (\d+) KiB by XLA", marks=with_jax("0.10.2")
        ),
    ],
)
def test_memory_of_the_sweeps(stored):
    cell = eqx.nn.GRUCell(64, 64, key=jax.random.key(0))
    h, xs = jnp.zeros(64), jnp.zeros((256, 64))

    @eqx.filter_jit
    def gradient(*inputs):  # of all of them, as in a plan
        return eqx.filter_grad(lambda all: jnp.sum(all[0](h, all[1])[0]))(inputs)

    def loops():
        step = jax.tree_util.Partial(lambda cell, h, x: (cell(x, h), None), cell)
        for schedule in (el.StoreAll(), el.Recursive(16, batch=1), el.Binomial(8)):
            yield el.Scan(step, schedule=schedule)

    of_plan, of_xla = figures(stored, HOW_IT_WORKS)
    plans = [loop.plan(h, xs).peak_bytes for loop in loops()]
    others = figures(r"batch=1\)` needs (\d+) KiB.*?needs (\d+) KiB", HOW_IT_WORKS)
    assert [round(nbytes / 1024) for nbytes in plans] == [of_plan, *others]
    measured = [temporary(gradient, loop, xs) for loop in loops()]
    others = figures(r"reports \d+, (\d+) and (\d+) KiB", HOW_IT_WORKS)
    assert [round(nbytes / 1024) for nbytes in measured] == [of_xla, *others]
