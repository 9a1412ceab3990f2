"""What cannot be run is said to be so, and nothing on disk is touched by it."""

import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqloop as el
from eqloop.resuming import _disk

from .cases import EVERY, Example, cell, data
from .dying import Full, on


def step(h, x):
    return h * 0.5 + x, h


def example(f=step, **settings) -> Example:
    return Example(el.Scan(f, **settings), jnp.zeros(3), data())


def content(folder: Path) -> dict[str, bytes]:
    """All files, but for the lock, which says who was there last."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in files if p.name != "lock"
    }


def refused(error, message, folder, call):
    """That a call raises this, and changes nothing."""
    before = content(folder)
    with pytest.raises(error, match=message) as raised:
        call()
    assert content(folder) == before
    return str(raised.value)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A directory with a run that has come to its end, and its gradient."""
    folder = tmp_path_factory.mktemp("original")
    example().run(folder)
    example().gradient(folder, "init")
    return folder


@pytest.fixture
def finished(original, tmp_path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(original, tmp_path / "run")


# Settings.


@pytest.mark.parametrize(
    ("scan", "message"),
    [
        (el.SlicedScan(step, step=2), "an `el.Scan` or .* not SlicedSc"),
        (el.ForLoop(jnp.sin), "not ForLoop. A loop without a carry"),
        (step, "not <function step"),
    ],
)
def test_what_is_no_scan(scan, message):
    with pytest.raises(TypeError, match=message):
        el.Resumable(scan, "d", every=4)


def test_loss_and_argnums(tmp_path):
    run = el.Resumable(el.Scan(step), tmp_path, every=EVERY)
    with pytest.raises(ValueError, match=r'`argnums` must be "f" for the parameters'):
        run.value_and_grad(lambda carry, ys: 0.0, argnums=2)
    with pytest.raises(ValueError, match="each argument can be given once, and at lea"):
        run.vjp(jnp.zeros(3), data(), argnums=("xs", 1))
    with pytest.raises(
        TypeError, match="must return a real floating-point scalar, but"
    ):
        run.value_and_grad(lambda carry, ys: carry)(jnp.zeros(3), data())
    with pytest.raises(
        TypeError, match="with `has_aux=True` the loss must return a pai"
    ):
        run.value_and_grad(lambda carry, ys: 0.0, has_aux=True)(jnp.zeros(3), data())


def test_cotangents(tmp_path):
    run = el.Resumable(el.Scan(step), tmp_path, every=EVERY)
    _, pull = run.vjp(jnp.zeros(3), data())
    with pytest.raises(ValueError, match=r"`pull` takes a pair `\(ct_carry, ct_ys\)`"):
        pull(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"at ct_carry: .* was returned, the cotange"):
        pull(({"h": 1}, None))
    with pytest.raises(
        TypeError, match=r"the cotangent of carry, which is float32\[3\]"
    ):
        pull((jnp.zeros(2), None))


# Calls.


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x)[0].sum())],
    ids=["jit", "vmap", "grad"],
)
def test_in_a_transform(transform, tmp_path):
    run = el.Resumable(el.Scan(step), tmp_path / "d", every=EVERY)
    with pytest.raises(
        TypeError, match="it is called from Python, not in a function t"
    ):
        transform(lambda x: run(x[0], x))(jnp.zeros((2, 3, 3)))
    with pytest.raises(
        TypeError, match="it is called from Python, not in a function t"
    ):
        jax.jit(lambda: run(jnp.zeros(3), data()))()
    assert not (tmp_path / "d").exists()


def test_arguments(tmp_path):
    run = el.Resumable(el.Scan(step), tmp_path / "d", every=EVERY)
    with pytest.raises(
        ValueError, match="Resumable: no leaf is scanned over, so the nu"
    ):
        run(jnp.zeros(3), lambda start, stop: data()[start:stop])
    with pytest.raises(
        ValueError, match="Resumable: these lengths must all be the same"
    ):
        run(jnp.zeros(3), (data(3), data(4)))
    with pytest.raises(
        ValueError, match="Resumable: `key` must be one key, which is sp"
    ):
        run(jnp.zeros(3), data(), key=jr.split(jr.key(0), 4))
    with pytest.raises(TypeError, match="Scan: the carry must keep its shape"):
        el.Resumable(el.Scan(lambda h, x: (h[:1], None)), tmp_path / "d", every=1)(
            jnp.zeros(3), data()
        )
    assert not (tmp_path / "d").exists()


