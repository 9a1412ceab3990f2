"""Logs of the backward pass, against those of the loop written out step by step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import eqloop as el

from ..asserts import assert_close, assert_raises
from ..mapping.devices import mesh_of
from ..marks import slow
from ..schedules import EVERY_KIND, NESTED

pytestmark = pytest.mark.sampled

LENGTH, WIDTH = 9, 3
H0 = jnp.array([0.3, -0.2, 0.9])
XS = jnp.cos(jnp.arange(LENGTH * WIDTH, dtype=float)).reshape(LENGTH, WIDTH)
W = jnp.float32(1.7)


def step(w, h, x):
    h = jnp.tanh(w * h + x)
    return h, h * x


def logged(ct):
    norm = jnp.linalg.norm(ct)
    log = {"norm": norm, "signs": ct > 0, "count": jnp.int32(3), "none": None}
    return jnp.where(norm > 0.5, ct / norm, ct), log


def loss_of(out):
    carry, ys = out[:2]
    return jnp.sum(carry * jnp.arange(1.0, 1 + WIDTH)) + jnp.sum(jnp.sin(ys))


def by_hand(w, h, xs, backward=logged, reverse=False):
    """The gradient by `w`, and the log of each step."""
    order = range(len(xs))[:: -1 if reverse else 1]
    carries = [h]
    for i in order:
        carries.append(step(w, carries[-1], xs[i])[0])
    outs = [step(w, c, xs[i])[1] for c, i in zip(carries, order, strict=False)]
    ct, *ct_ys = jax.grad(lambda c, *ys: loss_of((c, jnp.stack(ys))), range(10))(
        carries[-1], *outs
    )
    total, rows = jnp.zeros(()), {}
    for number, i in reversed(list(enumerate(order))):
        _, pull = jax.vjp(lambda w, c, i=i: step(w, c, xs[i]), w, carries[number])
        of_w, ct = pull((ct, ct_ys[number]))
        ct, rows[i] = backward(ct)
        total += of_w
    log = jax.tree.map(lambda *x: jnp.stack(x), *(rows[i] for i in range(len(xs))))
    return total, jax.tree.map(lambda x: x.astype(float), log)


LOOPS = {
    "Scan": (el.Scan, {}),
    "CheckpointedScan": (el.CheckpointedScan, {"base": 2}),
    "SlicedScan": (el.SlicedScan, {}),
    "reverse": (el.Scan, {"reverse": True, "schedule": NESTED}),
    "unrolled": (el.Scan, {"unroll": 2}),
    **{str(schedule): (el.Scan, {"schedule": schedule}) for schedule in EVERY_KIND},
    "Offload": (el.Scan, {"schedule": el.Offload(el.Chunked(2))}),
}


def gradient(kind, settings, take=jax.grad):
    def both(w, h, xs):
        scan = lambda w: kind(lambda *a: step(w, *a), backward=logged, **settings)
        loss = lambda w, log: loss_of(scan(w)(h, xs, log=log))
        return take(loss, (0, 1))(w, scan(w).empty_log(h, xs))

    return both


@pytest.mark.parametrize("name", LOOPS)
def test_a_log_is_that_of_the_loop_written_out(name):
    both = gradient(*LOOPS[name])
    reverse = LOOPS[name][1].get("reverse", False)
    assert_close(jax.jit(both)(W, H0, XS), by_hand(W, H0, XS, reverse=reverse))


def test_outside_of_jit():
    assert_close(gradient(*LOOPS["Scan"])(W, H0, XS), by_hand(W, H0, XS))


@pytest.mark.parametrize(
    "name", ["Scan", "CheckpointedScan", slow("Chunked(chunk_size=3, batch=3)")]
)
def test_each_example_of_a_batch_has_a_log(name):
    hs, xs = jnp.stack([H0, 2 * H0]), jnp.stack([XS, -XS])
    both = jax.jit(jax.vmap(gradient(*LOOPS[name]), (None, 0, 0)))
    one, two = (by_hand(W, h, x) for h, x in zip(hs, xs, strict=True))
    assert_close(both(W, hs, xs), jax.tree.map(lambda *x: jnp.stack(x), one, two))


def test_a_log_that_examples_share_has_the_sum_of_theirs():
    """As the cotangent of any argument that is not batched."""
    norm = lambda ct: (2 * ct, jnp.linalg.norm(ct))
    scan = el.Scan(lambda *a: step(W, *a), backward=norm)
    hs = jnp.stack([H0, 2 * H0])

    def loss(log):
        return jax.vmap(lambda h: loss_of(scan(h, XS, log=log)))(hs).sum()

    (_, one), (_, two) = (by_hand(W, h, XS, norm) for h in hs)
    assert_close(jax.grad(loss)(scan.empty_log(H0, XS)), one + two)


@pytest.mark.parametrize("name", ["Scan", slow("CheckpointedScan")])
def test_each_device_has_a_log(name):
    hs = jnp.stack([H0, 2 * H0])
    run = jax.shard_map(
        lambda hs: jax.tree.map(
            lambda x: x[None], gradient(*LOOPS[name])(W, hs[0], XS)[1]
        ),
        mesh=mesh_of(data=2),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    (_, one), (_, two) = (by_hand(W, h, XS) for h in hs)
    assert_close(jax.jit(run)(hs), jax.tree.map(lambda *x: jnp.stack(x), one, two))


@pytest.mark.parametrize("schedule", [None, slow(NESTED)])
def test_a_log_is_split_as_cotangents_are(schedule):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    twice = lambda ct: (2 * ct, (ct, jnp.sum(ct**2)))
    scan = el.Scan(lambda *a: step(W, *a), backward=twice, schedule=schedule)

    def log_of(h, log):
        return jax.grad(lambda log: jnp.sum(scan(h, XS[:, None], log=log)[0]))(log)

    h = jnp.stack([H0, 2 * H0])
    expected = log_of(h, scan.empty_log(h, XS[:, None]))
    with jax.set_mesh(mesh):
        split = jax.device_put(h, P("data"))
        log = scan.empty_log(split, XS[:, None])
        found = jax.jit(log_of)(split, log)
    assert found[0].sharding.spec == P(None, "data", None)
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["Scan", slow("CheckpointedScan")])
def test_a_log_has_derivatives(name):
    kind, settings = LOOPS[name]
    backward = lambda ct: (2 * ct, ct)
    scan = kind(lambda *a: step(W, *a), backward=backward, **settings)

    def ours(h):
        of_log = jax.grad(lambda log: loss_of(scan(h, XS, log=log)))
        return jnp.sum(of_log(scan.empty_log(h, XS)) ** 2)

    plain = lambda h: jnp.sum(by_hand(W, h, XS, backward)[1] ** 2)
    assert_close(jax.jit(jax.grad(ours))(H0), jax.jit(jax.grad(plain))(H0), rtol=1e-3)


def test_steps_that_were_not_run_log_nothing():
    clip = el.ClipCotangent(2.0, log=True)
    loop = el.ScanWhile(
        lambda h: h < 50, lambda h, _: (2 * h, None), max_steps=9, backward=clip
    )
    hs = jnp.array([1.0, 20.0])

    def log_of(h):
        return jax.grad(lambda log: loop(h, log=log)[0])(loop.empty_log(h))

    expected = [[4.0] * 5 + [2.0] + [0.0] * 3, [4.0, 2.0] + [0.0] * 7]
    np.testing.assert_array_equal(jax.vmap(log_of)(hs), expected)


def test_truncated_steps_log_zeros_and_each_step_once():
    rows = []
    cut = lambda w, h, x: step(w, jnp.where(x[0] > 0.9, jax.lax.stop_gradient(h), h), x)

    def counted(ct):
        jax.debug.callback(lambda norm: rows.append(float(norm)), jnp.linalg.norm(ct))
        return ct, jnp.linalg.norm(ct)

    scan = el.Scan(lambda *a: cut(W, *a), backward=counted, schedule=el.Binomial(2))
    loss = lambda log: loss_of(scan(H0, XS, log=log))
    log = jax.block_until_ready(jax.jit(jax.grad(loss))(scan.empty_log(H0, XS)))
    jax.effects_barrier()
    np.testing.assert_allclose(rows[::-1], log, rtol=1e-6)
    assert (log == 0).tolist() == (XS[:, 0] > 0.9).tolist()


def test_a_carry_that_is_a_pair():
    """What is like its cotangent is a cotangent, and not a pair of one and a log."""
    move = lambda c, _: ((c[0] + c[1], 2 * c[1]), None)
    loss = lambda scan: lambda a, log: scan((a, 1.0), length=3, log=log)[0][0]
    plain = el.Scan(move, backward=lambda ct: (ct[0], 2 * ct[1]))
    assert jax.grad(loss(plain))(1.0, None) == 1
    scan = el.Scan(move, backward=lambda ct: (ct, ct[1]))
    log = jax.grad(loss(scan), 1)(1.0, scan.empty_log((1.0, 1.0), length=3))
    assert log.tolist() == [7.0, 3.0, 1.0]


def test_a_log_that_nobody_takes_costs_nothing():
    def program(backward):
        scan = el.CheckpointedScan(lambda *a: step(W, *a), backward=backward)
        grad = jax.jit(jax.grad(lambda h: loss_of(scan(h, XS))))
        return grad.lower(H0).compile().as_text().count("\n")

    with_log = lambda ct: (2 * ct, jnp.linalg.norm(ct))
    assert program(with_log) == program(lambda ct: 2 * ct)


def test_the_norm_of_what_is_clipped():
    norm = lambda ct: (ct, jnp.linalg.norm(ct))
    clip = el.ClipCotangent(0.5, log=True)
    for backward, expected in (
        (el.ClipCotangent(math.inf, log=True), norm),
        (clip,) * 2,
    ):
        scan = el.Scan(lambda *a: step(W, *a), backward=backward)
        log = jax.grad(lambda log, scan=scan: loss_of(scan(H0, XS, log=log)))(
            scan.empty_log(H0, XS)
        )
        assert_close(log, by_hand(W, H0, XS, expected)[1])


def test_a_plan_counts_the_log():
    scan = el.Scan(lambda *a: step(W, *a), backward=lambda ct: (ct, ct))
    log = scan.empty_log(H0, XS)
    assert log.shape == XS.shape
    assert scan.plan(H0, XS, log=log).length == LENGTH


def scanned(backward, log=None, **settings):
    scan = el.Scan(lambda *a: step(W, *a), backward=backward, **settings)
    return scan(H0, XS, log=log)


def empty(backward):
    return el.Scan(lambda *a: step(W, *a), backward=backward).empty_log(H0, XS)


ZEROS = jnp.zeros(LENGTH)
WRONG = {
    "no log": (
        lambda: scanned(lambda ct: ct, ZEROS),
        "ValueError: Scan: there is no log … `backward` … `(cotangent, log)`",
    ),
    "no function": (lambda: scanned(None, ZEROS), "ValueError: … there is no log"),
    "cuts": (lambda: scanned(el.Truncate(3), ZEROS), "ValueError: … there is no log"),
    "an empty one of none": (lambda: empty(None), "ValueError: Scan: there is no log"),
    "an empty one without": (
        lambda: empty(el.ClipCotangent(1.0)),
        "ValueError: Scan: there is no log … `el.ClipCotangent(max_norm, log=True)`",
    ),
    "integers": (
        lambda: scanned(logged, {"norm": jnp.arange(9)}),
        "TypeError: Scan: `log` … log['norm'] is int32[9] … `empty_log`",
    ),
    "a bool": (
        lambda: scanned(lambda ct: (ct, 1.0), True),
        "TypeError: Scan: `log` … log is True … `empty_log`",
    ),
    "length": (
        lambda: scanned(lambda ct: (ct, 1.0), jnp.zeros(8)),
        "ValueError: Scan: … xs … 9 … log … 8",
    ),
    "structure": (
        lambda: scanned(logged, ZEROS),
        "TypeError: Scan: `log` … log: float32[] … dict of 4 was logged … `empty_log`",
    ),
    "shape": (
        lambda: scanned(lambda ct: (ct, {"h": ct}), {"h": ZEROS}),
        "TypeError: … log['h']: float32[] of each step … float32[3] was logged",
    ),
    "dtype": (
        lambda: scanned(lambda ct: (ct, ct[0]), jnp.zeros(9, "bfloat16")),
        "TypeError: … log: bfloat16[] of each step … float32[] was logged",
    ),
    "text": (
        lambda: scanned(lambda ct: (ct, {"what": "a norm"})),
        "TypeError: Scan: the log … arrays of numbers … log['what'] is 'a norm'",
    ),
    "a key": (
        lambda: scanned(lambda ct: (ct, jax.random.key(0))),
        "TypeError: Scan: the log … arrays of numbers … log is key<fry>[]",
    ),
    "the cotangent of a pair": (
        lambda: scanned(lambda ct: (ct[:2], 1.0), schedule=NESTED),
        "TypeError: … a pair … cotangent: float32[3] came in, float32[2] came out",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    assert_raises(*WRONG[name])
