"""`backward=`: cuts and clipped cotangents, against the same written by hand."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import eqloop as el

from .. import derivatives
from ..asserts import assert_close, assert_raises
from ..compiling import temp_bytes
from ..derivatives import MODES, assert_agrees, mapped, name, scan
from ..marks import slow, slow_if
from ..schedules import BLOCKS, CHUNKS, LAST, NESTED, SLOTS

pytestmark = pytest.mark.sampled

SCHEDULES = (
    None,
    NESTED,
    CHUNKS,
    slow(SLOTS),
    slow(BLOCKS),
    slow(LAST),
    slow(el.Offload(el.Chunked(2))),
)


def cut_by_hand(every):
    """`lax.scan` with `stop_gradient` written into the step."""

    def loop(f, init, xs, reverse=False):
        def step(state, x):
            i, carry = state
            is_cut = (i > 0) & (i % every == 0)
            stop = lambda c: jnp.where(is_cut, lax.stop_gradient(c), c)
            carry, y = f(jax.tree.map(stop, carry), x)
            return (i + 1, carry), y

        (_, carry), ys = lax.scan(step, (0, init), xs, reverse=reverse)
        return carry, ys

    return loop


def back_by_hand(backward):
    """`lax.scan` with a `custom_vjp` of one array written into the step."""

    @jax.custom_vjp
    def passed(h):
        return h

    passed.defvjp(lambda h: (h, None), lambda _, ct: (backward(ct),))

    def loop(f, init, xs):
        return lax.scan(lambda c, x: f((passed(c[0]), *c[1:]), x), init, xs)

    return loop


LIKE_OTHERS = (
    "primal",
    "grad_of_parameters",
    "jacrev",
    "jacfwd",
    "vjp",
    "linear_transpose",
    "linearize",
    "forward_over_reverse",
    "reverse_over_forward",
    "reverse_over_reverse",
    "hessian",
)


@pytest.mark.parametrize(
    "mode", slow_if(lambda m: name(m) in LIKE_OTHERS, MODES), ids=name
)
def test_cuts_in_all_modes(mode):
    loop = scan(schedule=NESTED, backward=el.Truncate(3))
    assert_agrees(mode, derivatives.plain, loop, cut_by_hand(3))


@pytest.mark.parametrize("every", slow_if(lambda n: n != 4, [1, 4, 9]))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cuts_under_all_schedules(schedule, every):
    loop = scan(schedule=schedule, backward=el.Truncate(every))
    assert_agrees(derivatives.grad, derivatives.backwards, loop, cut_by_hand(every))


@pytest.mark.slow
def test_cuts_in_a_batch():
    loop = scan(schedule=el.Binomial(2), backward=el.Truncate(2))
    assert_agrees(derivatives.grad, derivatives.vmap, loop, cut_by_hand(2))
    assert_agrees(mapped(derivatives.grad), derivatives.plain, loop, cut_by_hand(2))


LAST = {
    "no outputs": (el.Scan, {}, slice(0, 0)),
    "a slice of no outputs": (el.SlicedScan, dict(step=2), slice(0, 0)),
    "the last ones": (el.SlicedScan, dict(start=-2), slice(-2, None)),
    "the last ones, turned round": (
        el.SlicedScan,
        dict(start=-1, stop=-5, step=-2),
        slice(-1, -5, -2),
    ),
    "one in the middle": (el.SlicedScan, dict(start=3, stop=4), slice(3, 4)),
    "each other": (el.SlicedScan, dict(step=2), slice(0, None, 2)),
}


@pytest.mark.parametrize(
    ("reverse", "schedule"),
    [
        (True, None),
        slow(False, None),
        slow(False, el.Recursive(2)),
        slow(True, el.Recursive(2)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "case",
    slow_if((LAST["no outputs"], LAST["each other"]).__contains__, LAST.values()),
    ids=LAST,
)
def test_steps_before_the_last_cut(case, schedule, reverse):
    """They are a loop of their own, and the outcome is the same."""
    kind, settings, kept = case

    def step(w, carry, x):
        h, count = carry
        h = jnp.tanh(w * h + x)
        return (h, count + 1), None if kept == slice(0, 0) else (h * x, count)

    def run(loop, w, h, xs):
        carry, ys = loop(functools.partial(step, w), (h, 0), xs)
        return carry[0], carry[1], jax.tree.map(lambda y: y, ys)

    def ours(f, init, xs):
        scan = kind(
            f,
            schedule=schedule,
            reverse=reverse,
            backward=el.Truncate(4),
            in_axes=1,
            **settings,
        )
        return scan(init, xs)

    def by_hand(f, init, xs):
        carry, ys = cut_by_hand(4)(f, init, jnp.moveaxis(xs, 1, 0), reverse)
        return carry, jax.tree.map(lambda y: y[kept], ys)

    xs = jnp.sin(jnp.arange(33.0)).reshape(3, 11)
    args = (jnp.array([0.9, 0.5, 1.1]), jnp.ones(3), xs)

    def loss(loop, *args):
        h, count, ys = run(loop, *args)
        return derivatives.weigh((h, ys[0] if ys else ())), (count, ys)

    def both(loop):
        grad = jax.value_and_grad(
            functools.partial(loss, loop), (0, 1, 2), has_aux=True
        )
        dots = jax.jvp(lambda *a: loss(loop, *a)[0], args, derivatives.direction(args))
        return grad(*args), dots

    assert_close(*(jax.jit(both, static_argnums=0)(x) for x in (ours, by_hand)))


@pytest.mark.parametrize("length", [1, 3, 4, 8])
@pytest.mark.parametrize("case", ["Scan", "SlicedScan", "ScanWhile"])
def test_a_learned_initial_carry_has_a_gradient(case, length):
    """Of the first steps alone; and of all, where there is no cut."""
    settings = dict(backward=el.Truncate(3), reverse=length == 8)

    def ours(h, xs):
        step = lambda h, x: (jnp.sin(h + x), h * x)
        if case == "ScanWhile":
            loop = el.ScanWhile(lambda h: h < 9, step, max_steps=length, **settings)
            return loop(h, xs)[:2]
        kind = el.Scan if case == "Scan" else el.SlicedScan
        return kind(step, **settings)(h, xs)

    def by_hand(h, xs):
        ys = [None] * length
        for i in range(length):
            h = lax.stop_gradient(h) if i in (3, 6) else h
            place = length - 1 - i if settings["reverse"] else i
            ys[place] = h * xs[place]
            h = jnp.sin(h + xs[place])
        return h, jnp.stack(ys)

    def both(run):
        of = lambda weight: (
            lambda h, xs: (lambda c, ys: c * weight + ys @ xs)(*run(h, xs))
        )
        args = jnp.float32(0.3), jnp.linspace(0.1, 1.0, length)
        grads = [jax.grad(of(weight), (0, 1))(*args) for weight in (0.0, 1.0)]
        return grads, jax.jvp(of(2.0), args, args)

    both = jax.jit(both, static_argnums=0)
    assert_close(both(ours), both(by_hand), atol=1e-6)
    assert jax.grad(lambda h: ours(h, jnp.ones(length))[1].sum())(0.3) != 0


def test_without_a_cut_it_is_another_name_for_the_loop():
    """As many steps as lie between two cuts, or fewer: nothing is added to the step."""
    step = lambda h, x: (jnp.sin(h + x), h)
    trace = lambda **settings: str(
        jax.make_jaxpr(lambda *args: el.Scan(step, **settings)(*args))(0.3, jnp.ones(4))
    )
    assert trace(backward=el.Truncate(4)) == trace(backward=el.Truncate(9)) == trace()
    assert trace(backward=el.Truncate(3)) != trace()


def evaluations(scan_of, xs):
    """How often the step is evaluated by a gradient of the parameter."""
    count = 0

    def tick():
        nonlocal count
        count += 1

    def step(w, h, x):
        jax.debug.callback(tick)
        h = jnp.sin(w * h + x)
        return h

    def loss(w):
        last, ys = scan_of(functools.partial(step, w))(0.5, xs)
        return last + sum(y.sum() for y in jax.tree.leaves(ys))

    jax.jit(jax.grad(loss))(0.7).block_until_ready()
    jax.effects_barrier()
    return count


def test_steps_that_nothing_needs_are_not_reversed():
    """40 steps and cuts at 12, 24 and 36."""
    xs, every = jnp.zeros(40), el.Truncate(12)
    alone = lambda f: lambda h, x: (f(h, x), None)
    twice = lambda f: lambda h, x: (f(h, x),) * 2
    carries = el.Chunked(40)

    def count(kind, step, **settings):
        scan = lambda f: kind(step(f), backward=every, schedule=carries, **settings)
        return evaluations(scan, xs)

    assert count(el.Scan, alone) == 40 + 4
    assert count(el.SlicedScan, twice, start=-2) == 40 + 4
    assert count(el.SlicedScan, twice, start=30, stop=31) == 40 + 16
    assert count(el.Scan, twice) == 40 + 40


def test_the_program_of_a_cut_scan_does_not_grow_with_it():
    def stored(length):
        scan = el.Scan(lambda h, x: (jnp.sin(h + x), None), backward=el.Truncate(8))
        grad = jax.grad(lambda h, xs: scan(h, xs)[0].sum(), 1)
        return temp_bytes(grad, (64,), (length, 64))

    assert stored(8 * 512) <= stored(8 * 64)


def test_steps_before_the_last_cut_may_have_checks_and_references():
    def checked(h, x):
        checkify.check(h < 5, "too large")
        return h + x, None

    scan = el.Scan(checked, backward=el.Truncate(2))
    error, _ = checkify.checkify(lambda xs: scan(0.0, xs))(jnp.ones(9))
    assert "too large" in error.get()

    def count(xs):
        steps = jax.new_ref(jnp.zeros(()))

        def step(h, x):
            steps[...] += 1
            return h * x, None

        h, _ = el.Scan(step, backward=el.Truncate(4))(1.0, xs)
        return h, steps[...]

    (_, steps), grads = jax.value_and_grad(count, has_aux=True)(jnp.full(10, 2.0))
    assert steps == 10
    assert grads.tolist() == [0.0] * 8 + [512.0] * 2


def test_the_plan_is_that_of_the_steps_that_are_reversed():
    step = lambda h, x: (jnp.sin(h + x), None)
    scan = el.Scan(step, backward=el.Truncate(30), schedule=el.Chunked(5))
    assert scan.plan(jnp.ones(3), jnp.ones((100, 3))).length == 10


BACKWARDS = {
    "clipped": el.ClipCotangent(0.3),
    "scaled": lambda ct: jax.tree.map(lambda x: x * 0.5, ct),
    "of its own value": lambda ct: jax.tree.map(lambda x: x * jnp.cos(x), ct),
}


@pytest.mark.parametrize(
    "backward",
    slow_if(lambda b: b is not BACKWARDS["clipped"], BACKWARDS.values()),
    ids=BACKWARDS,
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_cotangents_under_all_schedules(schedule, backward):
    loop = scan(schedule=schedule, backward=backward)
    by_hand = back_by_hand(lambda ct: jax.tree.leaves(backward((ct, None)))[0])
    assert_agrees(derivatives.grad, derivatives.plain, loop, by_hand)


@pytest.mark.parametrize(
    "mode", [slow("jacrev"), slow("forward_over_reverse"), slow("reverse_over_reverse")]
)
@pytest.mark.parametrize(
    "backward",
    slow_if(lambda b: b is not BACKWARDS["clipped"], BACKWARDS.values()),
    ids=BACKWARDS,
)
def test_cotangents_in_other_modes(mode, backward):
    loop = scan(schedule=NESTED, backward=backward)
    by_hand = back_by_hand(lambda ct: jax.tree.leaves(backward((ct, None)))[0])
    assert_agrees(
        getattr(derivatives, mode), derivatives.plain, loop, by_hand, rtol=1e-3
    )


@pytest.mark.slow
def test_each_example_is_clipped_by_itself():
    backward = BACKWARDS["clipped"]
    by_hand = back_by_hand(lambda ct: backward((ct, None))[0])
    loop = scan(schedule=NESTED, backward=backward)
    assert_agrees(derivatives.grad, derivatives.vmap, loop, by_hand)
    assert_agrees(mapped(derivatives.grad), derivatives.plain, loop, by_hand)


def test_forward_mode_is_that_of_a_custom_vjp():
    for schedule in (NESTED, None):
        scan = el.Scan(add, schedule=schedule, backward=el.ClipCotangent(1.0))
        assert scan(0.0, jnp.ones(3))[0] == 3.0
        run = lambda c, scan=scan: scan(c, jnp.ones(3))[0]
        said = "TypeError: Scan: a `backward` … forward mode (`jax.jvp` … `jax.grad`"
        assert_raises(lambda run=run: jax.jvp(run, (0.0,), (1.0,)), said)
        for jacobian in (jax.jacfwd(run), jax.jit(jax.jacfwd(run)), el.JacFwd(run)):
            assert_raises(lambda jacobian=jacobian: jacobian(0.0), said)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_a_cotangent_that_is_small_stays_as_it_is(dtype):
    clip = el.ClipCotangent(5.0)
    tree = {"a": jnp.array([3.0, 0.0], dtype), "b": jnp.array(4.0, dtype), "c": None}
    same, less = clip(tree), clip(jax.tree.map(lambda x: 2 * x, tree))
    assert eqx.tree_equal(same, tree)
    assert eqx.tree_equal(less, tree)
    assert clip({"c": None}) == {"c": None}
    zero = clip(jnp.zeros(2, dtype))
    assert (zero == 0).all()


@pytest.mark.parametrize(
    ("dtype", "entry", "max_norm", "expected"),
    [
        (jnp.float16, 300.0, 1000.0, 300.0),  # whose square is no number of this type
        (jnp.float16, 300.0, 10.0, 5.0),
        (jnp.float16, 1e-4, 1e-5, 5e-6),  # whose square is 0
        (jnp.float32, 0.1, 0.5, 0.1),  # less than the norm, and than 1
        (jnp.float32, 1e20, 10.0, 5.0),
        (jnp.float32, 1e-30, 1e-31, 5e-32),
        (jnp.float32, 3e38, 10.0, 5.0),  # of which two are no number
        (jnp.complex64, 1e20, 10.0, 5.0),
    ],
)
def test_squares_of_a_cotangent_neither_overflow_nor_vanish(
    dtype, entry, max_norm, expected
):
    clipped = el.ClipCotangent(max_norm)(jnp.full(4, entry, dtype))
    assert clipped.dtype == dtype
    close = np.testing.assert_allclose
    close(np.abs(clipped).astype(float), expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_a_cotangent_that_is_not_finite_stays_visible(dtype):
    nan, same = jnp.nan, np.testing.assert_array_equal
    for ct, norm, limited in (
        ([jnp.inf, 1.0], jnp.inf, [nan, 0.0]),
        ([nan, 1.0], nan, [nan, nan]),
    ):
        ct = jnp.array(ct, dtype)
        clipped, logged = el.ClipCotangent(1.0, log=True)(ct)
        # To NumPy, a NaN of bfloat16 is none.
        same(clipped.real.astype(float), limited)
        np.testing.assert_equal(float(logged), norm)
        unlimited = el.ClipCotangent(jnp.inf)(ct)
        same(unlimited.real.astype(float), ct.real.astype(float))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_second_derivatives_of_a_clipped_cotangent(dtype, max_norm):
    clip = el.ClipCotangent(max_norm, log=True)

    def by_hand(ct):
        norm = jnp.sqrt(jnp.sum(ct.real**2 + ct.imag**2))
        return ct * jnp.minimum(1, max_norm / norm).astype(dtype), norm

    def slopes(clip, ct):
        tree = lambda s, t: clip(ct * s.astype(dtype) + t.astype(dtype))
        total = lambda s, t: sum(jnp.sum(x.real.astype(float)) for x in tree(s, t))
        return jax.jit(jax.hessian(total, (0, 1)))(1.0, 0.0)

    ct = jnp.array([0.0, 3.0, -4.0], dtype)
    assert_close(slopes(clip, ct), slopes(by_hand, ct), 2e-2)
    assert np.isfinite(slopes(clip, jnp.zeros(3, dtype))).all()


def test_the_function_is_given_a_tree_like_the_carry():
    seen = []

    def backward(ct):
        seen.append(ct)
        return ct

    carry = {"h": jnp.ones(2), "n": 0, "key": jax.random.key(0), "name": "cell"}
    step = lambda c, x: ({**c, "h": c["h"] * x, "n": c["n"] + 1}, None)
    scan = el.Scan(step, backward=backward)
    grad = jax.grad(lambda h: scan({**carry, "h": h}, jnp.ones(3))[0]["h"].sum())
    assert grad(jnp.ones(2)).tolist() == [1.0, 1.0]
    for ct in seen:
        assert ct["h"].shape == (2,)
        assert [ct[k] for k in ("n", "key", "name")] == [None] * 3


def test_a_scan_that_ends_is_cut_as_well():
    def loss(loop):
        def run(x):
            return sum(y.sum() for y in loop(x)[:2])

        return jax.grad(run)

    step = lambda h, x: (jnp.sin(h + x), h)
    ours = lambda x: el.ScanWhile(
        lambda h: h > -9, step, max_steps=7, backward=el.Truncate(3)
    )(0.5, x)
    by_hand = lambda x: cut_by_hand(3)(step, jnp.float32(0.5), x)
    xs = jnp.linspace(0, 1, 7)
    np.testing.assert_allclose(loss(ours)(xs), loss(by_hand)(xs), rtol=1e-5)
    clipped = el.ScanWhile(
        lambda h: h < 50,
        lambda h, x: (2 * h, None),
        max_steps=20,
        backward=el.ClipCotangent(3.0),
    )
    assert jax.grad(lambda h: clipped(h)[0])(1.0) == 3.0


def add(total, x):
    return total + x, total


def adding(**settings):
    return lambda: el.Scan(add, **settings)(0.0, jnp.ones(3))


WRONG = {
    "of two arguments": (
        adding(backward=lambda ct, i: ct),
        "TypeError: Scan: `backward` … 'i' … called as `backward(cotangent)`",
    ),
    "of none": (
        adding(backward=lambda: 0),
        "TypeError: Scan: `backward` … too many … called as `backward(cotangent)`",
    ),
    "no function": (
        adding(backward=3),
        "TypeError: Scan: `backward` … "
        "`el.Truncate(every)`, `el.ClipCotangent(max_norm)` … another … 3",
    ),
    "of a ScanWhile": (
        lambda: el.ScanWhile(lambda c: c < 1, add, max_steps=3, backward="clip"),
        "TypeError: ScanWhile: `backward` … `el.Truncate(every)`",
    ),
    "a class of functions": (
        lambda: el.ScanWhile(
            lambda c: c < 1, add, max_steps=3, backward=el.ClipCotangent
        ),
        "TypeError: … `backward` … not <class 'eqloop.loops._clip.ClipCotangent'>",
    ),
    "a schedule": (
        adding(backward=el.Chunked(3)),
        "TypeError: … `backward` … not Chunked(chunk_size=3",
    ),
    "in place of a schedule": (
        adding(schedule=el.Truncate(3)),
        "TypeError: Scan: `schedule` … schedule … `el.Recursive(16)` … Truncate",
    ),
    "traced number": (
        lambda: jax.jit(lambda n: el.Truncate(n).every)(4),
        "TypeError: Truncate: `every` … int … number",
    ),
    "structure": (
        adding(backward=lambda ct: (ct, ct, ct)),
        "TypeError: Scan: `backward` … structure … cotangent: float32[] … tuple … 3",
    ),
    "nothing": (
        adding(backward=lambda ct: None),
        "TypeError: … cotangent: float32[] … None",
    ),
    "shape": (
        adding(backward=lambda ct: ct[None], schedule=NESTED),
        "TypeError: … cotangent: float32[] … float32[1]",
    ),
    "dtype": (
        lambda: el.CheckpointedScan(
            lambda c, x: (c, None),
            backward=lambda ct: {"h": ct["h"].astype("bfloat16")},
        )({"h": jnp.ones(2)}, jnp.ones(3)),
        "TypeError: … cotangent['h']: float32[2] … bfloat16[2]",
    ),
    "of a loop without a carry": (
        lambda: el.ForLoop(jnp.sin, backward=el.Truncate(2)),
        "TypeError: ForLoop … no setting 'backward'",
    ),
    "no steps": (lambda: el.Truncate(0), "ValueError: Truncate: `every` … least 1 … 0"),
    "traced norm": (
        lambda: jax.jit(lambda n: el.ClipCotangent(n)(n))(1.0),
        "TypeError: ClipCotangent: `max_norm` … number",
    ),
    "no norm": (
        lambda: el.ClipCotangent(0),
        "ValueError: ClipCotangent: `max_norm` … more … 0 … 0",
    ),
    "no number": (
        lambda: el.ClipCotangent(float("nan")),
        "ValueError: ClipCotangent: `max_norm` … more … 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    assert_raises(*WRONG[name])


def test_an_inverse_does_not_undo_cuts():
    step = lambda h, x: (h + x, None)
    undo = el.Reversible(lambda h, x: h - x)
    scan = el.Scan(step, schedule=undo, backward=el.Truncate(7))
    with pytest.raises(ValueError, match="cuts the derivative of a step"):
        scan(0.0, jnp.ones(9))


def judging(ct):
    return ct if ct["a"] > 0 else {"a": -ct["a"]}


@pytest.mark.parametrize(
    "call",
    [
        lambda h, loop: jax.grad(lambda h: loop(h, jnp.ones(3))[1].sum())(h),
        lambda h, loop: jax.jit(lambda h: loop(h, jnp.ones(3)))(h),
        lambda h, loop: loop.empty_log(h, jnp.ones(3)),
    ],
)
def test_errors_in_it_name_it_and_its_argument(call):
    step = lambda h, x: ({"a": h["a"] + x}, h["a"])
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        call({"a": jnp.float32(0)}, el.Scan(step, backward=judging))
    line = judging.__code__.co_firstlineno
    assert f"the function judging at {__file__}:{line} for" in str(caught.value)
    assert "of the argument ct['a']" in str(caught.value)
    note = "\n".join(caught.value.__notes__)
    assert "raised while Scan traced `backward(cotangent)` with" in note
    assert "cotangent = {'a': f32[]}" in note


def test_what_examples_share_has_a_cotangent_in_each_of_them():
    step = lambda c, x: ((jnp.cos(c[0]), c[1] * x + c[0]), c[0])
    loop = el.CheckpointedScan(step, backward=el.ClipCotangent(0.3))

    def one(shared, own):
        init = shared, own
        return sum(jnp.sum(y) for y in jax.tree.leaves(loop(init, jnp.ones(4))))

    shared, own = jnp.float32(0.5), jnp.array([0.1, 2.0, -3.0])
    total = lambda shared: jnp.sum(jax.vmap(one, (None, 0))(shared, own))
    each = [jax.grad(one)(shared, x) for x in own]
    np.testing.assert_allclose(jax.grad(total)(shared), sum(each), rtol=1e-5)
