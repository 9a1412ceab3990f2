"""Slots in files."""

import errno
import functools
import os
import subprocess
import sys
import textwrap

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import eqloop as el
from eqloop.checkpointing.engine.slots import _spill_files
from eqloop.checkpointing.engine.slots._spill_files import SpillFiles

from ..asserts import assert_close
from ..derivatives import (
    batch_of,
    grad,
    gradient,
    name,
    of_batch,
    reverse_over_reverse,
)
from ..marks import slow

pytestmark = pytest.mark.sampled

H = jnp.linspace(-1, 1, 4)
XS = jnp.sin(jnp.arange(22 * 4.0)).reshape(22, 4)
DTYPES = ["bool_", "int4", "uint8", "bfloat16", "float16", "float8_e5m2", "complex64"]
OTHERS = [jnp.ones(2, getattr(jnp, name)) for name in DTYPES]


def step(carry, x):
    h, total, key, *others = carry
    key, of_step = jax.random.split(key)
    noise = jax.random.uniform(of_step, h.shape)
    for leaf in others:  # All of them are read, and so all are stored.
        real = leaf.real if jnp.iscomplexobj(leaf) else leaf
        noise += real[0].astype(h.dtype)
    h = jnp.tanh(1.1 * h + x + 0.1 * noise)
    return (h, total + h, key, *(leaf[::-1] for leaf in others)), h * x


def loss(others, schedule, h, xs):
    init = (h, jnp.zeros(4), jax.random.key(0), *others)
    (h, total, *_), ys = el.Scan(step, schedule=schedule)(init, xs)
    return jnp.sum(h * total) + jnp.sum(jnp.cos(ys))


def pulled_twice(f, h, xs):
    _, pull = jax.vjp(f, h, xs)
    return pull(jnp.float32(1)), pull(jnp.float32(2))


def in_a_loop(f, h, xs):
    """All iterations start the same, and differ in what they read."""

    def total(xs):
        body = lambda total, scale: (total + f(h, scale * xs), None)
        return jax.lax.scan(body, 0.0, jnp.array([1.0, 0.5, -1.0]))[0]

    return jax.grad(total)(xs)


