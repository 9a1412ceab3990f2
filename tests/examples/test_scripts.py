"""Every example runs, from its command to its end, and prints what it is to print."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
SCRIPTS = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "notebooks.py"})
PATIENCE = 900  # seconds, on a machine that has much else to do

# What some need that the tests do not, and the extra that installs it.
NEEDS = {
    "diffrax_memory": ("diffrax", "diffrax"),
    "quickstart": ("astropy_iers_data", "examples"),
}

# What each must print, with a number that must not be larger.
SAYS = {
    "adaptive_solver": {r"whole period: (\S+) from the start": 1e-6},
    "diffrax_memory": {
        r"checkpoints=20\) +(\S+) MiB": 1,
        r"the gradients differ by (\S+)": 1e-4,
        r"error \S+, then (\S+) after": 0.04,
    },
    "fitted_ensemble": {r"in the end by (\S+)": 0.01},
    "killed_twice": {
        r"of a segment +(\S+) MiB": 1,
        r"the same gradient to the last bit: True\n(?:.*\n)+.*most harm +(\S+)": 150,
    },
    "language_model": {
        r"four at once, with the policy +(\S+) MiB": 5,
        r"in the end (\S+) nats a word": 1.5,
    },
    "long_simulation": {
        r"Budget\('64MiB'\) +(\S+) MiB": 64,
        r"error \S+ mV, then (\S+) mV": 2.1,
    },
    "quickstart": {r"the model errs by +(\S+) m": 2},
    "resumed_ocean": {r"the same to the last bit: True\n.* the last (\d+) days": 60},
    "sofo": {r"SOFO +step +99: error (\S+)": 0.2, r"Adam +step +99: error (\S+)": 0.4},
    "spiking_network": {r"update 20: error (\S+),": 0.4},
    "text_stream": {
        r"the whole text: error (\S+) nats": 1.5,
        r"memory grew by (\d+) MiB": 24,
    },
    "thousands_of_pendulums": {r"update 80: cost (\S+),": 0.1},
    "transformer": {r"step 249: +(\S+) nats": 1.5},
}


def test_all_are_known():
    assert [script.stem for script in SCRIPTS] == sorted(SAYS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_says_what_it_prints_and_how_to_run_it(script):
    text = script.read_text()
    command = rf"python -m pip install -e \S+ && python examples/{script.name}\n"
    assert re.search(command, text)
    assert "It prints " in text


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script(script):
    package, extra = NEEDS.get(script.stem, ("eqloop", ""))
    if not importlib.util.find_spec(package):
        pytest.skip(f"it needs {package}, of the extra `{extra}`")
    # The figures are drawn, and nowhere shown.
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    run = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    for pattern, most in SAYS[script.stem].items():
        found = re.search(pattern, run.stdout)
        assert found, run.stdout
        assert float(found[1]) <= most, pattern
