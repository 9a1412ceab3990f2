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


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(jax.devices()[:4], ("rows",))


def spread(array, mesh, *axes):
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))


def test_spread_over_devices(mesh, tmp_path, monkeypatch):
    weight = spread(0.3 * jnp.sin(jnp.arange(64.0)).reshape(8, 8), mesh, None, "rows")
    cell = Cell(weight, jnp.full(8, 0.1))
    init = spread(jnp.ones(8), mesh, "rows")
    xs = np.tile(data()[:, :1], (1, 8))
    scan = el.CheckpointedScan(cell, base=2)

    def take(folder):
        run = el.Resumable(scan, folder, every=EVERY)
        return run.value_and_grad(loss, argnums=("f", "init", "xs"))(init, xs)

    found = take(tmp_path / "whole")
    gradient = eqx.filter_value_and_grad(lambda args: loss(*args[0](*args[1:])))
    assert_close(
        jax.tree.map(jnp.asarray, found),
        eqx.filter_jit(gradient)((scan, init, jnp.asarray(xs))),
    )
    # Each device has its part, in memory and on disk.
    carry, _ = el.Resumable(scan, tmp_path / "whole", every=EVERY)(init, xs)
    assert carry.sharding.is_equivalent_to(init.sharding, 1)
    assert found[1][0].f.weight.sharding.is_equivalent_to(weight.sharding, 2)
    folder = tmp_path / "whole/carries/000000000011"
    parts = {"0.0.npy", "0.2.npy", "0.4.npy", "0.6.npy", "state.json"}
    assert {path.name for path in folder.iterdir()} == parts
    # And so it is for a run that goes on.
    for n in (75, 160):
        with monkeypatch.context() as patch:
            on(Disk(dies_at=n), patch)
            with pytest.raises(Killed):
                take(tmp_path / "dies")
    assert numbers(take(tmp_path / "dies")) == numbers(found)