def in_shard_map(f, h, xs):
    """Each device has files of its own, for carries that are not those of others."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    one = lambda h, xs: jax.lax.psum(f(h[0], xs), "i")
    specs = dict(in_specs=(PartitionSpec("i"), PartitionSpec()))
    total = jax.shard_map(one, mesh=mesh, **specs, out_specs=PartitionSpec())
    return jax.grad(total, (0, 1))(jnp.stack([h, 2 * h]), xs)


def hessian(f, h, xs):
    return jax.hessian(f)(h, xs)


MODES = [
    batch_of(grad, 0),
    in_shard_map,
    *map(slow, (grad, in_a_loop, pulled_twice, hessian, reverse_over_reverse)),
    *map(slow, (batch_of(batch_of(grad, 0), 1), of_batch(grad, 0))),
]
SCHEDULES = [
    el.Chunked(4),
    *map(slow, (el.Binomial(3), el.Recursive(3), el.Chunked(4, batch=4))),
]


@pytest.mark.parametrize("mode", MODES, ids=name)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_every_mode(tmp_path, schedule, mode):
    spill = el.Spill(schedule, tmp_path)
    run = lambda schedule: functools.partial(
        mode, functools.partial(loss, [], schedule)
    )
    found, expected = (jax.jit(run(each))(H, XS) for each in (spill, None))
    assert_close(found, expected, atol=1e-4)
    jax.effects_barrier()
    assert spill._files.count == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_jitted", [slow(False), True], ids=["op by op", "jit"])
def test_carries_of_every_kind(tmp_path, is_jitted):
    spill = el.Spill(el.Chunked(5), tmp_path)
    found = gradient(functools.partial(loss, OTHERS, spill))
    found = (jax.jit(found) if is_jitted else found)(H, XS)
    expected = jax.jit(gradient(functools.partial(loss, OTHERS, None)))(H, XS)
    assert_close(found, expected, atol=1e-4)


def test_loops_that_end_early(tmp_path):
    """No step is run, and no carry is written, behind the last one."""

    def loss(schedule, limit, h, xs):
        again = lambda h: jnp.sum(h) < limit
        body = lambda h, x: (h + 0.1 * jnp.cos(h * x), jnp.sin(h))
        loop = el.ScanWhile(again, body, max_steps=22, schedule=schedule)
        h, ys, _ = loop(h, xs)
        return jnp.sum(h**2) + jnp.sum(ys)

    for mode in (grad, batch_of(grad, 0)):
        spilled, plain = (
            jax.jit(
                lambda limit, s=s, m=mode: m(functools.partial(loss, s, limit), H, XS)
            )
            for s in (el.Spill(el.Chunked(2), tmp_path), el.Chunked(2))
        )
        for limit in (-9.0, 0.0, 1.5, 99.0):
            assert_close(spilled(limit), plain(limit), rtol=1e-5)


@pytest.mark.slow
def test_with_others_around():
    pair = el.Spill(el.Cast(el.Chunked(4), "bfloat16"), os.curdir)
    found = gradient(functools.partial(loss, [], pair))(H, XS)
    cast = el.Cast(el.Chunked(4), "bfloat16")
    expected = gradient(functools.partial(loss, [], cast))(H, XS)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_plan(tmp_path):
    init = (H, H, jax.random.key(0))
    scan = el.Scan(step, schedule=el.Spill(el.Chunked(4), tmp_path))
    plain = el.Scan(step, schedule=el.Chunked(4)).plan(init, XS)
    plan = scan.plan(init, XS)
    assert plan.slots == plain.slots
    # The loop is run once more, as the primal writes nothing.
    assert plan.evaluations == plain.evaluations + len(XS)


rows = st.integers(0, 4)
actions = st.lists(st.tuples(st.booleans(), st.integers(0, 1), rows), max_size=40)


@hypothesis.given(actions)
def test_files_hold_what_was_written_last(actions):
    files = SpillFiles(os.curdir)
    number = files.open(2)
    held = {}
    for i, (is_write, leaf, row) in enumerate(actions):
        if is_write:
            held[leaf, row] = np.full((3, 2), i, np.int16)
            files.write(number, leaf, row, held[leaf, row])
        elif (leaf, row) in held:
            assert np.array_equal(files.read(number, leaf, row), held[leaf, row])
    files.close(number)
    files.close(number)
    assert files.count == 0


def test_a_full_disk(tmp_path, monkeypatch):
    def refuse(self, row, array):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spill = el.Spill(el.Chunked(4), tmp_path)
    monkeypatch.setattr(_spill_files._LeafFile, "put", refuse)
    with pytest.raises(Exception, match=r"could not be stored in .*: No space left"):
        jax.block_until_ready(gradient(functools.partial(loss, [], spill))(H, XS))
    assert spill._files.count == 0
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_gone(tmp_path):
    directory = tmp_path / "carries"
    directory.mkdir()
    spill = el.Spill(el.Chunked(4), directory)
    directory.rmdir()
    with pytest.raises(Exception, match=r"could not be stored in .*: No such file"):
        jax.block_until_ready(gradient(functools.partial(loss, [], spill))(H, XS))
    assert spill._files.count == 0


def test_what_spill_takes(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for wrong, message in ((file, "is a file"), (tmp_path / "none", "does not exist")):
        with pytest.raises(NotADirectoryError, match=message):
            el.Spill(el.Chunked(4), wrong)
    with pytest.raises(TypeError, match="must be the path of a directory"):
        el.Spill(el.Chunked(4), 3.5)
    with pytest.raises(TypeError, match="Spill: `schedule` must be a schedule"):
        el.Spill(16, tmp_path)
    with pytest.raises(ValueError, match="so there are no slots"):
        el.Spill(el.StoreAll(), tmp_path)
    twice = el.Spill(el.Offload(el.Chunked(4)), tmp_path)
    with pytest.raises(ValueError, match="stored elsewhere already"):
        gradient(functools.partial(loss, [], twice))(H, XS)


def test_a_directory_that_is_not_writable(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(PermissionError, match="no file can be made"):
        el.Spill(el.Chunked(4), tmp_path)


@pytest.mark.parametrize("is_batched", [slow(False), True])
def test_64_bits_where_they_are_enabled_in_one_thread(is_batched, tmp_path):
    """JAX calls back in another one, if the program takes long enough."""

    def mixed_step(carry, x):
        h, z, count = carry
        z = lax.complex(jnp.cos(jnp.mean(h)), jnp.sin(jnp.mean(h))) * z
        h = jnp.sin(h + h @ h / 200 + 0.1 * x * (count % 7).astype(h.dtype) * z.real)
        return (h, z, count * 3), None

    def last(schedule, h):
        carry = (h, lax.complex(1.0, 0.5), jnp.array(2**40))
        return jnp.sum(
            jnp.square(el.Scan(mixed_step, schedule=schedule)(carry, xs)[0][0])
        )

    with jax.enable_x64(True):
        xs = jnp.linspace(0, 1, 12)
        h = jnp.sin(jnp.arange(200.0**2)).reshape(200, 200) / 20
        if is_batched:
            h = jnp.stack([h, h / 2])
        run = lambda schedule: jax.grad(functools.partial(last, schedule))
        across = jax.vmap if is_batched else lambda f: f
        schedule = el.Spill(el.Chunked(3), tmp_path)
        found, expected = (
            jax.jit(across(run(s)))(h) for s in (schedule, el.StoreAll())
        )
        assert found.dtype == jnp.float64
        assert np.max(np.abs(expected)) > 1e-3
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


LARGE = """
    import resource, sys
    import jax, jax.numpy as jnp
    import eqloop as el

    STEPS, SIZE = 256, 1_000_000  # carries of a gigabyte in all

    def loss(h, schedule):
        step = lambda h, x: (jnp.sin(h + x), None)
        return jnp.sum(el.Scan(step, schedule=schedule)(h, jnp.ones(STEPS))[0])

    schedule = el.Spill(el.Chunked(1), sys.argv[1])
    small = jax.grad(loss)(jnp.ones(10), schedule)
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    large = jax.grad(loss)(jnp.ones(SIZE), schedule)
    assert jnp.allclose(large[0], small[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2**30
    print("done")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits as on Linux")
def test_slots_of_four_times_the_memory_of_the_process(tmp_path):
    code = textwrap.dedent(LARGE)
    command = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout == "done\n", found.stderr
