"""What `memory_profile` tells of whole programs, beside XLA's own numbers."""

import inspect
import os
import pickle
import re
import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqloop as el
from eqloop._compiled._wire import Message
from eqloop.oom import __main__ as oom

from ..asserts import assert_raises
from ..elsewhere.compiler import is_installed
from .programs import CASES, Case, floats, long_softmax, scanned, trains

ASSIGNED = ("stored", "temporary")


def zeros(args: Any) -> Any:
    is_type = lambda x: isinstance(x, jax.ShapeDtypeStruct)
    make = lambda x: jnp.zeros(x.shape, x.dtype) if is_type(x) else x
    return jax.tree.map(make, args)


def assigned(profile: el.MemoryProfile) -> int:
    return sum(one.nbytes for one in profile.alive if one.kind in ASSIGNED)


def check(case: Case, profile: el.MemoryProfile) -> None:
    """Checks what is said of the largest array, and that the table can be read."""
    largest = profile.largest
    assert largest is not None
    assert largest.place is not None
    assert largest.place.line in case.lines
    assert largest.place.file.endswith("programs.py")
    assert largest.kind in case.kinds.split()
    assert (largest.loop.name if largest.loop else None) == case.loop
    if case.library:
        assert largest.library is not None
        assert largest.library.file.endswith(case.library)
    lines = str(profile).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80


