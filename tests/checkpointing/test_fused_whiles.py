"""Loops that stop as kernels, interpreted: each row at a step of its own."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el
from eqloop.checkpointing.fused import _row_programs

from ..asserts import assert_close, assert_raises
from .fused_loops import use_settings

FUSED = el.Fused(3, interpret=True)
MOST = 9
# Rows that stop after different numbers of steps, at once, and not at all.
A, H = jnp.float32(1.1), jnp.linspace(-0.5, 3.5, 24, dtype="float32").reshape(3, 4, 2)
XS = jnp.linspace(0.1, 1.0, MOST)


@pytest.fixture(autouse=True)
def _no_loop_is_left_to_the_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that are made."""
    made = []

    def call(*args, **kwargs):
        made.append(kwargs["blocks"])
        return real(*args, **kwargs)

    real = _row_programs.call
    monkeypatch.setattr(_row_programs, "call", call)
    return made


def ended(schedule, a, h, xs):
    """A loop with outputs, and a square root that is singular where it ends."""

    def step(h, x):
        left = jnp.sqrt(jnp.maximum(5 - h.sum(), 0))
        return h + 0.2 * a * left + jnp.sin(h) * x, h.sum() * x

    scan = el.ScanWhile(lambda h: h.sum() < 5, step, max_steps=MOST, schedule=schedule)
    h, ys, steps = scan(h, xs)
    return h, ys, steps


def masked(schedule, a, h, xs):
    """The same written out."""
    alive, steps, ys = jnp.bool_(True), jnp.int32(0), []
    for x in xs:
        alive = alive & (h.sum() < 5)
        safe = jnp.where(alive, h, 0.0)
        left = jnp.sqrt(jnp.maximum(5 - safe.sum(), 0))
        moved = safe + 0.2 * a * left + jnp.sin(safe) * x
        ys.append(jnp.where(alive, safe.sum() * x, 0.0))
        h, steps = jnp.where(alive, moved, h), steps + alive.astype("int32")
    return h, jnp.stack(ys), steps


def total(tree):
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)


def twice(f, a, h, xs):
    return jax.vmap(jax.vmap(lambda h: f(a, h, xs)))(h)


def gradient(f):
    return jax.grad(lambda *args: total(twice(f, *args)), (0, 1, 2))


def first(f, a, h, xs):
    """Values, and gradients of a batch and of each row."""
    each = jax.grad(lambda a, h, x: total(f(a, h, x)), (0, 1, 2))
    inner = lambda h: jax.grad(lambda h: total(jax.vmap(lambda h: f(a, h, xs))(h)))(h)
    batch = twice(f, a, h, xs), gradient(f)(a, h, xs)
    return *batch, twice(each, a, h, xs), jax.vmap(inner)(h)


def second(f, a, h, xs):
    args, grad = (a, h, xs), gradient(f)
    forward = jax.jvp(grad, args, jax.tree.map(jnp.cos, args))
    return forward, jax.grad(lambda a: total(grad(a, h, xs)))(a)


def of(f, schedule, run=first):
    return jax.jit(functools.partial(run, functools.partial(f, schedule)))(A, H, XS)


@pytest.mark.parametrize("modes", [first, pytest.param(second, marks=pytest.mark.slow)])
def test_derivatives_are_those_of_the_loop_written_out(modes):
    expected = of(masked, None, modes)
    assert_close(of(ended, FUSED, modes), expected, rtol=2e-4, atol=2e-4)


def test_the_rows_are_those_of_all_vmaps_wherever_they_are(kernels):
    grad = lambda f: lambda *args: jax.grad(lambda *a: total(f(*a)), (0, 1, 2))(*args)
    f = functools.partial(ended, FUSED)
    there_and_back = [1, 1]
    jax.jit(grad(functools.partial(twice, f))).lower(A, H, XS)
    assert kernels == there_and_back
    kernels.clear()
    # JAX calls the kernel of one row under `vmap`: that of all comes last.
    many = jnp.ones((40, 2, 2))
    jax.jit(functools.partial(twice, grad(f))).lower(A, many, XS)
    assert kernels[-1] == 3


@pytest.mark.slow
def test_long_loops_in_several_launches(monkeypatch):
    use_settings(monkeypatch, most=2)
    run = lambda f, *args: gradient(f)(*args)
    assert_close(of(ended, FUSED, run), of(masked, None, run), rtol=2e-4, atol=2e-4)


def test_rows_that_stop_together_and_a_single_one():
    """The condition reads what all rows share, so they have no flag each."""

    def run(schedule, w, h):
        goes_on = lambda carry: carry[1] < 2.0
        step = lambda carry, _: ((jnp.sin(w * carry[0]), carry[1] + 0.3), carry[0])
        scan = el.ScanWhile(goes_on, step, max_steps=MOST, schedule=schedule)
        many = jax.vmap(lambda h: scan((h, 0.0))[0][0])(h)
        return many, scan((h, 0.0))

    grad = lambda s: jax.jit(jax.value_and_grad(lambda *a: total(run(s, *a)), (0, 1)))
    h = H.reshape(-1)
    assert_close(grad(FUSED)(A, h), grad(el.StoreAll())(A, h), rtol=1e-5)


