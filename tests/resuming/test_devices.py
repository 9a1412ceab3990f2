"""Carries and parameters that are spread over several devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import eqloop as el

from .cases import EVERY, Cell, assert_close, data, loss, numbers
from .dying import Disk, Killed, on


def spread(array, mesh, *axes):
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))


def spread_over_four():
    """A scan whose weight and carry are spread, and the arguments of its call."""
    mesh = Mesh(jax.devices()[:4], ("rows",))
    weight = 0.3 * jnp.sin(jnp.arange(64.0)).reshape(8, 8)
    cell = Cell(spread(weight, mesh, None, "rows"), jnp.full(8, 0.1))
    xs = np.tile(data(2 * EVERY)[:, :1], (1, 8))
    return el.CheckpointedScan(cell, base=2), spread(jnp.ones(8), mesh, "rows"), xs


def dies_and_goes_on(take, folder, at, monkeypatch):
    for n in at:
        with monkeypatch.context() as patch:
            on(Disk(dies_at=n), patch)
            with pytest.raises(Killed):
                take(folder)
    return numbers(take(folder))


def test_spread_over_devices(tmp_path, monkeypatch):
    scan, init, xs = spread_over_four()
    take = lambda folder: el.Resumable(scan, folder, every=EVERY)(init, xs)
    found = take(tmp_path / "whole")
    assert_close(found, eqx.filter_jit(scan)(init, jnp.asarray(xs)))
    # Each device has its part, in memory and on disk.
    assert found[0].sharding.is_equivalent_to(init.sharding, 1)
    folder = tmp_path / "whole/carries/000000000008"
    parts = {"0.0.npy", "0.2.npy", "0.4.npy", "0.6.npy", "state.json"}
    assert {path.name for path in folder.iterdir()} == parts
    again = dies_and_goes_on(take, tmp_path / "dies", (60,), monkeypatch)
    assert again == numbers(found)


@pytest.mark.slow
def test_gradient_spread_over_devices(tmp_path, monkeypatch):
    scan, init, xs = spread_over_four()

    def take(folder):
        run = el.Resumable(scan, folder, every=EVERY)
        return run.value_and_grad(loss, argnums=("f", "init", "xs"))(init, xs)

    found = take(tmp_path / "whole")
    gradient = eqx.filter_value_and_grad(lambda args: loss(*args[0](*args[1:])))
    assert_close(
        jax.tree.map(jnp.asarray, found),
        eqx.filter_jit(gradient)((scan, init, jnp.asarray(xs))),
    )
    sharding = found[1][0].f.weight.sharding
    assert sharding.is_equivalent_to(scan.f.weight.sharding, 2)
    again = dies_and_goes_on(take, tmp_path / "dies", (60, 130), monkeypatch)
    assert again == numbers(found)