def test_references(tmp_path):
    ref = jax.new_ref(jnp.zeros(3))

    def writes(h, x):
        ref[...] = x
        return h, None

    run = el.Resumable(el.Scan(writes), tmp_path / "d", every=EVERY)
    with pytest.raises(TypeError, match="f closes over a reference"):
        run(jnp.zeros(3), data())
    with pytest.raises(TypeError, match=r"\(init, xs\)\[0\] is a reference"):
        run(ref, data())


def test_a_function_that_makes_too_few_or_others(tmp_path):
    run = el.Resumable(el.Scan(step), tmp_path / "d", every=EVERY)
    few = lambda start, stop: data()[start : stop - 1]
    with pytest.raises(
        ValueError, match="called for the steps 0 to 4, which are 4, but"
    ):
        run(jnp.zeros(3), few, length=11)
    others = lambda start, stop: data()[start:stop].astype("f4" if start < 8 else "i4")
    with pytest.raises(
        ValueError, match=r"returned xs: int32\[3,3\] for the steps 8 to 11"
    ):
        run(jnp.zeros(3), others, length=11)
    # What was computed before the function failed is kept.
    assert run.status().steps == 8


def test_a_function_that_fails(tmp_path):
    def fails(start, stop):
        if start == 8:
            raise ZeroDivisionError("no such rows")
        return data()[start:stop]

    run = el.Resumable(el.Scan(step), tmp_path, every=EVERY)
    with pytest.raises(ZeroDivisionError, match="no such rows"):
        run(jnp.zeros(3), fails, length=11)
    assert run.status().steps == 8


# Other arguments than those of the run in the directory.


def other_step(h, x):
    return h * 0.25 + x, h


rate = np.float32(0.5)


@pytest.mark.parametrize(
    ("call", "difference"),
    [
        (lambda d: example().run(d, every=5), "every: 4 there, 5 now"),
        (lambda d: example().run(d, ys="directory"), "ys: memory there, directory now"),
        (lambda d: example(reverse=True).run(d), "scan.reverse: False there, True now"),
        (
            lambda d: example(other_step).run(d),
            r"f: mul\(float32\[3\], 0.5\) at .*test_wrong_calls.py:.* \(step\) there, "
            r"mul\(float32\[3\], 0.25\) at .* \(other_step\) now",
        ),
        (
            lambda d: Example(el.Scan(step), jnp.ones(3), data()).run(d),
            r"init: float32\[3\], other values",
        ),
        (
            lambda d: Example(el.Scan(step), jnp.zeros(3), data() + 1).run(d),
            r"xs: float32\[11,3\], other values",
        ),
        (
            lambda d: Example(el.Scan(step), jnp.zeros(3), data(12)).run(d),
            r"length: 11 there, 12 now\n.*xs: float32\[11,3\] there, float32\[12,3\]",
        ),
        (
            lambda d: Example(
                el.Scan(step), jnp.zeros(3), data(), {"length": 11}
            ).gradient(d, "xs"),
            "another gradient, which differs in\n  argnums: init there, xs now",
        ),
    ],
)
def test_another_run(call, difference, finished):
    refused(ValueError, difference, finished, lambda: call(finished))


def make_steps(factor, array):
    def helper(h):
        return h * factor

    def same_name(h, x):
        return helper(h) + x * array, h

    return same_name


def test_another_source(tmp_path):
    array = np.ones(3, np.float32)
    example(make_steps(0.5, array)).run(tmp_path)
    example(make_steps(0.5, array)).run(tmp_path)  # the same, made anew
    again = lambda *made: lambda: example(make_steps(*made)).run(tmp_path)
    message = r"f: mul\(float32\[3\], 0.5\) at .* there, mul\(float32\[3\], 0.7\) at"
    refused(ValueError, message, tmp_path, again(0.7, array))
    message = r"f, constant 0: float32\[3\], other values"
    refused(ValueError, message, tmp_path, again(0.5, array * 2))


