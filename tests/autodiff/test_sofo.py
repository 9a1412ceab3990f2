"""`SofoGrad`: the step that it says, wherever the losses are; and that it trains."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqloop as el
from eqloop.autodiff._directions import normal_directions
from eqloop.autodiff._sofo import _normalised

from ..asserts import assert_close
from ..compiling import temp_bytes
from ..weights import normal

pytestmark = pytest.mark.sampled

KEY = jax.random.key(0)
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
XS = jnp.linspace(0.0, 1.0, 15).reshape(5, 3)
TARGETS = jnp.cos(XS)
COUNT, DAMPING = 4, 1e-2


def mean_squared(prediction, target):
    return jnp.mean((prediction - target) ** 2)


def step_by_hand(predict, loss, w, extra=lambda w: 0.0):
    """The step from the Jacobian and the Hessian in full."""
    (v,) = _normalised(normal_directions(KEY, [w], COUNT))
    pushed = jax.vmap(lambda v: jax.jvp(predict, (w,), (v,))[1])(v)
    flat = pushed.reshape(COUNT, -1)
    prediction = predict(w)
    hessian = jax.hessian(lambda p: loss(p.reshape(prediction.shape)))
    curvature = flat @ hessian(prediction.ravel()) @ flat.T
    gradient = jax.grad(lambda w: loss(predict(w)) + extra(w))(w)
    slopes = jnp.tensordot(v, gradient, axes=w.ndim)
    damping = DAMPING * jnp.linalg.norm(curvature, 2)
    weights = jnp.linalg.solve(curvature + damping * jnp.eye(COUNT), slopes)
    return jnp.tensordot(weights, v, axes=1)


def hidden_states(w):
    def step(h, x):
        h = jnp.tanh(w @ h + x)
        return h, h

    return jax.lax.scan(step, jnp.zeros(3), XS)[1]


LOSS = el.losses.mean_squared


def closing_over(h, target):
    return el.SofoLoss(lambda h: mean_squared(h, target))(h)


PLACES = {
    "in a scan": (jax.lax.scan, LOSS),
    "in a Scan": (lambda f, *xs: el.Scan(f)(*xs), LOSS),
    "in a CheckpointedScan": (lambda f, *xs: el.CheckpointedScan(f, 2)(*xs), LOSS),
    "in a jit": (jax.lax.scan, jax.jit(LOSS)),
    "in a cond": (
        jax.lax.scan,
        lambda h, y: jax.lax.cond(h[0] > -9, LOSS, lambda h, y: 0.0, h, y),
    ),
    "in a Remat": (jax.lax.scan, el.Remat(LOSS)),
    "in a vmap": (
        jax.lax.scan,
        lambda h, y: jnp.mean(jax.vmap(LOSS)(h[:, None], y[:, None])),
    ),
    "of a closure": (jax.lax.scan, closing_over),
}


def through_time(scan, loss):
    def f(w):
        def step(carry, now):
            h, total = carry
            x, target = now
            h = jnp.tanh(w @ h + x)
            return (h, total + loss(h, target)), h

        (_, total), hidden = scan(step, (jnp.zeros(3), 0.0), (XS, TARGETS))
        # A term that has no curvature, and something beside the value.
        return total + 0.1 * jnp.sum(w**2), {"hidden": hidden, "w": w}

    return f


plain_loss = through_time(jax.lax.scan, mean_squared)


def test_the_step_wherever_the_losses_are():
    settings = dict(tangents=COUNT, damping=DAMPING, has_aux=True, return_value=True)
    sofo = lambda *place: el.SofoGrad(through_time(*place), **settings)
    losses = lambda p: jnp.sum(jax.vmap(mean_squared)(p, TARGETS))
    extra = lambda w: 0.1 * jnp.sum(w**2)

    @jax.jit
    def both(w):
        found = {name: sofo(*place)(w, key=KEY) for name, place in PLACES.items()}
        step = step_by_hand(hidden_states, losses, w, extra)
        return found, (plain_loss(w)[0], hidden_states(w), step)

    found, (loss, hidden, expected) = both(W)
    for place, ((value, aux), step) in found.items():
        close = functools.partial(np.testing.assert_allclose, err_msg=place)
        close(step, expected, rtol=1e-3, atol=1e-3)
        close(value, loss, rtol=1e-5)
        close(aux["hidden"], hidden, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(aux["w"], W, place)


def test_outside_of_it_a_loss_is_what_it_wraps():
    f = through_time(jax.lax.scan, LOSS)
    gradients = lambda w: [el.Grad(g, has_aux=True)(w)[0] for g in (f, plain_loss)]
    one, other = jax.jit(gradients)(W)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert el.SofoLoss(mean_squared)(1.0, 3.0) == 4.0


def test_a_function_traced_elsewhere_is_traced_again():
    loss = jax.jit(LOSS)
    f = lambda w: loss(w, jnp.zeros((3, 3)))
    f(W)
    for _ in range(2):
        assert_step(f, lambda w: w, lambda p: mean_squared(p, 0.0))
    np.testing.assert_allclose(jax.grad(f)(W), 2 * W / 9, rtol=1e-6)


def assert_step(f, predict, loss, extra=lambda w: 0.0):
    """The step of `f` is that of a loss of a prediction, and a term beside it."""

    @jax.jit
    def both(w):
        step = el.SofoGrad(f, tangents=COUNT, damping=DAMPING)(w, key=KEY)
        return step, step_by_hand(predict, loss, w, extra)

    step, expected = both(W)
    np.testing.assert_allclose(step, expected, rtol=2e-3, atol=1e-3)


MASKED = jnp.array([[1.0, 2.0, -jnp.inf], [-jnp.inf, 0.5, 0.1], [0.3, 0.1, 0.2]])


@pytest.mark.parametrize("are_numbers", [True, False])
def test_a_class_that_is_masked_adds_nothing(are_numbers):
    labels = jnp.array([1, 2, 0])
    by_hand = lambda z: -jnp.mean(jax.nn.log_softmax(z)[jnp.arange(3), labels])
    given = labels if are_numbers else jax.nn.one_hot(labels, 3)
    ours = lambda z: el.losses.cross_entropy(z, given)
    all_of = lambda f: jax.jit(lambda z: (f(z), jax.grad(f)(z), jax.hessian(f)(z)))
    assert_close(all_of(ours)(MASKED), all_of(by_hand)(MASKED), atol=1e-6)


def test_labels_that_are_no_classes_and_classes_that_are_all_masked():
    logits = jnp.concatenate([MASKED, jnp.full((1, 3), -jnp.inf)])
    first = jnp.array([1, -1, 7, -1])
    loss = jax.value_and_grad(el.losses.cross_entropy)
    (value, slope), (alone, of_alone) = loss(logits, first), loss(MASKED[:1], first[:1])
    np.testing.assert_allclose(value, alone / 4, rtol=1e-6)
    np.testing.assert_allclose(slope[:1], of_alone / 4, rtol=1e-6)
    assert not slope[1:].any()
    # A masked class with a label is impossible, and so is a label among none.
    assert el.losses.cross_entropy(MASKED[:1], jnp.array([2])) == jnp.inf
    assert jnp.isnan(el.losses.cross_entropy(logits[3:], jnp.array([2])))


def test_a_step_where_a_class_is_masked():
    w, labels = jnp.array([[0.3, 0.2, 0.1]]), jnp.array([1])
    padded = lambda w: jnp.pad(w, ((0, 0), (0, 1)), constant_values=-jnp.inf)
    step = lambda f: jax.jit(el.SofoGrad(f, tangents=3))(w, key=KEY)
    masked = step(lambda w: el.losses.cross_entropy(padded(w), labels))
    plain = step(lambda w: el.losses.cross_entropy(w, labels))
    np.testing.assert_allclose(masked, plain, rtol=1e-4)


def test_cross_entropy():
    classes = jnp.array([0, 2, 1])
    predict = lambda w: jnp.tanh(w @ w)
    by_optax = optax.softmax_cross_entropy_with_integer_labels
    loss = lambda p: jnp.mean(by_optax(p, classes))
    for labels in (classes, jax.nn.one_hot(classes, 3)):
        ours = el.losses.cross_entropy(predict(W), labels)
        np.testing.assert_allclose(ours, loss(predict(W)), rtol=1e-5)
    assert_step(lambda w: el.losses.cross_entropy(predict(w), classes), predict, loss)


def test_only_the_prediction_curves():
    # The target moves with the weights as well, and has its part in the gradient.
    loss = lambda p, t: jnp.mean((p - t) ** 4)
    f = lambda w: el.SofoLoss(loss)(jnp.sin(w), jnp.cos(w))
    target, prediction = jnp.cos(W), jnp.sin(W)
    extra = lambda w: loss(prediction, jnp.cos(w))
    assert_step(f, jnp.sin, lambda p: loss(p, target), extra)


def test_losses_may_be_weighted():
    target = jnp.zeros((3, 3))
    f = lambda w: 3 * LOSS(jnp.sin(w), target) + LOSS(jnp.cos(w), target) / 2
    loss = lambda p: 3 * mean_squared(p[0], 0) + mean_squared(p[1], 0) / 2
    assert_step(f, lambda w: jnp.stack([jnp.sin(w), jnp.cos(w)]), loss)


def test_predictions_may_be_trees():
    @el.SofoLoss
    def loss(p):
        return jnp.sum(p["a"] ** 2) * p["n"] + jnp.sum(jnp.exp(p["b"]))

    f = lambda w: loss({"a": jnp.sin(w[0]), "b": w[1] * w[2], "n": 2})
    predict = lambda w: jnp.stack([jnp.sin(w[0]), w[1] * w[2]])
    by_hand = lambda p: 2 * jnp.sum(p[0] ** 2) + jnp.sum(jnp.exp(p[1]))
    assert_step(f, predict, by_hand)


def test_with_enough_directions_least_squares_take_one_step():
    a = normal(1, (8, 3))
    solution = {"w": jnp.array([1.0, -2.0, 0.5]), "n": 3}
    y = a @ solution["w"]
    f = lambda params: el.losses.mean_squared(a @ params["w"], y)
    start = {"w": jnp.zeros(3), "n": 3}
    step = eqx.filter_jit(el.SofoGrad(f, tangents=12, damping=0.0))(start, key=KEY)
    assert step["n"] is None
    np.testing.assert_allclose(-step["w"], solution["w"], rtol=1e-2, atol=1e-2)


def test_damping_may_be_traced_and_at_a_minimum_there_is_no_step():
    f = lambda w: LOSS(jnp.sin(w), jnp.zeros((3, 3)))
    flat = lambda w: LOSS(0.0 * w, jnp.zeros((3, 3)))

    @jax.jit
    def run(damping):
        step = lambda f, d: el.SofoGrad(f, tangents=COUNT, damping=d)(W, key=KEY)
        return step(f, damping), step(f, 0.1), step(flat, 0.1), step(flat, 0)

    traced, by_number, *nothing = run(0.1)
    np.testing.assert_allclose(traced, by_number, rtol=1e-5)
    np.testing.assert_array_equal(nothing, jnp.zeros((2, 3, 3)))


def test_memory_does_not_grow_with_the_length():
    def temporary(length):
        xs = jnp.ones((length, 3))

        def f(w):
            def step(carry, x):
                h, total = carry
                h = jnp.tanh(w @ h + x)
                return (h, total + LOSS(h, x)), None

            return el.Scan(step)((jnp.zeros(3), 0.0), xs)[0][1]

        run = lambda w, key: el.SofoGrad(f, tangents=8)(w, key=key)
        return temp_bytes(run, W, KEY)

    assert temporary(2048) == temporary(32)


class Rnn(eqx.Module):
    recurrent: jax.Array
    inputs: jax.Array
    readout: jax.Array

    def __call__(self, h, x):
        h = jnp.tanh(self.recurrent @ h + self.inputs * x)
        return h, self.readout @ h


@pytest.mark.slow
def test_trains_a_recurrent_network():
    """To say what the input was two steps before."""
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.random.normal
    rnn = Rnn(
        0.9 * normal(keys[0], (8, 8)) / 8**0.5,
        normal(keys[1], (8,)),
        normal(keys[2], (8,)) / 8**0.5,
    )
    xs = jax.random.uniform(keys[3], (40,), minval=-1.0)
    targets = jnp.roll(xs, 2).at[:2].set(0.0)

    @el.SofoGrad(tangents=32, return_value=True)
    def loss(rnn, xs, targets):
        def step(carry, now):
            h, total = carry
            h, y = rnn(h, now[0])
            return (h, total + el.losses.mean_squared(y, now[1])), None

        (_, total), _ = el.Scan(step)((jnp.zeros(8), 0.0), (xs, targets))
        return total / len(xs)

    optimiser = optax.sgd(0.5)

    def train(carry, key):
        rnn, state = carry
        value, direction = loss(rnn, xs, targets, key=key)
        updates, state = optimiser.update(direction, state)
        return (eqx.apply_updates(rnn, updates), state), value

    carry = (rnn, optimiser.init(rnn))
    keys = jax.random.split(jax.random.key(1), 60)
    _, values = jax.jit(lambda *args: jax.lax.scan(train, *args))(carry, keys)
    assert values[-1] < values[0] / 100
