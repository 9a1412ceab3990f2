"""What steps do besides computing is done as often as in the function by itself."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import checkify, io_callback

import eqloop as el

from ..asserts import assert_close
from ..marks import slow

pytestmark = pytest.mark.sampled

XS = jnp.linspace(0.1, 1.0, 7)


SCHEDULES = [el.Recursive(2), el.StoreAll(), slow(el.Binomial(2))]


class Told:
    """Notes what it is told, and in which order."""

    def __init__(self):
        self.values = []

    def __call__(self, x):
        self.values.append(float(x))

    def during(self, f, *args):
        self.values.clear()
        jax.block_until_ready(f(*args))
        jax.effects_barrier()
        return [round(x, 4) for x in self.values]


def scan(told, w, xs):
    def step(h, x):
        jax.debug.callback(told, h)
        return jnp.tanh(w * h + x), h

    h, ys = lax.scan(step, 1.0, xs)
    return h + jnp.sum(ys)


def nested(told, w, xs):
    def outer(h, x):
        jax.debug.callback(told, x)
        return h + scan(told, w * h, xs[:3]), None

    return lax.scan(outer, 1.0, xs)[0]


def unused(told, w, xs):
    scan(told, w, xs)
    return jnp.sin(w)


def in_branches(told, w, xs):
    def step(h, x):
        tell = lambda h: (jax.debug.callback(told, h), jnp.sin(h))[1]
        return lax.cond(x > 0.5, tell, jnp.cos, w * h), None

    return lax.scan(step, 1.0, xs)[0]


def in_jit(told, w, xs):
    return jax.jit(functools.partial(scan, told))(w, xs)


def mapped(told, w, xs):
    return jnp.sum(lax.map(lambda x: scan(told, w * x, xs[:2]), xs))


def with_a_while(told, w, xs):
    def step(h, x):
        tell = lambda n: (jax.debug.callback(told, n * h), n + 1)[1]
        n = lax.while_loop(lambda n: n < 3 * x, tell, 0)
        return jnp.tanh(w * h + n), None

    return lax.scan(step, 1.0, xs)[0]


FUNCTIONS = {
    f.__name__: f
    for f in (scan, nested, unused, in_branches, in_jit, mapped, with_a_while)
}
MODES = {
    "primal": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda w, xs: jax.jvp(f, (w, xs), (w, xs)),
    "grad": jax.grad,
    "jitted grad": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda w, xs: jax.vmap(f, (0, None))(w + jnp.arange(2.0), xs),
    "grad of vmap": lambda f: jax.grad(
        lambda w, xs: jnp.sum(jax.vmap(f, (0, None))(w + jnp.arange(2.0), xs))
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_step_tells_the_host_as_often_as_that_of_the_function(f, mode, schedule):
    told = Told()
    plain = functools.partial(f, told)
    frugal = el.Reschedule(plain, schedule, whiles=2)
    # While loops have no reverse mode, but they tell the same.
    of_values = {"grad": "primal", "jitted grad": "primal", "grad of vmap": "vmap"}
    reference = MODES[of_values.get(mode, mode)](plain)
    expected = told.during(reference, 0.9, XS)
    assert sorted(told.during(MODES[mode](frugal), 0.9, XS)) == sorted(expected)


def test_printed_once(capfd):
    def library(w):
        def step(h, x):
            jax.debug.print("at {}", x)
            return jnp.sin(w * h + x), None

        return lax.scan(step, 1.0, jnp.arange(4.0))[0]

    jax.grad(el.Reschedule(library, el.Recursive(2)))(2.0)
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()[1::2]) == ["0.0", "1.0", "2.0", "3.0"]


ORDERED = {
    "io_callback": lambda told, x: io_callback(told, None, x, ordered=True),
    "unordered io_callback": lambda told, x: io_callback(told, None, x),
    "ordered debug.callback": lambda told, x: jax.debug.callback(told, x, ordered=True),
}


@pytest.mark.parametrize("tell", ORDERED.values(), ids=ORDERED)
def test_what_must_not_be_repeated_is_left(tell):
    told, counts, xs = Told(), jnp.arange(4), XS

    def library(w, counts):
        def step(h, x):
            tell(told, x)
            inner = lambda h, x: (jnp.sin(w * h + x), None)
            return lax.scan(inner, h, xs[:3])[0], None

        once = lax.scan(step, 1.0, counts)[0]
        return once + lax.scan(lambda h, x: (w * h + x, None), once, xs)[0]

    frugal = el.Reschedule(library, el.Recursive(2))
    for changed in (jax.jit, lambda f: jax.jit(jax.grad(f))):
        seen = [told.during(changed(f), 0.9, counts) for f in (frugal, library)]
        assert sorted(seen[0]) == sorted(seen[1])
    plans = frugal.plans(0.9, counts)
    assert [loop.depth for loop, why in plans.left if "effects" in why] == [0]
    assert [loop.plan.length for loop in plans.taken] == [3, 7]


def test_checks_are_seen():
    def library(w, xs):
        def step(h, x):
            checkify.check(h < 3, "h is {}", h)
            return w * h + x, None

        return lax.scan(step, 1.0, xs)[0]

    frugal = el.Reschedule(library, el.Recursive(2))
    checked = lambda f: checkify.checkify(jax.jit(f))
    for w in (0.1, 2.0):
        (error, out), (other, expected) = (checked(f)(w, XS) for f in (frugal, library))
        assert error.get() == other.get()
        assert_close(out, expected)


REFERENCES = {
    "scan": lambda add, w, xs: lax.scan(
        lambda h, x: (add(jnp.sin(w * h + x)), None), 1.0, xs
    )[0],
    "nested": lambda add, w, xs: lax.scan(
        lambda h, x: (lax.fori_loop(0, 3, lambda _, h: add(w * h), h + x), None), w, xs
    )[0],
    "map": lambda add, w, xs: jnp.sum(lax.map(lambda x: add(w * x), xs)),
    "while": lambda add, w, xs: lax.while_loop(
        lambda h: h < 3, lambda h: add(h + w), w
    ),
    "in jit": lambda add, w, xs: jax.jit(
        lambda w: lax.scan(lambda h, x: (add(w * h), None), w, xs)[0]
    )(w),
}


@pytest.mark.sampled
@pytest.mark.parametrize("f", REFERENCES.values(), ids=REFERENCES)
@pytest.mark.parametrize("schedule", [el.Recursive(2), el.StoreAll()], ids=repr)
def test_a_reference_is_written_to_once(f, schedule):
    def run(w, xs, changed):
        total = jax.new_ref(jnp.zeros(()))

        def add(h):
            total[...] += h
            return h

        out = changed(lambda w, xs: f(add, w, xs))(w, xs)
        return out, total[...]

    def differentiated(w, xs, changed):
        total = jax.new_ref(jnp.zeros(()))

        def add(h):
            total[...] += lax.stop_gradient(h)
            return h

        return jax.grad(changed(lambda w: f(add, w, xs)))(w), total[...]

    frugal = lambda f: el.Reschedule(f, schedule, whiles=3)
    same = lambda f: f
    assert_close(run(0.9, XS, frugal), run(0.9, XS, same))
    if f not in (REFERENCES["while"], REFERENCES["nested"], REFERENCES["in jit"]):
        assert_close(differentiated(0.9, XS, frugal), differentiated(0.9, XS, same))
