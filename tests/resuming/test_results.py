"""The numbers are those of the scan, whatever it is and however it is called."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from ..marks import slow, slow_if
from .cases import EVERY, Example, assert_close, cell, data, examples, loss, numbers

pytestmark = pytest.mark.sampled

EXAMPLES = examples()
# The others have more than one of what is special about these.
QUICK = {"truncated", "axes", "many kinds", "no steps"}


@pytest.mark.parametrize("name", slow_if(lambda name: name not in QUICK, EXAMPLES))
def test_is_the_scan(name, tmp_path):
    example: Example = EXAMPLES[name]()
    value, found = example.gradient(tmp_path)
    again = example.run(tmp_path)  # read from the disk
    assert_close(again, example.expected())
    assert numbers(example.run(tmp_path)) == numbers(again)
    expected_value, expected = example.expected_gradient()
    assert_close(value, expected_value)
    if example.has_numbers:
        # A number that varies has a gradient here; Equinox takes it for a setting.
        found, expected = (found[0], found[2]), (expected[0], expected[2])
    assert_close(jax.tree.map(jnp.asarray, found), expected)


class Sliceable:
    """What has a shape, a dtype and slices, and counts what is read of it."""

    def __init__(self, array):
        self.array, self.reads = array, []
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, index):
        self.reads.append(index)
        return self.array[index]


def memory_map(folder, array):
    np.save(folder / "xs.npy", array)
    return np.load(folder / "xs.npy", mmap_mode="r")


def by_rows(array, start, stop):
    return array[start:stop]


@pytest.mark.parametrize(
    "kind", [slow("memory map"), slow("view of one"), "sliceable", "function"]
)
def test_what_xs_may_be(kind, tmp_path):
    array = data()
    xs = {
        "memory map": lambda: memory_map(tmp_path, array),
        "view of one": lambda: memory_map(tmp_path, np.repeat(array, 2, 0))[::2],
        "sliceable": lambda: Sliceable(array),
        "function": lambda: functools.partial(by_rows, array),
    }[kind]()
    scan = el.Scan(lambda h, x: (0.5 * h + x, h))
    run = el.Resumable(scan, tmp_path / "run", every=EVERY, keep=3, ys="directory")
    kwargs = {"length": len(array)} if kind == "function" else {}
    carry, ys = run(jnp.zeros(3), xs, **kwargs)
    assert isinstance(ys, np.memmap)
    assert_close((carry, jnp.asarray(ys)), scan(jnp.zeros(3), array))
    take = run.value_and_grad(loss, argnums="xs")
    found = take(jnp.zeros(3), xs, **kwargs)[1]
    assert isinstance(found, np.memmap)
    expected = jax.grad(lambda xs: loss(*scan(jnp.zeros(3), xs)))(jnp.asarray(array))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if kind == "sliceable":
        # It was read twice, besides what the digest is of.
        reads = [(index[0].start, index[0].stop) for index in xs.reads]
        for segment in ((0, 4), (4, 8), (8, 11)):
            assert reads.count(segment) == 2


def test_xs_are_read_a_segment_ahead(tmp_path):
    done, reads = [], []
    bar = el.ProgressBar(desc=lambda i, h, y: str(done.append(i)))

    def xs(start, stop):
        reads.append((start, len(done)))
        return np.ones(stop - start, np.float32)

    scan = el.Scan(lambda h, x: (h + x, None), progress=bar)
    el.Resumable(scan, tmp_path, every=2)(0.0, xs, length=10)
    assert done == [1, 3, 5, 7, 9]
    # The first was read to see what it is; each other before its turn.
    assert [start for start, _ in reads] == [0, 0, 2, 4, 6, 8]
    assert all(count <= start // 2 - 1 for start, count in reads[2:])


def test_some_of_the_ys_have_cotangents(tmp_path):
    scan = el.Scan(cell())
    run = el.Resumable(scan, tmp_path, every=EVERY)
    out, pull = run.vjp(jnp.zeros(3), data(), argnums=("init", "f"))
    cts = {"h": jnp.ones((len(data()), 3)), "mean": None, "name": None}
    found = pull((None, cts))

    def value(args):
        return (
            scan(args[0], data())[1]["h"].sum()
            if not args[1:]
            else (args[1](args[0], data())[1]["h"].sum())
        )

    expected = eqx.filter_grad(value)((jnp.zeros(3), scan))
    assert_close(found, expected)
    assert_close(out, scan(jnp.zeros(3), data()))


def test_aux_and_a_single_argument(tmp_path):
    scan = el.Scan(lambda h, x: (h * x, None))
    run = el.Resumable(scan, tmp_path, every=2)
    take = run.value_and_grad(
        lambda h, ys: (h, {"twice": 2 * h, "name": "aux"}), argnums=0, has_aux=True
    )
    (value, aux), gradient = take(jnp.ones(()), jnp.arange(1.0, 6.0))
    assert (value, aux["twice"], aux["name"], gradient) == (120, 240, "aux", 120)


def test_what_is_not_used_is_not_read(tmp_path, monkeypatch):
    run = el.Resumable(el.Scan(cell()), tmp_path, every=EVERY)
    run(jnp.zeros(3), data())
    made = []
    monkeypatch.setattr(jnp, "array", lambda x, *a, **k: made.append(x) or np.array(x))
    run.value_and_grad(lambda h, ys: ys["mean"].sum())(jnp.zeros(3), data())
    assert [x.shape for x in made if isinstance(x, np.memmap)] == [(len(data()),)]


@pytest.mark.slow
def test_how_many_carries_are_kept(tmp_path):
    def kept(folder, **settings):
        run = el.Resumable(el.Scan(cell()), tmp_path / folder, every=2, **settings)
        run(jnp.zeros(3), data())
        return sorted(int(path.name) for path in tmp_path.glob(f"{folder}/carries/*"))

    assert kept("two") == [10, 11]
    assert kept("three", keep=3) == [8, 10, 11]
    # A gradient has the others computed again.
    run = el.Resumable(el.Scan(cell()), tmp_path / "two", every=2)
    found = run.value_and_grad(loss)(jnp.zeros(3), data())
    other = el.Resumable(el.Scan(cell()), tmp_path / "other", every=2)
    assert numbers(found) == numbers(other.value_and_grad(loss)(jnp.zeros(3), data()))


def test_status(tmp_path):
    run = el.Resumable(el.Scan(cell()), tmp_path / "run", every=np.int64(EVERY))
    assert str(run.status()) == "not begun"
    assert not (tmp_path / "run").exists()
    run(jnp.zeros(3), data())
    assert str(run.status()) == "11 of 11 steps were run"
    run.value_and_grad(loss)(jnp.zeros(3), data())
    assert str(run.status()) == "11 of 11 steps were run, 11 were reversed"
    assert run.status() == el.resuming.RunStatus(11, 11, 11)


def test_bar_goes_on_where_it_was(tmp_path, capsys):
    def fails(start, stop):
        if start >= 6 and fails.is_on:
            raise KeyboardInterrupt
        return data()[start:stop]

    fails.is_on = True
    run = el.Resumable(el.Scan(cell()), tmp_path, every=2, progress=True)
    with pytest.raises(KeyboardInterrupt):
        run(jnp.zeros(3), fails, length=11)
    assert "11/11" not in capsys.readouterr().err
    before = run.status().steps
    assert before in (4, 6)
    fails.is_on = False
    run.value_and_grad(loss)(jnp.zeros(3), fails, length=11)
    shown = capsys.readouterr().err
    forward, _, backward = shown.partition("(backward)")
    counts = lambda text: [int(n) for n in re.findall(r" (\d+)/11 ", text)]
    assert (counts(forward)[0], counts(forward)[-1]) == (before, 11)
    assert (counts(backward)[0], counts(backward)[-1]) == (0, 11)


def test_a_line_says_from_where_a_run_goes_on(tmp_path, caplog):
    scan = el.CheckpointedScan(lambda h, x: (jnp.sin(h) + x, None))
    run, xs = el.Resumable(scan, tmp_path, every=2), np.ones(6, "f4")

    def read(start, stop):
        if start >= 4 and read.fails:
            raise OSError("the disk is gone")
        return xs[start:stop]

    said = lambda: [record.getMessage() for record in caplog.records]
    read.fails = True
    with pytest.raises(OSError, match="gone"):
        run(jnp.zeros(()), read, length=6)
    assert said() == []
    read.fails = False
    done = run.status().steps
    run(jnp.zeros(()), read, length=6)
    run(jnp.zeros(()), read, length=6)
    before = f"Resumable goes on after {done} of 6 steps that were run before"
    after = "Resumable has all of 6 steps that were run before"
    where = f", by what is in {tmp_path}"
    assert said() == [before + where, after + where]


def test_decorator_and_in_a_module(tmp_path):
    @el.Resumable(directory=str(tmp_path), every=2)
    @el.Scan
    def total(h, x):
        return h + x, None

    assert total(0.0, jnp.ones(5))[0] == 5
    assert isinstance(
        jax.tree.leaves(el.Resumable(el.Scan(cell()), "d", every=1)), list
    )