@pytest.fixture
def as_users_have_it():
    """JAX's own promotion of types, which Optax takes for granted."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_xla_assigned_and_names_the_line(name: str):
    case = CASES[name]
    profile = el.memory_profile(case.f)(*case.args)
    compiled = el.Jit(case.f, donate="none").lower(*zeros(case.args)).compile()
    if name == "optax":  # It is compiled by itself, with what it donates.
        compiled = case.f.lower(*case.args).compile()  # type: ignore
    memory = compiled.memory_analysis()
    assert profile.peak_bytes == pytest.approx(memory.temp_size_in_bytes, rel=0.01)
    assert profile.peak_bytes * 0.95 <= assigned(profile) <= profile.peak_bytes
    constants = sum(one.nbytes for one in profile.alive if one.kind == "constant")
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    assert profile.total_bytes - constants == pytest.approx(total, rel=0.01)
    assert profile.total_bytes == sum(one.nbytes for one in profile.alive)
    check(case, profile)


def test_a_scan_has_its_loop_and_what_a_schedule_would_take():
    profile = el.memory_profile(scanned)(*CASES["scan"].args)
    ((loop, stored),) = profile.loops.items()
    assert loop.steps == 512
    assert stored >= 512 * 16 * 4
    assert any("el.Reschedule" in text for text in profile.advice)
    w, xs = CASES["scan"].args
    step = lambda w: lambda h, x: (jnp.tanh(w @ h + x), None)
    stored = lambda w, xs: jax.grad(lambda w: jnp.sum(el.Scan(step(w))(xs[0], xs)[0]))(
        w
    )
    (text, *_) = el.memory_profile(stored)(w, xs).advice
    assert "stores all residuals: give it schedule=el.Recursive(16)" in text
    planned = lambda w, xs: jax.grad(
        lambda w: jnp.sum(el.CheckpointedScan(step(w))(xs[0], xs)[0])
    )(w)
    other = el.memory_profile(planned)(w, xs)
    assert other.peak_bytes < profile.peak_bytes / 2
    assert not any("Reschedule" in text for text in other.advice)
    change = profile.compare(other)
    assert (change.before, change.after) == (profile.peak_bytes, other.peak_bytes)
    assert change.lines[0].before > change.lines[0].after
    assert "stored" in str(change)


@pytest.mark.parametrize("kernel", [None, jnp.ones((3, 3, 4, 4))], ids=["", "conv"])
@pytest.mark.parametrize(
    "schedule", [el.StoreAll(), el.Chunked(8), el.Recursive(4)], ids=repr
)
def test_a_loop_has_the_line_that_calls_it(schedule: Any, kernel: Any):
    def step(h: Any, x: Any) -> Any:
        return jnp.sin(h if kernel is None else jax.lax.conv(h, kernel, (1, 1), "SAME"))

    def loss(init: Any, xs: Any) -> Any:
        def loop(h: Any) -> Any:
            scan = el.Scan(lambda h, x: (step(h, x), None), schedule=schedule)
            return scan(h, xs)[0]  # here

        return jnp.sum(loop(init))

    lines, first = inspect.getsourcelines(loss)
    (here,) = [first + i for i, x in enumerate(lines) if x.endswith("# here\n")]
    profile = el.memory_profile(jax.grad(loss))(jnp.ones((1, 3, 4, 4)), jnp.ones(64))
    loops = {loop for loop in profile.loops if loop.name == "Scan"}
    assert loops
    assert {loop.place.line for loop in loops} == {here}


def test_a_table_has_whole_sentences_and_says_how_many_more_there_are():
    profile = el.memory_profile(scanned)(*CASES["scan"].args)
    first, *others = profile.advice
    lines = " ".join(str(profile).splitlines())
    assert f"help: {first}" in lines
    assert len(str(profile).splitlines()) <= 10
    kept = pickle.loads(pickle.dumps(profile))
    assert kept == profile
    assert str(kept) == str(profile)
    assert kept.compare(profile).lines == ()
    left = [text for text in others if text not in lines]
    assert (f"; {len(left)} more: .advice" in lines) == bool(left)


@pytest.mark.usefixtures("as_users_have_it")
def test_advice_knows_of_rows_of_precision_and_of_a_fit():
    def head(w, x):
        return jnp.mean(jax.nn.logsumexp(x @ w, axis=1))

    def deep(w, x):
        for _ in range(8):
            x = jnp.sin(jnp.tanh(x @ w))
        return jnp.sum(x)

    args = jnp.ones((8, 2000)), jnp.ones((64, 8))
    texts = " ".join(el.memory_profile(jax.grad(head))(*args).advice)
    assert_says("f32[64,2000] … rows at a time", texts)
    square = jnp.ones((32, 32)), jnp.ones((256, 32))
    texts = " ".join(el.memory_profile(jax.grad(deep))(*square).advice)
    assert_says("el.Fit, around … bfloat16", texts)
    assert "el.Cast" not in texts
    fitted = el.memory_profile(jax.grad(el.Fit(deep, "1MiB")))(*square)
    texts = " ".join(fitted.advice)
    assert "smaller budget" in texts
    assert "el.Fit, around" not in texts


def test_there_is_no_advice_that_brings_nothing():
    row = jnp.ones(4096)
    for f in (jnp.sum, lambda x: jnp.sum(x) + 1):
        assert el.memory_profile(f)(row).advice == ()
    (text,) = el.memory_profile(lambda x: x + 1)(row).advice
    assert text.startswith("donating x")


def test_of_what_comes_and_goes_in_a_step_there_is_advice():
    def step(h, x):
        scores = jax.nn.softmax(jnp.outer(h, h) + x)
        return jnp.sort(scores, axis=0) @ h, None

    w, xs = jnp.ones(200), jnp.ones(8)
    carry = lambda h, xs: jax.lax.scan(step, h, xs)[0]
    assert_says(
        "temporary, most of it at test_memory_profile.py: … (step): el.Remat around a",
        " ".join(el.memory_profile(carry)(w, xs).advice),
    )


def test_what_comes_and_goes_is_said_to_be_of_the_line_that_takes_most_of_it():
    def pairs(x):
        return jnp.outer(x, x)

    def total(x):
        parts = [jnp.sort(pairs(x + i)) for i in range(3)]
        return jnp.max(parts[0] @ parts[1] @ parts[2])

    profile = el.memory_profile(total)(jnp.ones(256))
    first = next(line for line in str(profile).splitlines() if "temporary" in line)
    (line,) = re.findall(r"test_memory_profile\.py:\d+ \(\w+\)", first)
    assert_says(f"is temporary, most of it at {line}", " ".join(profile.advice))


def test_long_names_leave_the_other_columns_whole():
    def a_function_with_a_name_that_is_long_enough(parameters):
        x = parameters["a_dictionary_key_of_some_length"]["weights"]
        return jnp.sum(jnp.sort(jnp.outer(x, x), axis=0))

    weights = {"a_dictionary_key_of_some_length": {"weights": jnp.ones(300)}}
    profile = el.memory_profile(a_function_with_a_name_that_is_long_enough)(weights)
    head, columns, *lines = str(profile).splitlines()
    assert max(map(len, [head, columns, *lines])) <= 80
    assert head.startswith("…")
    assert head.endswith(", on cpu")
    assert columns.split() == ["memory", "kind", "what", "line"]
    assert any("…" in line and "['weights']" in line for line in lines)
    assert any("test_memory_profile.py:" in line for line in lines)


def assert_says(said: str, text: str) -> None:
    at = 0
    for part in said.split(" … "):
        at = text.find(part, at)
        assert at >= 0, (part, text)


@pytest.mark.usefixtures("as_users_have_it")
def test_inputs_have_their_paths_and_can_be_donated():
    case = CASES["optax"]
    plain = el.memory_profile(trains)(*case.args)
    given = el.memory_profile(case.f)(*case.args)
    names = {one.name for one in plain.alive if one.kind == "input"}
    assert {"params['up']", "x"} <= names
    assert any("donating" in text for text in plain.advice)
    assert not any("donating" in text for text in given.advice)
    donated = {one.name for one in given.alive if one.is_donated}
    assert "params['up']" in donated
    assert "x" not in donated
    assert given.total_bytes < plain.total_bytes


def test_bytes_are_those_of_one_device():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    placed = lambda x, *spec: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec(*spec))
    )
    w, x = placed(jnp.zeros((64, 512))), placed(jnp.zeros((256, 64)), "data")

    def step(w, x):
        def loss(w):
            hidden = jnp.tanh(x @ w)
            return jnp.sum(jnp.sin(hidden) ** 2)

        return w - jax.grad(loss)(w)

    profile = el.memory_profile(step)(w, x)
    memory: Any = jax.jit(step).lower(w, x).compile().memory_analysis()
    assert profile.peak_bytes == memory.temp_size_in_bytes
    of_x = next(one for one in profile.alive if one.name == "x")
    assert of_x.nbytes == x.nbytes // 4
    assert of_x.shape == (64, 64)


def test_what_is_found_in_a_cache_is_profiled(tmp_path):
    f = lambda x: jnp.sum(jnp.sort(jnp.sin(x[:, None] * x[None]), axis=0))
    code = """
        import jax, jax.numpy as jnp, eqloop as el
        f = lambda x: jnp.sum(jnp.sort(jnp.sin(x[:, None] * x[None]), axis=0))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for _ in range(2):
            print(el.memory_profile(f)(jnp.ones(64)).peak_bytes)
            jax.clear_caches()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True,
        env={**_environment(), "JAX_COMPILATION_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    here = el.memory_profile(f)(jnp.ones(64)).peak_bytes
    assert done.stdout.split() == [str(here)] * 2


def test_a_script_that_runs_out_of_memory_is_told_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, jax, jax.numpy as jnp\n"
        "@jax.jit\n"
        "def step(x):\n"
        "    wide = jnp.broadcast_to(x, (10**6, 10**5, 100)) * 2\n"
        "    return jnp.sum(jnp.sort(wide, axis=0)[::2])\n"
        "print(__name__, sys.argv[1:])\n"
        "jax.jit(jnp.sin)(jnp.ones(8))\n"
        "print(step(jnp.ones(100)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "eqloop.oom", str(script), "--batch", "4"],
        capture_output=True, text=True, env=_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.split("\n")[0] == "__main__ ['--batch', '4']"
    assert "RESOURCE_EXHAUSTED" in done.stderr
    assert "eqloop.oom: the program of that size" in done.stderr
    assert re.search(r"step: [\d.]+ TiB at the peak", done.stderr)
    assert "train.py:4 (step)" in done.stderr or "train.py:5 (step)" in done.stderr


# What JAX says on a GPU, a TPU and a CPU, and what comes of memory of the host.
MESSAGES = {
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4096 bytes.": 4096,
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8.00GiB.": 8 * 2**30,
    "RESOURCE_EXHAUSTED: Failed to allocate request for 4.0KiB (4096B) on device": 4096,
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory"
    " space hbm. Used 21.95G of 15.48G hbm.": int(21.953 * 2**30),
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 15.65G."
    " That was not possible.": int(15.648 * 2**30),
    "INTERNAL: Error dispatching computation: Out of memory allocating 96 bytes.": 96,
    "INTERNAL: Failed to allocate 98697216 bytes for new constant": 98697216,
    "INTERNAL: Failed to load in-memory CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of mem": 0,
    "UNKNOWN: CUBLAS_STATUS_ALLOC_FAILED": 0,
    "std::bad_alloc": 0,
    "Unable to allocate 8.00 GiB for an array with shape (1073741824,)": 8 * 2**30,
}


@pytest.mark.parametrize("text", MESSAGES)
def test_what_is_said_where_there_is_no_memory(text):
    size, error = MESSAGES[text], RuntimeError(text)
    assert oom._OUT_OF_MEMORY.search(text)
    assert not size or oom._is_told(size, text)
    assert not oom._is_told(97, text)
    noted, caused, later = RuntimeError("step 3"), KeyError("x"), ValueError("y")
    noted.add_note(text)
    caused.__cause__, later.__context__ = error, error
    both = ExceptionGroup("all", [KeyError(), error])
    for found in (error, noted, caused, later, both):
        assert text in oom._said(found)


def test_other_errors_say_something_else():
    others = ValueError("shapes (3,) and (4,)"), RuntimeError("INTERNAL: no")
    for error in (*others, SystemExit(1)):
        assert not oom._OUT_OF_MEMORY.search(oom._said(error))
    assert oom._OUT_OF_MEMORY.search(oom._said(MemoryError()))


@pytest.mark.parametrize("ending", ["raise", "sys.exit(3)", "wait"])
def test_a_cpu_runs_out_of_memory_while_it_is_waited_for(tmp_path, ending):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, jax, jax.numpy as jnp\n"
        "def step(h, x):\n"
        "    return jnp.tanh(h + x), h\n"
        "run = jax.jit(lambda h, xs: jax.lax.scan(step, h, xs)[1].sum(0)[::2])\n"
        "try:\n"
        "    done = run(jnp.zeros(2**25), jnp.zeros(2**18))\n"
        "    print(jax.block_until_ready(jnp.sin(done)))\n"
        "except Exception:\n"
        f"    {ending.replace('wait', 'raise KeyError()')}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "eqloop.oom", str(script)],
        capture_output=True, text=True, env=_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == (3 if "exit" in ending else 1)
    assert "eqloop.oom: the program of that size" in done.stderr, done.stderr
    assert "train.py:3 (step)" in done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_it_is_drawn():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    profile = el.memory_profile(long_softmax)(*CASES["softmax"].args)
    ax = profile.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert any("long_softmax" in x or "loss" in x for x in labels)
    assert any(label.startswith("peak") for label in labels)
    assert profile.plot(ax) is ax
    pyplot.close("all")


def test_a_refusal_names_the_largest_array():
    def loss(w, head, x):
        logits = jnp.tanh(x @ w) @ head
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])  # here

    types = floats(16, 8), floats(8, 4096), floats(32, 16)
    lines = Case(loss, types, "").lines
    said = f"ValueError: Fit … The largest array in it is f32[1,4096] … :{lines[0]} "
    assert_raises(lambda: el.Fit(loss, "10KiB").plan(*types), said)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["h100", "v5e"])
