"""Small steps of one row, such as people run thousands of side by side.

Each is `(consts, carry, x) -> (carry, y)` on lists; `STEPS` has them with functions
that make their inputs for so many rows and steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def numbers(*shape, scale=0.3):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) * scale)


def rk4(f, s, dt):
    a = f(s)
    b = f(s + dt / 2 * a)
    c = f(s + dt / 2 * b)
    return s + dt / 6 * (a + 2 * b + 2 * c + f(s + dt * c))


def lorenz(consts, carry, _):
    (p,), (s,) = consts, carry

    def f(s):
        x, y, z = s
        return jnp.stack([p[0] * (y - x), x * (p[1] - z) - y, x * y - p[2] * z])

    return [rk4(f, s, 0.01)], [s[0]]


@jax.custom_jvp
def spike(v):
    return (v > 1.0).astype(v.dtype)


@spike.defjvp
def _(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + jnp.abs(v - 1.0) * 10) ** 2


def neuron(consts, carry, x):
    (tau,), (v, s), (i,) = consts, carry, x
    v = v * tau * (1 - s) + i
    return [v, spike(v)], [spike(v)]


def gru(consts, carry, x):
    (w, u, b), (h,), (x,) = consts, carry, x
    n = len(h)
    g = w @ x + u @ h + b
    r, z = jax.nn.sigmoid(g[:n]), jax.nn.sigmoid(g[n : 2 * n])
    m = jnp.tanh(w[2 * n :] @ x + r * (u[2 * n :] @ h) + b[2 * n :])
    return [(1 - z) * m + z * h], []


def pendulum(consts, carry, _):
    (w, v), (s,) = consts, carry
    seen = jnp.stack([jnp.cos(s[0]), jnp.sin(s[0]), s[1]])
    push = 2 * jnp.tanh(v @ jnp.tanh(w @ seen))
    speed = s[1] + (15 * jnp.sin(s[0]) + 3 * push) * 0.05
    return [jnp.stack([s[0] + speed * 0.05, speed])], [s[0] ** 2 + 0.1 * speed**2]


def izhikevich(consts, carry, x):
    (a, b, d), (v, u, n), (i,) = consts, carry, x
    v = v + 0.25 * (0.04 * v * v + 5 * v + 140 - u + i)
    u = u + 0.25 * a * (b * v - u)
    fired = v >= 30.0
    v, u = jnp.where(fired, -65.0, v), jnp.where(fired, u + d, u)
    return [v, u, n + fired.astype(n.dtype)], [fired]


def bodies(consts, carry, _):
    (m,), (q, p) = consts, carry

    def pull(q):
        d = q[None] - q[:, None]
        r = jnp.sum(d * d, -1) + 0.1
        return jnp.einsum("ijk,ij,j->ik", d, r**-1.5, m)

    p = p + 0.005 * pull(q)
    q = q + 0.01 * p
    return [q, p + 0.005 * pull(q)], []


def branches(consts, carry, _):
    (w,), (v, k) = consts, carry
    v = lax.cond(v[0] > 0.0, lambda v: jnp.sin(w * v), lambda v: v * 0.9 + 0.1, v)
    cases = [lambda v: v, lambda v: v * 1.1, lambda v: v - 0.05]
    return [lax.switch(k % 3, cases, v), k + 1], [v.sum()]


def noisy(consts, carry, x):
    (s,), (v,), (key,) = consts, carry, x
    noise = jax.random.normal(key, (2,), s.dtype)
    return [v * 0.9 + s * noise], [v[0] + jax.random.uniform(key, (), s.dtype)]


def squid(consts, carry, x):
    """Hodgkin and Huxley's."""
    (g,), (v, m, h, n), (i,) = consts, carry, x
    safe = lambda z: jnp.where(jnp.abs(z) < 1e-4, 1.0, z)
    ex = lambda z: jnp.where(jnp.abs(z) < 1e-4, 1 + z / 2, z / (1 - jnp.exp(-safe(z))))
    am, bm = ex((v + 40) / 10), 4 * jnp.exp(-(v + 65) / 18)
    ah, bh = 0.07 * jnp.exp(-(v + 65) / 20), 1 / (1 + jnp.exp(-(v + 35) / 10))
    an, bn = 0.1 * ex((v + 55) / 10), 0.125 * jnp.exp(-(v + 65) / 80)
    dv = i - g[0] * m**3 * h * (v - 50) - g[1] * n**4 * (v + 77) - g[2] * (v + 54.4)
    move = lambda y, a, b: y + 0.01 * (a * (1 - y) - b * y)
    return [v + 0.01 * dv, move(m, am, bm), move(h, ah, bh), move(n, an, bn)], [v]