def test_another_module(tmp_path):
    Example(el.Scan(cell()), jnp.zeros(3), data()).run(tmp_path)
    other = eqx.tree_at(lambda c: (c.shift, c.name), cell(), (jnp.ones(3), "other"))
    again = lambda: Example(el.Scan(other), jnp.zeros(3), data()).run(tmp_path)
    message = refused(ValueError, "holds another run, which dif", tmp_path, again)
    assert "f.shift: float32[3], other values" in message
    assert "f.name: 'cell' there, 'other' now" in message


def test_another_loss(finished):
    run = el.Resumable(el.Scan(step), finished, every=EVERY)
    take = run.value_and_grad(lambda carry, ys: carry.sum(), argnums="init")
    again = lambda: take(jnp.zeros(3), data())
    message = (
        r"another gradient, which differs in\n  cotangent of carry: .*, other values\n"
        r"  cotangent of ys: float32\[11,3\] there, None now\nNothing in it was changed"
    )
    refused(ValueError, message, finished, again)
    # As it says, the loop is not run again if the folder is removed.
    _disk.remove(finished / "gradient")
    assert again()[1].shape == (3,)


# What is in the directory.


def test_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("valuable")
    call = lambda: example().run(tmp_path)
    refused(ValueError, "holds something else: it has no run.json", tmp_path, call)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(ValueError, match="holds something else"):
        el.Resumable(el.Scan(step), tmp_path, every=1).status()


def test_another_version(finished):
    path = finished / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    message = "is of format 'eqloop.Resumable', version 2; this eqloop .* reads"
    refused(ValueError, message, finished, lambda: example().run(finished))


@pytest.mark.parametrize(
    ("by", "what"),
    [("jax", "program"), ("eqloop", "constants"), ("python", "functions")],
)
def test_another_version_traces_or_compiles_otherwise(by, what, finished):
    path = finished / "run.json"
    old = json.loads(path.read_text())
    other = {"program": ["0 00 sin(float32[3])"]}.get(what, {"f": ["code", "00"]})
    path.write_text(json.dumps(old | {what: other}))
    refused(ValueError, "  f: ", finished, lambda: example().run(finished))
    written_by = old["written_by"] | {by: "0.1"}
    path.write_text(json.dumps(old | {what: other, "written_by": written_by}))
    example().run(finished)
    arguments = Example(el.Scan(step), jnp.ones(3), data())
    refused(ValueError, "init: float32", finished, lambda: arguments.run(finished))


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"format": "eqloop.Resumable", "ver'])
def test_damaged_record(text, finished):
    (finished / "run.json").write_text(text)
    refused(
        ValueError,
        "is damaged: it is not a JSON",
        finished,
        lambda: example().run(finished),
    )