@pytest.mark.parametrize("name", ["softmax", "scan", "eqloop", "layers"])
def test_for_a_device_that_is_not_here(kind: str, name: str):
    if not is_installed(kind):
        pytest.skip(f"the compiler for {kind} is not installed")
    case = CASES[name]
    large = lambda x: floats(*(n * 8 if n >= 64 else n for n in x.shape))
    args = case.args if name == "layers" else tuple(map(large, case.args))
    profile = el.memory_profile(case.f, device=kind)(*args)
    if profile.peak_bytes > 2**20:
        assert assigned(profile) >= 0.95 * profile.peak_bytes
        check(case, profile)


@pytest.mark.parametrize(
    ("schedule", "is_cast"),
    [
        (el.Reversible(lambda h, x: h - x), False),
        (el.Recursive(16), True),
    ],
)
def test_advice_is_for_the_schedule_that_a_loop_has(schedule, is_cast):
    def loss(h, xs):
        scan = el.Scan(lambda h, x: (jnp.sin(h) + x, None), schedule=schedule)
        return jnp.sum(scan(h, xs)[0])

    types = floats(4096), floats(256, 4096)
    advice = "; ".join(el.memory_profile(jax.grad(loss))(*types).advice)
    assert "outside of loops" not in advice
    assert ("el.Cast" in advice) == is_cast


