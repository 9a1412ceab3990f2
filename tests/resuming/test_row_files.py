"""Arrays on disk that segments write their parts of."""

import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el
from eqloop.resuming import _disk
from eqloop.resuming._row_file import RowFile


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_outputs_of_size_zero(shape, axis, tmp_path):
    scan = el.Scan(lambda h, x: (h + x, jnp.zeros(shape) * h), out_axes=axis)
    xs = np.ones(5, np.float32)
    run = el.Resumable(scan, tmp_path, every=2)
    value, ys = run(0.0, xs)
    assert (value, ys.shape) == (5, scan(0.0, xs)[1].shape)
    loss = lambda carry, ys: 2 * carry + ys.sum()
    value, of_xs = run.value_and_grad(loss, argnums="xs")(0.0, xs)
    assert value == 10
    np.testing.assert_array_equal(of_xs, 2 * xs)


@pytest.mark.parametrize("axis", [0, 1])
def test_inputs_of_size_zero(axis, tmp_path):
    xs = np.ones((4, 0) if axis == 0 else (0, 4), np.float32)
    scan = el.Scan(lambda h, x: (h + x.sum(), x), in_axes=axis, out_axes=axis)
    run = el.Resumable(scan, tmp_path, every=3)
    assert run(0.0, xs)[1].shape == xs.shape
    loss = lambda carry, ys: carry + ys.sum()
    assert run.value_and_grad(loss, argnums="xs")(0.0, xs)[1].shape == xs.shape


def test_a_new_file_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(_disk, "_sync", synced.append)
    RowFile(tmp_path / "0.npy", (3,), np.dtype("f4")).make()
    assert synced == [tmp_path]
