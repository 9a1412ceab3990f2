"""The example that trains on several processes: as on one, and after a process died."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "multiprocess"
STEPS, EVERY, KILLED_AT = 40, 10, 25
HEARTBEAT = 10  # seconds
PATIENCE = 300  # seconds that a run may take before it is said to hang


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train, launch = example("train"), example("launch")


def command(directory: Path) -> list[str]:
    return [
        *(str(FOLDER / "train.py"), "--batch", "16"),
        *("--steps", str(STEPS), "--every", str(EVERY)),
        *("--checkpoints", str(directory), "--timeout", str(HEARTBEAT)),
    ]


def settings() -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return dict(env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def losses(output: str) -> dict[int, float]:
    """The losses that a run printed, by step."""
    lines = re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def weights(directory: Path) -> list[np.ndarray]:
    """The parameters, and the state of the optimiser, at the end of a run."""
    mesh = Mesh(jax.devices()[:1], ("batch",))
    state, step = train.Checkpoints(directory, EVERY).restore(train.new_state(mesh))
    assert step == STEPS
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(state, eqx.is_array))]


def test_a_batch_is_the_same_on_any_devices():
    def value_and_gradient(count):
        mesh = Mesh(jax.devices()[:count], ("batch",))
        model, _ = train.new_state(mesh)
        batch = train.load_batch(3, 16, mesh)
        assert len(batch[0].sharding.device_set) == count
        return eqx.filter_jit(eqx.filter_value_and_grad(train.loss))(model, batch, mesh)

    for a, b in zip(
        *(jax.tree.leaves(value_and_gradient(n)) for n in (1, 8)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The losses and the parameters of a run by one process."""
    directory = tmp_path_factory.mktemp("one")
    run = subprocess.run(
        [sys.executable, *command(directory)],
        timeout=PATIENCE,
        check=True,
        **settings(),
    )
    return losses(run.stdout), weights(directory)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (2, 0), (4, 3)])
def test_a_process_dies_and_the_run_goes_on(count, victim, one_process, tmp_path):
    # The run ends, on all processes, when one of them is killed.
    processes = launch.start(count, *command(tmp_path), **settings())
    printed = ""
    while KILLED_AT not in losses(printed):
        line = processes[0].stdout.readline()
        assert line, "the run ended too early"
        printed += line
    processes[victim].kill()
    rest, *_ = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes.pop(victim) == -signal.SIGKILL
    assert all(code != 0 for code in codes)
    first = losses(printed + rest)
    assert max(first) < STEPS - 1

    # Started again, it goes on from a checkpoint.
    processes = launch.start(count, *command(tmp_path), **settings())
    output, *_ = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    second = losses(output)
    assert f"restored step {min(second)}" in output
    assert min(second) >= EVERY

    # All in all it is the run of one process.
    expected_losses, expected_weights = one_process
    for found in (first, second):
        expected = [expected_losses[step] for step in found]
        np.testing.assert_allclose(list(found.values()), expected, rtol=0, atol=1e-5)
    assert (first | second).keys() == expected_losses.keys() == set(range(STEPS))
    for found, expected in zip(weights(tmp_path), expected_weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