@pytest.mark.slow
def test_advice_is_not_for_what_a_kernel_stores():
    if not is_installed("h100"):
        pytest.skip("the compiler for h100 is not installed")

    def loss(h):
        scan = el.Scan(lambda h, _: (jnp.sin(h) * h, None), schedule=el.Fused())
        return jnp.sum(jax.vmap(lambda h: scan(h, length=1000)[0])(h))

    profile = el.memory_profile(jax.grad(loss), device="h100")(floats(65536))
    assert any(loop.name == "Scan" for loop in profile.loops)
    assert "el.Fit" not in "; ".join(profile.advice)
    assert "el.Cast" not in "; ".join(profile.advice)


def test_wrong_calls():
    wrong: Any = 3
    said = "TypeError: memory_profile … `f` … 3"
    assert_raises(lambda: el.memory_profile(wrong), said)
    said = "ValueError: memory_profile: … device … 'h1000' … h100"
    assert_raises(lambda: el.memory_profile(jnp.sin, device="h1000"), said)
    profile: Any = el.memory_profile(jnp.sin)(jnp.ones(3))
    said = "TypeError: MemoryProfile.compare: pass another profile, not None"
    assert_raises(lambda: profile.compare(None), said)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**63 - 1])
def test_integers_of_any_length_are_read(number: int):
    def written(n: int) -> bytes:
        *more, last = [
            (n >> shift) & 127 for shift in range(0, max(n.bit_length(), 1), 7)
        ]
        return bytes([*(byte | 128 for byte in more), last])

    packed = written(number) * 3
    data = b"\x08" + written(number) + b"\x12" + written(len(packed)) + packed
    data += b"\x19" + np.float64(1).tobytes() + b"\x22\x02hi"
    read = Message(data)
    assert read.integer(1) == number
    assert read.integers(2) == [number] * 3
    assert read.text(4) == "hi"
    assert 5 not in read
    assert read.integer(5) == 0