def root(a):
    """Of a library: Newton's method until it is good enough."""
    far = lambda carry: jnp.abs(carry[0] ** 2 / a - 1) > 1e-5
    move = lambda carry: ((carry[0] + a / carry[0]) / 2, carry[1] + carry[0] * a)
    return lax.while_loop(far, move, (jnp.float32(1), jnp.float32(0)))


def bounded(a):
    far = lambda carry: jnp.abs(carry[0] ** 2 / a - 1) > 1e-5
    move = lambda carry: ((carry[0] + a / carry[0]) / 2, carry[1] + carry[0] * a)
    loop = el.BoundedWhileLoop(far, move, max_steps=30, schedule=FUSED)
    return loop((jnp.float32(1), jnp.float32(0)))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "f",
    [
        jax.vmap(bounded),
        el.Reschedule(jax.vmap(root), el.Fused(interpret=True)),
        jax.vmap(el.Reschedule(root, whiles=el.Fused(interpret=True))),
    ],
    ids=["bounded", "batched by JAX", "batched by us"],
)
def test_while_loops(f, kernels):
    values = jnp.linspace(1.0, 90.0, 7)
    slope = lambda f: jax.jit(jax.value_and_grad(lambda a: total(f(a))))
    plain = slope(el.Reschedule(jax.vmap(root), whiles=20))
    assert_close(slope(f)(values), plain(values), rtol=1e-4)
    assert len(kernels) == 2


def test_on_a_cpu_they_run_as_other_schedules_do():
    f = jax.vmap(el.Reschedule(root, el.Fused()))
    values = jnp.linspace(1.0, 90.0, 7)
    slope = lambda f: jax.jit(jax.grad(lambda a: total(f(a))))(values)
    assert_close(slope(f), slope(jax.vmap(el.Reschedule(root, whiles=20))), rtol=1e-4)


def test_a_plan_says_how_many_rows_there_are():
    run = lambda a, h, xs: total(twice(functools.partial(ended, FUSED), a, h, xs))
    (loop,) = el.plans(jax.grad(run, (0, 1)))(A, H, XS)
    assert loop.plan.kernel.startswith("one each way, 12 rows of about 4 numbers")
    assert loop.plan.peak_bytes > 0


def test_rows_that_see_each_other_are_left_to_the_engine():
    def run(s, h):
        scan = el.ScanWhile(
            lambda h: jnp.any(h < 5),
            lambda h, _: (h + 0.1 + h.mean(), None),
            max_steps=9,
            schedule=s,
        )
        return scan(h)[0].sum()

    h = jnp.linspace(0.1, 1.0, 300)
    with pytest.warns(UserWarning, match="is not one kernel"):
        actual = jax.grad(functools.partial(run, FUSED))(h)
    assert_close(actual, jax.grad(functools.partial(run, el.StoreAll()))(h))


def test_wrong_calls():
    said = "ValueError: … whiles … Fused(every=4) … whiles=el.Fused()"
    assert_raises(lambda: el.Reschedule(root, whiles=el.Fused(4)), said)
    loop = lambda: el.BoundedWhileLoop(root, root, max_steps=3, schedule=4)
    assert_raises(loop, "TypeError: BoundedWhileLoop … schedule … 4")


@pytest.mark.slow
def test_solves_of_diffrax():
    diffrax = pytest.importorskip("diffrax")
    from eqloop.diffrax import CheckpointedAdjoint

    def end(schedule, p, y):
        slope = lambda t, y, p: jnp.stack([y[1], p * (1 - y[0] ** 2) * y[1] - y[0]])
        controller = diffrax.PIDController(rtol=1e-4, atol=1e-6)
        how = diffrax.ODETerm(slope), diffrax.Tsit5(), 0.0, 1.0, 0.01, y, p
        adjoint = CheckpointedAdjoint(schedule=schedule)
        settings = dict(stepsize_controller=controller, max_steps=64, throw=False)
        return diffrax.diffeqsolve(*how, adjoint=adjoint, **settings).ys[0]

    def loss(schedule):
        of_all = jax.vmap(functools.partial(end, schedule), (None, 0))
        return jax.jit(jax.grad(lambda p, y: total(of_all(p, y)), (0, 1)))

    # In 32 bits, rounding decides about a step here and there.
    with jax.enable_x64(True):
        args = jnp.float64(5), jnp.array([[1.0, 0.0], [0.1, 3.0], [3.0, 3.0]])
        assert_close(loss(FUSED)(*args), loss(el.Recursive(4))(*args), rtol=1e-9)