def every_key(content, above=()):
    """The places of all keys in the content of a file."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in pairs:
        if isinstance(content, dict):
            yield (*above, key)
        if isinstance(value, dict | list):
            yield from every_key(value, (*above, key))


@pytest.mark.parametrize(
    "name",
    ["run.json", "gradient/gradient.json", "carries/000000000011/state.json"],
)
def test_incomplete_records(name, finished):
    path = finished / name
    whole = path.read_text()
    # These are there for other readers, and nothing is compared with them.
    unread = {"files", "steps", "path"}
    # Neither are cotangents if they are of the same loss.
    unread |= {"arguments", "loss"} if "gradient" in name else set()
    for *above, key in every_key(json.loads(whole)):
        if unread & {*above, key}:
            continue
        content = json.loads(whole)
        functools.reduce(lambda at, k: at[k], above, content).pop(key)
        path.write_text(json.dumps(content))
        call = lambda: example().gradient(finished, "init")
        refused(ValueError, "Resumable: .* (damaged|format|another)", finished, call)
    path.write_text(whole)
    example().gradient(finished, "init")


@pytest.mark.parametrize("line", [None, "sin", ["0 00 sin"]])
def test_a_program_that_cannot_be_read(line, finished):
    path = finished / "run.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"program": [line]}))
    message = "run.json is damaged: it has no program"
    refused(ValueError, message, finished, lambda: example().run(finished))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("carries/000000000011/0.npy", "it has 139 of 140 bytes"),
        ("ys/0.npy", "it should have 260 bytes .* but it has 259 bytes"),
        ("gradient/cotangents/000000000000/0.npy", "it has 139 of 140 bytes"),
    ],
)
def test_a_file_cut_short(file, message, finished):
    path = finished / file
    os.truncate(path, path.stat().st_size - 1)
    call = lambda: example().gradient(finished, "init")
    refused(ValueError, f"{file} is damaged: {message}", finished, call)


def test_a_file_with_other_bytes(finished):
    path = finished / "carries/000000000011/0.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    call = lambda: example().run(finished)
    refused(ValueError, "is damaged: its checksum is another one", finished, call)
    # As it says, without that folder it goes on from the state before it.
    before = example().expected()
    _disk.remove(path.parent)
    np.testing.assert_allclose(example().run(finished)[0], before[0], rtol=1e-6)


def test_state_of_something_else(finished):
    path = finished / "carries/000000000011/state.json"
    state = json.loads(path.read_text())
    for arrays, message in (
        ([], "it has 0 arrays"),
        ([state["arrays"][0] | {"dtype": "int8"}], "carry is of another type"),
    ):
        path.write_text(json.dumps(state | {"arrays": arrays}))
        refused(ValueError, message, finished, lambda: example().run(finished))


def test_files_that_are_gone(finished):
    (finished / "ys/0.npy").unlink()
    call = lambda: example().run(finished)
    message = "ys/0.npy could not be read: No such file or directory"
    refused(FileNotFoundError, message, finished, call)


# The disk.


def test_directory_that_is_read_only(tmp_path, monkeypatch):
    # Permissions do not bind the user that tests may be run by, so the disk says it.
    on(Full(0, errno.EROFS), monkeypatch)
    with pytest.raises(OSError, match="could not be made: Read-only file system"):
        example().run(tmp_path / "d")
    monkeypatch.undo()
    on(Full(0, errno.EACCES), monkeypatch)
    with pytest.raises(PermissionError, match="could not be made: Permission denied"):
        example().run(tmp_path / "d")


def test_lock_that_cannot_be_made(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(
        IsADirectoryError, match="lock could not be opened: Is a direct"
    ):
        example().run(tmp_path)


def test_two_runs(tmp_path):
    """One waits in a segment for the other, which is to fail."""
    started, goes_on = threading.Event(), threading.Event()

    def xs(start, stop):
        if start == 8:
            started.set()
            assert goes_on.wait(60)
        return data()[start:stop]

    run = el.Resumable(el.Scan(step), tmp_path, every=EVERY)
    results = []
    first = threading.Thread(
        target=lambda: results.append(run(jnp.zeros(3), xs, length=11))
    )
    first.start()
    assert started.wait(60)
    message = (
        rf"another run is in {re.escape(str(tmp_path))}: process {os.getpid()} on "
    )
    with pytest.raises(RuntimeError, match=message):
        run(jnp.zeros(3), xs, length=11)
    # How far it is can be asked.
    assert run.status().length == 11
    goes_on.set()
    first.join()
    assert results[0][1].shape == (11, 3)


@pytest.mark.slow
def test_two_processes(tmp_path):
    code = (
        "import sys, time, jax.numpy as jnp, eqloop as el\n"
        "scan = el.Scan(lambda h, x: (h + x, None))\n"
        f"run = el.Resumable(scan, {str(tmp_path)!r}, every=1)\n"
        "def xs(start, stop):\n"
        "    print('reads', flush=True)\n"
        "    time.sleep(60 if start else 0)\n"
        "    return jnp.ones(stop - start)\n"
        "run(0.0, xs, length=3)\n"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(Path(el.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as first:
        assert [first.stdout.readline() for _ in range(3)]
        second = subprocess.run(command, capture_output=True, env=env, text=True)
        assert f"another run is in {tmp_path}: process {first.pid} on" in second.stderr
        first.kill()
