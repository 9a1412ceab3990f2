"""Parts that run some of their rows at a time, and functions that have none."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eqloop as el
from eqloop.checkpointing import axis_maps, fitting
from eqloop.fitting._cut import Cut
from eqloop.fitting._options import EVERYTHING, Way
from eqloop.fitting._written import flattened

from ..asserts import assert_close
from ..compiling import taken_and_made, temp_bytes
from ..marks import slow
from ..weights import normal

N, D, WORDS = 50, 4, 61
LABELS = jnp.arange(N) * 7 % WORDS


def head(w: Any, h: Any) -> Any:
    logits = jnp.tanh(h) @ w
    picked = jnp.take_along_axis(logits, LABELS[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def head_by_index(w: Any, h: Any) -> Any:
    logs = jax.nn.log_softmax(jnp.reshape(h, (5, 10, D)) @ w).reshape(N, WORDS)
    return -jnp.mean(logs[jnp.arange(N), LABELS])


def head_of_one_hots(w: Any, h: Any) -> Any:
    return -jnp.sum(jax.nn.one_hot(LABELS, WORDS) * jax.nn.log_softmax(h @ w))


def contrastive(a: Any, b: Any) -> Any:
    scores = a @ b.T / 2
    rows = jax.nn.logsumexp(scores, 1) - jnp.diag(scores)
    i = jnp.arange(N)
    return jnp.mean(rows) - jnp.mean(jax.nn.log_softmax(scores, 0)[i, i])


def pairs(x: Any) -> Any:
    return jnp.sum(jnp.sqrt(1 + jnp.sum((x[:, None] - x[None]) ** 2, -1)))


def attention(w: Any, x: Any) -> Any:
    q, k, v = (y.reshape(2, N, 2, 2) for y in jnp.split(x @ w, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((N, N), bool)), scores, -1e9)
    return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v) ** 2)


@jax.custom_jvp
def steps(x: Any) -> Any:
    return jnp.round(x)


@steps.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (dot,) = primals, tangents
    return steps(x), dot * jnp.cos(x)


def network(w: Any, u: Any, x: Any) -> Any:
    return jnp.sum(jnp.sin(steps(3 * jax.nn.relu(x @ w)) @ u) ** 2)


def convolutions(k: Any, x: Any) -> Any:
    form = ("NHWC", "HWIO", "NHWC")
    wide = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=form)
    return jnp.sum(el.name(jnp.tanh(wide), "wide") ** 2)


def farthest(x: Any, y: Any) -> Any:
    distances = jnp.sum((x[:, None] - y[None]) ** 2, -1)
    return jnp.max(distances) + jnp.max(jnp.min(distances, 1))


def all_together(x: Any, y: Any) -> Any:
    return jax.nn.logsumexp(x @ y.T)


def standardised(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return jnp.sum(
        jnp.sin((y - jnp.mean(y, 0, keepdims=True)) / jnp.std(y, 0, keepdims=True)) ** 2
    )


def keys(w: Any, x: Any) -> Any:
    noise = jax.vmap(lambda key: jax.random.normal(key, (16 * D,)))
    return jnp.sum(jnp.sin(x @ w + noise(jax.random.split(jax.random.key(1), N))))


def recurrent(w: Any, u: Any, x: Any) -> Any:
    """Loops over the rows of wide values: one of JAX, which counts, and one of ours."""
    wide = jnp.tanh(x @ w).reshape(len(x), D, 16)

    def add(i: Any, c: Any) -> Any:
        return jnp.sin(c @ u) + wide[:, :, i]

    last = jax.lax.fori_loop(0, 16, add, jnp.zeros((len(x), D)))
    step = lambda c, t: ((c := jnp.sin(c @ u + t)), jnp.sum(c**2, -1))
    scan = el.Scan(step, in_axes=2, reverse=True)
    return jnp.sum(scan(last, wide)[0] ** 2) + jnp.sum(scan(x, wide)[1])


def pooled(k: Any, x: Any) -> Any:
    form = ("NHWC", "HWIO", "NHWC")
    wide = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=form)
    size = (1, 2, 2, 1)
    most = jax.lax.reduce_window(wide, -jnp.inf, jax.lax.max, size, size, "VALID")
    return jnp.sum(jnp.sin(most))


def spectra(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.abs(jnp.fft.rfft(jnp.tanh(x @ w))) ** 2)


def factors(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    return jnp.sum(jnp.linalg.cholesky(jnp.eye(8)[None] + y[:, :, None] * y[:, None]))


def looked_up(w: Any, x: Any) -> Any:
    at = jnp.linspace(-1.0, 1.0, 16)
    return jnp.sum(jnp.interp(jnp.tanh(x @ w), at, jnp.cos(3 * at)) ** 2)


def on_and_off_the_diagonal(w: Any, x: Any) -> Any:
    z, i = jnp.tanh(x @ w), jnp.arange(N)
    scores = jnp.sin(z @ z.T)
    return jnp.sum(scores[i, i[::-1]]) + jnp.sum(z[i, i] * 2) + jnp.trace(z @ z.T)


def unfolded(w: Any, x: Any) -> Any:
    """Rows are the last axis of a value that is read in another order."""
    y = jnp.tanh(x @ w).reshape(N, 6, 8)
    of_rows = jnp.reshape(y, (N * 6, 8), order="F") + jnp.arange(8.0)[None]
    return jnp.sum(jnp.arange(8.0) * jax.nn.logsumexp(3 * jnp.sin(3 * of_rows), 0))


# With the shapes of their arguments, and the sizes of chunks.
TOKENS = (D, WORDS), (N, D)
ROWS = (N, D), (N, D)
WIDE = (D, 16 * D), (N, D)
CASES = [
    (head, TOKENS, 7),
    (head_by_index, TOKENS, 2),
    slow(head_of_one_hots, TOKENS, 10),
    (contrastive, ROWS, 10),
    slow(pairs, ROWS[:1], 9),
    slow(attention, ((D, 12), (2, N, D)), 8),
    (network, ((D, 16 * D), (16 * D, D), (N, D)), 12),
    slow(convolutions, ((3, 3, 2, 32), (6, 5, 5, 2)), 2),
    (recurrent, (WIDE[0], (D, D), WIDE[1]), 10),
    (farthest, ROWS, 10),
    slow(all_together, ROWS, 10),
    slow(standardised, WIDE, 10),
    slow(keys, WIDE, 10),
    (pooled, ((3, 3, 2, 32), (6, 6, 6, 2)), 2),
    slow(spectra, WIDE, 10),
    slow(factors, ((D, 8), (N, D)), 10),
    slow(looked_up, WIDE, 10),
    (on_and_off_the_diagonal, ((D, 300), (N, D)), 10),
    (unfolded, ((D, 48), (N, D)), 3),
]


def given(shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    return [normal(i, shape, scale=0.5) for i, shape in enumerate(shapes)]


def cut(f: Callable[..., Any], *args: Any) -> Cut:
    with fitting():
        return Cut.of(jax.make_jaxpr(f)(*args), "ranges")


def in_chunks(f: Callable[..., Any], rows: int, *args: Any) -> Any:
    """The function with all parts that can be in chunks of so many rows."""
    parts = cut(f, *args).parts
    assert any(part.by_rows for part in parts)
    ways = (
        Way("rows", rows=rows, split="ranges") if part.by_rows else EVERYTHING
        for part in parts
    )
    return el.Fit(f, 1, ways=tuple(ways))


def gradient(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.value_and_grad(f, tuple(range(count)))


@pytest.mark.parametrize(("f", "shapes", "rows"), CASES)
def test_derivatives_are_those_of_the_function(f: Any, shapes: Any, rows: int):
    inputs = given(shapes)

    def every(f: Any, *args: Any) -> Any:
        g = gradient(f, len(args))
        batch = [jnp.stack([x, x / 2]) for x in args]
        return jax.jvp(g, args, tuple(map(jnp.cos, args))), jax.vmap(g)(*batch)

    ours = in_chunks(f, rows, *inputs)
    actual, expected = (
        jax.jit(functools.partial(every, f))(*inputs) for f in (ours, f)
    )
    assert_close(actual, expected, 1e-3, 1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize(("f", "shapes", "rows"), CASES)
def test_a_chunk_is_what_is_there_at_once(f: Any, shapes: Any, rows: int):
    # Of ten times as many, so that chunks are small.
    args = given(shapes)
    plain = temp_bytes(gradient(f, len(args)), *args)
    of_chunks = temp_bytes(gradient(in_chunks(f, rows, *args), len(args)), *args)
    assert of_chunks < 0.7 * max(plain, 4 * N * N)


def shuffled(x: Any) -> Any:
    y = jnp.sin(x[:, None] * x[None]).reshape(N * D, N)
    return jnp.sum(jnp.cumsum(jnp.cumsum(y, 0), 1) ** 2)


def with_noise(x: Any) -> Any:
    return jnp.sum(
        jnp.sort((x @ x.T + jax.random.normal(jax.random.key(0), (N, N))).ravel())[:9]
    )


@pytest.mark.parametrize("f", [shuffled, with_noise])
def test_where_all_rows_see_each_other_there_are_none(f: Any):
    x = normal(0, (N, D))
    largest = [part for part in cut(f, x).parts if part.by_rows]
    assert not any(N * N in [y.aval.size for y in part.reads] for part in largest)
    fit = el.Fit(f, "1GiB")
    assert_close(jax.jit(jax.grad(fit))(x), jax.jit(jax.grad(f))(x), 1e-3, 1e-3)


def test_a_budget_is_kept_by_rows_and_the_plan_says_so():
    n = 1024
    w, h = normal(0, (8, 256)), normal(1, (n, 8))
    f = lambda w, h: jnp.mean(jax.nn.logsumexp(jnp.tanh(h) @ w, -1))
    plain, expected = taken_and_made(gradient(f, 2), w, h)
    with pytest.raises(ValueError, match="does not fit"):
        el.Fit(f, plain // 8, split=False).plan(w, h)
    fit = el.Fit(f, plain // 8)
    plan = fit.plan(w, h)
    assert "parts of" in str(plan)
    assert plan.peak_bytes <= plain // 8
    assert temp_bytes(gradient(fit, 2), w, h) <= plain // 8
    taken, found = taken_and_made(gradient(plan.pinned, 2), w, h)
    assert taken <= plain // 8
    assert_close(found, expected)
    batch = jnp.stack([w, w / 2]), jnp.stack([h, h / 2])
    of_batch = lambda f: jax.jit(jax.vmap(gradient(f, 2)))(*batch)
    assert_close(of_batch(plan.pinned), of_batch(f))


def test_a_loop_is_as_large_as_what_its_steps_compute():
    """Its carry is small beside the logits that are computed from it; a step is not."""

    def f(w: Any, h: Any) -> Any:
        mix = lambda h: jax.nn.softmax(jnp.einsum("bte,bse->bts", h, h)) @ h
        h, _ = el.Scan(lambda h, _: (h + mix(h), None))(h, length=3)
        return jnp.mean(jax.nn.logsumexp(h @ w, -1))

    args = given(((4, 100), (6, 40, 4)))
    in_rows = [part.by_rows for part in cut(f, *args).parts if part.by_rows]
    # Rows of the loop are sequences, and those of the logits are tokens.
    assert [by_rows.length for by_rows in in_rows] == [6, 40]
    found, expected = gradient(in_chunks(f, 2, *args), 2), gradient(f, 2)
    assert_close(jax.jit(found)(*args), jax.jit(expected)(*args), 1e-3, 1e-4)


def test_a_loop_in_rows_may_run_at_once_by_schedules_and_takes_as_long_as_it_does():
    def f(w: Any, h: Any) -> Any:
        mix = lambda h: jax.nn.softmax(jnp.einsum("bte,bse->bts", h, h)) @ h
        return jnp.sum(
            el.Scan(lambda h, _: (h + mix(jnp.sin(h @ w)), None))(h, length=8)[0]
        )

    args = given(((16, 16), (8, 64, 16)))
    with fitting():
        ways, choice = cut(f, *args).choice((True, True))
    (at,) = (i for i, of in enumerate(ways) if any(way.rows for way in of))
    time = {
        way: o.nanoseconds for way, o in zip(ways[at], choice.parts[at], strict=True)
    }
    scheduled = lambda way: any(inner.schedules for inner in way.inside)
    rows = [time[way] for way in time if way.rows]
    at_once = [time[way] for way in time if not way.rows]
    assert any(way.rows and scheduled(way) for way in time)
    assert any(not way.rows and scheduled(way) for way in time)
    # What runs by rows runs once more on the way back, all of it.
    assert min(rows) > 1.2 * min(at_once)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_entries_that_are_equally_large_share_a_cotangent(dtype: str):
    x = jnp.round(3 * normal(0, (N, D))).astype(dtype)
    y = jnp.round(3 * normal(1, (N, D))).astype(dtype)
    f = lambda x, y: jnp.max(jnp.minimum(x @ y.T, 5.0))
    run = lambda f: jax.jit(gradient(f, 2))(x, y)
    assert_close(run(in_chunks(f, 10, x, y)), run(f))


def test_sums_over_chunks_are_wide():
    h = normal(0, (512, D)).astype(jnp.bfloat16)
    w = normal(1, (D, WORDS)).astype(jnp.bfloat16)
    f = lambda w, h: jnp.sum(jnp.tanh((h @ w).astype(jnp.float32)) ** 2 + 1)
    wide = jax.grad(f)(*(x.astype(jnp.float32) for x in (w, h)))
    actual = jax.jit(jax.grad(in_chunks(f, 4, w, h)))(w, h)
    error = jnp.abs(actual.astype(jnp.float32) - wide).max() / jnp.abs(wide).max()
    assert error < 0.01


def test_integers_pass_and_inputs_may_be_read_in_two_ways():
    def f(x: Any, counts: Any) -> Any:
        scores = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1))
        near = jnp.where(scores > 0.5, counts[:, None], 0)
        return jnp.sum(scores * counts[:, None].astype(float)), jnp.sum(near)

    x, counts = normal(0, (N, D)), jnp.arange(N)
    run = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(x, counts)
    assert_close(run(in_chunks(f, 10, x, counts)), run(f))


def test_what_has_no_derivative_has_rows_of_its_own():
    def f(w: Any, h: Any) -> Any:
        loss = jnp.mean(jax.nn.logsumexp(jnp.tanh(h) @ w, -1))
        return loss, jnp.sum(jnp.tanh(h) @ w > 0)

    args = given(((D, 1000), (N, D)))
    run = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))
    plain, expected = taken_and_made(run(f), *args)
    taken, found = taken_and_made(run(el.Fit(f, plain // 2)), *args)
    assert taken <= plain // 2
    assert_close(found, expected)


def test_effects_keep_their_order(capfd: Any):
    def f(w: Any, h: Any) -> Any:
        logits = h @ w
        value = jnp.mean(jax.nn.logsumexp(logits, 1))
        jax.debug.print("first {}", value, ordered=True)
        jax.debug.print("second {}", jnp.sum(w), ordered=True)
        return value + jnp.sum(jnp.exp(logits))

    args = given(TOKENS)
    run = lambda f: jax.jit(gradient(f, 2))(*args)
    actual = run(in_chunks(f, 10, *args))
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert 0 <= printed.find("first") < printed.find("second")
    assert_close(actual, run(f), 1e-3, 1e-3)


def test_rows_of_a_device_and_a_sum_over_devices():
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("device",), axis_types=automatic)
    whole, part = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("device")

    def on_device(around: Any) -> Any:
        both = lambda w, h: jax.lax.pmean(jnp.max(h) + head(w, h), "device")
        return jax.shard_map(
            around(both), mesh=mesh, in_specs=(whole, part), out_specs=whole
        )

    args = normal(0, (D, 1000)), normal(1, (N, D))
    fit = on_device(lambda f: el.Fit(f, 60_000))
    taken, found = taken_and_made(gradient(fit, 2), *args)
    assert taken <= 60_000
    plain = on_device(lambda f: f)
    assert_close(found, jax.jit(gradient(plain, 2))(*args))


def maps(f: Callable[..., Any], *shapes: tuple[int, ...]) -> set[Any]:
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    (eqn,) = jax.make_jaxpr(f)(*types).eqns
    return {(one.ins, one.outs) for one in axis_maps(eqn)}


def test_an_operation_is_a_map_or_a_sum_along_its_axes():
    assert maps(jnp.matmul, (2, 3, 4), (2, 4, 5)) == {
        ((0, 0), (0,)),
        ((1, None), (1,)),
        ((None, 2), (2,)),
        ((2, 1), (None,)),
    }
    assert maps(lambda x: jax.lax.cumsum(x, 0), (2, 3)) == {((1,), (1,))}
    assert maps(lambda x: jax.lax.sort(x, dimension=1), (2, 3)) == {((0,), (0,))}
    assert (
        maps(lambda x: jax.lax.while_loop(lambda x: False, jnp.sin, x), (2,)) == set()
    )
    assert maps(jnp.sin, (2, 3)) == {((0,), (0,)), ((1,), (1,))}
    assert maps(jax.lax.linalg.lu, (5, 2, 2)) == {((0,), (0, 0, 0))}
    windows = lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 2, 1), (1, 1, 2), "VALID"
    )
    assert maps(windows, (2, 3, 4)) == {((0,), (0,))}


def test_what_is_only_copied_is_not_run_by_rows():
    program = jax.make_jaxpr(lambda x: jnp.sin(jnp.copy(x)))(jnp.ones(3))
    names = lambda program: [eqn.primitive.name for eqn in program.eqns]
    assert "copy" in names(program)
    assert names(flattened(program)) == ["sin"]