def reactions(consts, carry, _):
    """24 species and 30 reactions of two each."""
    (k,), (y,) = consts, carry
    random = np.random.default_rng(3)
    change = random.integers(-1, 2, size=(24, 30))
    of = random.integers(0, 24, size=(30, 2))
    rates = k * y[of[:, 0]] * y[of[:, 1]]
    return [y + 1e-3 * (jnp.asarray(change, y.dtype) @ rates)], []


def wide(consts, carry, x):
    (w, u, b), (h,), (x,) = consts, carry, x
    return [jnp.tanh(u @ h + w @ x + b)], []


def newton(consts, carry, _):
    """A while loop until convergence."""
    (p,), (y,) = consts, carry
    f = lambda z: z + 0.1 * jnp.sin(z) * p - y
    slope = lambda z: 1 + 0.1 * jnp.cos(z) * p
    goes_on = lambda s: (jnp.abs(s[1]) > 1e-6) & (s[2] < 20)

    def move(s):
        d = f(s[0]) / slope(s[0])
        return s[0] - d, d, s[2] + 1

    z = lax.while_loop(goes_on, move, (y, jnp.ones_like(y), 0))[0]
    z = lax.stop_gradient(z)
    z = z - f(z) / lax.stop_gradient(slope(z))
    return [z], [z]


STEPS = dict(
    lorenz=(
        lorenz,
        lambda r, n: ([jnp.array([10.0, 28, 8 / 3])], [numbers(r, 3) + 1], []),
    ),
    neuron=(
        neuron,
        lambda r, n: (
            [jnp.array(0.95)],
            [numbers(r), jnp.zeros(r)],
            [numbers(n, r, scale=1)],
        ),
    ),
    pendulum=(
        pendulum,
        lambda r, n: ([numbers(16, 3), numbers(16)], [numbers(r, 2)], []),
    ),
    gru=(
        gru,
        lambda r, n: (
            [numbers(24, 4), numbers(24, 8), numbers(24)],
            [numbers(r, 8)],
            [numbers(n, r, 4)],
        ),
    ),
    izhikevich=(
        izhikevich,
        lambda r, n: (
            [jnp.array(0.02), jnp.array(0.2), jnp.array(8.0)],
            [numbers(r) * 10 - 65, numbers(r) - 13, jnp.zeros(r, jnp.int32)],
            [numbers(n, r) * 20 + 20],
        ),
    ),
    bodies=(
        bodies,
        lambda r, n: (
            [jnp.array([1.0, 0.5, 0.3])],
            [numbers(r, 3, 2, scale=1), numbers(r, 3, 2)],
            [],
        ),
    ),
    branches=(
        branches,
        lambda r, n: (
            [numbers(3)],
            [numbers(r, 3), jnp.arange(r, dtype=jnp.int32)],
            [],
        ),
    ),
    noisy=(
        noisy,
        lambda r, n: (
            [jnp.array(0.3)],
            [numbers(r, 2)],
            [jax.random.split(jax.random.key(1), (n, r))],
        ),
    ),
    squid=(
        squid,
        lambda r, n: (
            [jnp.array([120.0, 36, 0.3])],
            [numbers(r) - 60, *(jnp.full(r, v) for v in (0.1, 0.5, 0.4))],
            [numbers(n, r) + 10],
        ),
    ),
    reactions=(
        reactions,
        lambda r, n: ([jnp.abs(numbers(30))], [jnp.abs(numbers(r, 24))], []),
    ),
    wide=(
        wide,
        lambda r, n: (
            [numbers(64, 16) / 3, numbers(64, 64) / 3, numbers(64)],
            [numbers(r, 64)],
            [numbers(n, r, 16)],
        ),
    ),
    newton=(newton, lambda r, n: ([jnp.array(0.5)], [numbers(r)], [])),
)
