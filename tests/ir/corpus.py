"""Functions of every kind, to be rewritten, written as Python, and drawn.

A problem is a function of arrays and its arguments. Those whose outputs have gradients
are differentiated, too. Those that are not quick are left to the weekly run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import eqloop as el

from ..weights import without_key

X = jnp.linspace(-1.0, 1.0, 6)
MATRIX = jnp.cos(jnp.arange(36.0)).reshape(6, 6)
KEY = jax.random.key(0)
TABLE = np.linspace(0.0, 1.0, 24, dtype=np.float32).reshape(4, 6)


@dataclasses.dataclass(frozen=True)
class Problem:
    f: Callable[..., Any]
    args: tuple[Any, ...]
    has_gradient: bool = True
    is_quick: bool = True


PROBLEMS: dict[str, Problem] = {}


def problem(
    *args: Any, has_gradient: bool = True, is_quick: bool = True
) -> Callable[..., Any]:
    """Adds a function to the corpus, under its name."""

    def add(f: Callable[..., Any]) -> Callable[..., Any]:
        assert f.__name__ not in PROBLEMS
        PROBLEMS[f.__name__] = Problem(f, args, has_gradient, is_quick)
        return f

    return add


def lenient(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that promotes, for tests under strict promotion."""

    @functools.wraps(f)
    def run(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(*args)

    return run


# What the passes are for.


@problem(X)
def redundant(x):
    return jnp.sin(x * 1.0) + jnp.sin(x) - jnp.sin(jnp.negative(-x))


@problem(X)
def constants(x):
    scale = jnp.sqrt(jnp.arange(6.0)) * jnp.exp(jnp.float32(0.5))
    return x * scale + jnp.float32(2) ** 3


@problem(X)
def dead(x):
    unused = jnp.cos(x @ x)
    kept, _ = lax.scan(lambda c, x: ((c[0] + x, c[1] * x), unused), (0.0, 1.0), x)
    return kept[0]


@problem(X)
def copies(x):
    return jnp.copy(x.reshape(2, 3).reshape(3, 2).T.T.reshape(6))


@problem(jnp.array([-0.0, 0.0, jnp.nan, jnp.inf, -jnp.inf, 1e-40]))
def signed_zeros(x):
    return (
        x + 0.0,
        x - 0.0,
        x + -0.0,
        x * 0.0,
        x * 1.0,
        0.0 - x,
        jnp.negative(-x),
        x / 1.0,
    )


@problem(jnp.array([1 + 2j, -0.0 + 1j, jnp.inf + 0j]), has_gradient=False)
def complex_identities(z):
    return z * 1, z + 0, jnp.conj(jnp.conj(z)), lax.complex(z.real, z.imag).real


@problem(jnp.arange(6), has_gradient=False)
def integers(i):
    return (i + 0) * 1 << 0, ~~i, i // 1, i % 4, (i ^ 0) | i, -i // 3, i == i


@problem(jnp.arange(3, dtype=jnp.uint32), has_gradient=False)
def unsigned(u):
    big = jnp.uint32(4294967295)
    return u + big, u >> 1, u & big, lax.population_count(u), lax.clz(u)


@problem(X)
def conversions(x):
    half = x.astype(jnp.float16)
    return half.astype(jnp.float32).astype(jnp.float16) * 2, x.astype(jnp.bfloat16)


@problem(X, jnp.float32(2.0))
@lenient
def weak_types(x, y):
    one = jnp.asarray(1.0)
    return x * (one * 2), y * (one + 1), jnp.arange(3) * one


# Operations.


@problem(X)
def elementwise(x):
    y = jnp.abs(x) + 0.5
    return (
        jnp.tanh(x) * jnp.exp(x) / jnp.sqrt(y),
        jnp.log1p(y) ** 3 - lax.rsqrt(y),
        lax.atan2(x, y) + jnp.arcsinh(x) + lax.erf(x) + lax.lgamma(y),
        jnp.clip(x, -0.5, 0.5) + jnp.minimum(x, 0.2),
        jnp.power(y, 1.7) + jnp.float_power(y, 2) + jnp.cbrt(y),
    )


@problem(X, has_gradient=False)
def predicates(x):
    finite = jnp.isfinite(x) & ~(x > 0.5) | (x != 0)
    return finite, jnp.sign(x), jnp.floor(x), jnp.round(x), jnp.nextafter(x, 2.0)


@problem(MATRIX)
def shapes(m):
    parts = jnp.split(m, (2, 3), axis=1)
    stacked = jnp.concatenate([parts[0], parts[2][:, ::-1]], axis=1)
    padded = jnp.pad(stacked, ((1, 0), (0, 2)), constant_values=1.5)
    return jnp.squeeze(padded[None], 0)[1:5:2], jnp.tile(m[0], 2), jnp.roll(m, 1, 0)


@problem(MATRIX)
def reductions(m):
    return m.sum(0), m.max(1), m.mean(), jnp.prod(m[:2], 0), jnp.cumsum(m, 1)


@problem(MATRIX, has_gradient=False)
def orders(m):
    return jnp.argmax(m, 1), jnp.sort(m, 0), jnp.argsort(m[0]), lax.top_k(m, 2)


@problem(MATRIX, jnp.array([0, 5, 2]))
def indexing(m, i):
    return m[i], m[:, 1], m.at[i].add(1.0), m.at[i, i].set(0.0), m[i[0], i[1]]


@problem(X, jnp.array([0, 2, 2, 9, -1]), has_gradient=False)
def scatters(x, i):
    methods = ("set", "add", "multiply", "min", "max", "power", "divide", "subtract")
    ways = [getattr(x.at[i], method)(0.5) for method in methods]
    ways += [x.at[i].set(0.5, mode=mode) for mode in ("clip", "drop")]
    ways += [x.at[i].get(mode="fill", fill_value=3.0)]
    return [*ways, jax.ops.segment_max(x, jnp.array([0, 0, 1, 1, 2, 2]), 3)]


@problem(MATRIX, jnp.array([0, 5, 5, 9, -1]), has_gradient=False)
def scatters_of_a_function(m, i):
    x = m[0]
    return (
        x.at[i].apply(jnp.sin),
        x.at[i].apply(lambda x: jax.nn.relu(x) * 2.5, mode="clip"),
        x.at[jnp.array([1, 3])].apply(jnp.exp, unique_indices=True),
        (4 * x).astype(int).at[i].apply(lambda n: n // 2),
        m.at[i, 1:3].apply(lambda x: x * x),
        jax.vmap(lambda x, j: x.at[j].apply(jnp.cos))(m, jnp.arange(6)),
        lax.scan(lambda c, j: (c.at[j].apply(jnp.tan), c[j]), x, i),
    )


@problem(MATRIX, jnp.array(2))
def dynamic_slices(m, i):
    return lax.dynamic_update_index_in_dim(m, m[i], i + 1, 0), jnp.take(m, i, axis=1)


@problem(MATRIX)
def products(m):
    return m @ m.T, jnp.einsum("ij,kj->ik", m, m), jnp.vdot(m, m)


@problem(MATRIX + 8 * jnp.eye(6), X)
def linear_algebra(m, x):
    return jnp.linalg.solve(m, x), jnp.linalg.cholesky(m @ m.T)


@problem(MATRIX + 8 * jnp.eye(6), X)
def factors(m, x):
    return jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(m), x)


@problem(X, has_gradient=False)
def sorting(x):
    at = jnp.searchsorted(jnp.sort(x), x)
    return at, jnp.unique(x, size=4), jnp.nonzero(x > 0, size=6), jnp.lexsort((x, x))


@problem(X)
def mantissas(x):
    mantissa, exponent = jnp.frexp(x)
    return mantissa, jnp.ldexp(mantissa * x, exponent), jnp.interp(x, x, x * x)


@problem(X)
def normal_tails(x):
    normal = jax.scipy.stats.norm
    return jax.scipy.special.log_ndtr(x), normal.logcdf(x) - normal.logsf(x)


@problem(jnp.abs(X) + 0.5, has_gradient=False, is_quick=False)
def special_functions(x):
    special, stats = jax.scipy.special, jax.scipy.stats
    return (
        special.expi(x) + special.exp1(x) + special.expn(3, x),
        special.i0(x) + special.i1e(x),
        special.gammaln(x) + special.digamma(x) + special.zeta(x + 1.5, 1.0),
        special.xlogy(x, x) + special.rel_entr(x, x + 1.0),
        stats.t.logpdf(x, 3.0) + stats.beta.logpdf(x / 3, 2.0, 3.0),
    )


@problem(X)
def fourier(x):
    return jnp.abs(jnp.fft.rfft(x)) ** 2


@problem(MATRIX)
def pooling(m):
    return lax.reduce_window(m, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


@problem(MATRIX)
def derivatives_of_pooling(m):
    loss = lambda m: jnp.sum(pooling(m) ** 2)
    return jax.grad(loss)(m), jax.jvp(loss, (m,), (m,)), jax.jvp(pooling, (m,), (m,))


@problem(MATRIX, has_gradient=False)
def reductions_by_functions(m):
    def furthest(a, b):
        is_first = a[0] > b[0]
        return jnp.where(is_first, a[0], b[0]), jnp.where(is_first, a[1], b[1])

    columns = lax.broadcasted_iota(jnp.int32, (6, 6), 1)
    start = jnp.asarray(-jnp.inf, m.dtype), jnp.int32(-1)
    return (
        lax.reduce(m, 1.0, lambda a, b: a * b + a, (0,)),
        lax.reduce((m, columns), start, furthest, (1,)),
        lax.reduce_window(m, 0.0, jnp.hypot, (2, 2), (1, 1), "SAME"),
    )


@problem(X)
def constant_table(x):
    return jnp.asarray(TABLE) @ x + TABLE[0, :4]


@problem(X)
@lenient
def mixed_dtypes(x):
    counts = jnp.arange(6, dtype=jnp.int8)
    flags = counts > 2
    return x * counts, jnp.where(flags, x, 0.0), flags.astype(jnp.uint8) + counts


@problem(2 * X, has_gradient=False)
def narrow_dtypes(x):
    quarter, brain = x.astype(jnp.float8_e4m3fn), x.astype(jnp.bfloat16)
    return (
        quarter.astype(jnp.float32).astype(jnp.float16),
        quarter.astype(jnp.float32) * 2.0,
        jnp.where(x > 0, quarter, jnp.float8_e4m3fn(1.5)).astype(jnp.float32),
        brain.astype(jnp.float32).astype(jnp.float16) * 0.1,
        brain.astype(jnp.float32) > 0,
        x.astype(jnp.int4).astype(jnp.int32).astype(jnp.int8) + 1,
        x.astype(jnp.uint8).astype(jnp.uint32).astype(jnp.float32),
    )


# Randomness.


@problem(KEY, X)
def dropout(key, x):
    return eqx.nn.Dropout(0.5)(x, key=key)


@problem(jnp.uint32(3), has_gradient=False)
def keys(seed):
    key = jax.random.key(seed)
    first, second = jax.random.split(key)
    key = jax.random.fold_in(first, 7)
    data = jax.random.key_data(second)
    return jax.random.normal(key, (3,)), jax.random.bits(key, (2,)), data


@problem(KEY, has_gradient=False)
def many_keys(key):
    return jax.vmap(lambda k: jax.random.uniform(k, (2,)))(jax.random.split(key, 3))


# Layers.


def layer(name, make, x, **settings):
    module = without_key(make)
    dynamic, static = eqx.partition(module, eqx.is_array)

    def f(dynamic, x):
        return eqx.combine(dynamic, static)(x, **settings)

    f.__name__ = name
    PROBLEMS[name] = Problem(f, (dynamic, x))


nn = eqx.nn
IMAGE = jnp.sin(jnp.arange(32.0)).reshape(2, 4, 4)
layer("linear", functools.partial(nn.Linear, 6, 3), X)
layer("mlp", functools.partial(nn.MLP, 6, 2, 8, 2), X)
layer("mlp_gelu", functools.partial(nn.MLP, 6, "scalar", 4, 1, jax.nn.gelu), X)
layer("convolution", functools.partial(nn.Conv2d, 2, 3, 3, padding=1), IMAGE)
layer("transposed", functools.partial(nn.ConvTranspose2d, 2, 1, 2, stride=2), IMAGE)
layer("max_pool", lambda key: nn.MaxPool2d(2, 2), IMAGE)
layer("layer_norm", lambda key: nn.LayerNorm(6), X)
layer("group_norm", lambda key: nn.GroupNorm(1, 2), IMAGE)
layer("rms_norm", lambda key: nn.RMSNorm(6), X)
layer("embedding", functools.partial(nn.Embedding, 5, 3), jnp.array(2))
layer("prelu", lambda key: nn.PReLU(), X)


@problem(eqx.filter(without_key(nn.GRUCell, 6, 4), eqx.is_array), MATRIX)
def gru(dynamic, xs):
    cell = eqx.combine(dynamic, nn.GRUCell(6, 4, key=KEY))
    return lax.scan(lambda h, x: (cell(x, h), h), jnp.zeros(4), xs)


@problem(eqx.filter(without_key(nn.LSTMCell, 6, 4), eqx.is_array), MATRIX)
def lstm(dynamic, xs):
    cell = eqx.combine(dynamic, nn.LSTMCell(6, 4, key=KEY))
    carry = jnp.zeros(4), jnp.zeros(4)
    return el.CheckpointedScan(lambda c, x: (cell(x, c), None), base=2)(carry, xs)[0]


@problem(eqx.filter(without_key(nn.MultiheadAttention, 2, 6), eqx.is_array), MATRIX)
def attention(dynamic, x):
    layer = eqx.combine(dynamic, nn.MultiheadAttention(2, 6, key=KEY))
    return layer(x, x, x, mask=jnp.tril(jnp.ones((6, 6), bool)))


# Losses and updates.


@problem(MATRIX, jnp.array([0, 1, 2, 3, 4, 5]))
def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@problem(X, X[::-1])
def huber(x, y):
    return optax.huber_loss(x, y).sum() + optax.l2_loss(x).mean()


@problem(MATRIX)
def softmax(m):
    return jax.nn.softmax(m), jax.nn.logsumexp(m, 1), jax.nn.log_softmax(m, 0)


@problem(X)
def activations(x):
    nn = jax.nn
    return nn.relu(x), nn.silu(x), nn.elu(x), nn.softplus(x), nn.relu6(x), nn.selu(x)


def update(name, optimizer):
    def f(params, grads):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    f.__name__ = name
    grads = {"w": 2 + jnp.sin(MATRIX), "b": -X}
    # Optax multiplies integers with floats.
    PROBLEMS[name] = Problem(lenient(f), ({"w": MATRIX, "b": X}, grads))


update("sgd", optax.sgd(0.1, momentum=0.9))
update("adam", optax.adam(1e-2))
update("adamw", optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))
update("rmsprop", optax.rmsprop(1e-2))
update("schedule", optax.sgd(optax.cosine_decay_schedule(0.1, 10)))


@problem(MATRIX, X)
def gradient_step(w, x):
    loss = lambda w: jnp.sum(jnp.tanh(w @ x) ** 2)
    value, grad = jax.value_and_grad(loss)(w)
    return value, w - 0.1 * grad


@problem(X)
def second_derivatives(x):
    f = lambda x: jnp.sum(jnp.sin(x) ** 3)
    return jax.hessian(f)(x), jax.jvp(jax.grad(f), (x,), (x,))[1]


# Steps of ODEs.


def field(y):
    return jnp.stack([y[1], (1 - y[0] ** 2) * y[1] - y[0]])


@problem(X[:2])
def euler(y):
    return lax.fori_loop(0, 5, lambda _, y: y + 0.1 * field(y), y)


@problem(X[:2])
def runge_kutta(y):
    def step(y, dt):
        k1 = field(y)
        k2 = field(y + dt / 2 * k1)
        k3 = field(y + dt / 2 * k2)
        k4 = field(y + dt * k3)
        return y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), y

    return lax.scan(step, y, jnp.full(4, 0.1))


@problem(X[:2], has_gradient=False)
def adaptive(y):
    def body(state):
        t, dt, y = state
        full = y + dt * field(y)
        half = y + dt / 2 * field(y)
        half = half + dt / 2 * field(half)
        error = jnp.max(jnp.abs(full - half))
        accept = error < 1e-2
        t, y = jnp.where(accept, t + dt, t), jnp.where(accept, half, y)
        return t, jnp.where(accept, dt * 1.2, dt / 2), y

    return lax.while_loop(lambda s: s[0] < 0.5, body, (0.0, 0.1, y))


# Control flow.


@problem(X)
def scan_of_everything(x):
    def step(carry, x):
        a, (b, n) = carry
        return (a * x + b, (b, n + 1)), {"y": a, "n": n, "zero": jnp.zeros(2)}

    return lax.scan(step, (0.5, (x[0], 0)), x, reverse=True, unroll=2)


@problem(X)
def nested_scans(x):
    def outer(c, x):
        def inner(d, y):
            return d + c * y, d

        return lax.scan(inner, x, jnp.arange(3.0))

    return lax.scan(outer, 0.0, x)


@problem(X)
def many_carries(x):
    names = [f"c{i}" for i in range(12)]

    def step(c, x):
        return {n: c[names[i - 1]] + i * x for i, n in enumerate(names)}, c["c3"]

    return lax.scan(step, {n: x[i % 6] for i, n in enumerate(names)}, x)


@problem(X)
def unchanged_carry(x):
    w = jnp.ones(6)
    carry, ys = lax.scan(lambda c, x: ((c[0], c[1] + x), c[1]), (w * x, 0.0), x)
    return carry, ys


@problem(jnp.array(10.0), has_gradient=False)
def collatz(n):
    step = lambda c: (jnp.where(c[0] % 2 == 0, c[0] / 2, 3 * c[0] + 1), c[1] + 1, c[2])
    return lax.while_loop(lambda c: c[0] > 1, step, (n, 0, n * 2))[:2]


@problem(X)
def while_with_constants(x):
    w, limit = jnp.cos(x), jnp.sum(x) + 3.0

    def body(c):
        i, y, unused = c
        return i + 1.0, y * w, unused + y

    return lax.stop_gradient(lax.while_loop(lambda c: c[0] < limit, body, (0.0, x, x)))


@problem(X + 1.5, has_gradient=False)
def loops_under_vmap(x):
    def double(x, limit):
        return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] * 2, c[1]), x)

    def drawn(key):
        more = lambda c: (c[0] + jax.random.uniform(c[1]), jax.random.split(c[1])[0])
        return lax.while_loop(lambda c: c[0] < 1.0, more, (0.0, key))[0]

    nested = lambda x: lax.while_loop(
        lambda c: c < 20.0, lambda c: double((c, c), c + 3.0)[0] + x, x
    )
    pairs = x.reshape(2, 3)
    return (
        jax.vmap(double)((x, x[::-1]), 9.0 + x),
        jax.vmap(jax.vmap(lambda x: double((x, x), 8.0)))(pairs),
        jax.vmap(nested)(x),
        jax.vmap(lambda x, n: lax.fori_loop(0, n, lambda i, c: c + i, x))(
            jnp.arange(6), jnp.arange(6)
        ),
        jax.vmap(drawn)(jax.random.split(KEY, 3)),
        jax.jvp(jax.vmap(nested), (x,), (x,)),
    )


@problem(X)
def branches_under_vmap(x):
    wave = lambda x: lax.cond(x > 0.5, jnp.cos, jnp.sin, x)
    choose = lambda x: lax.cond(x > 0, wave, lambda x: x * 2, x)
    switch = lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, wave], x)
    return jax.vmap(choose)(x), jax.vmap(switch)(x, jnp.arange(6) - 1)


@problem(X)
def branches_by_an_index(x):
    which = jnp.argmax(x) - 9
    above = x[0] > 0
    return (
        lax.switch(which, [jnp.cos, jnp.exp], x),
        lax.select_n(jnp.int32(5), x, x + 1, x * 2),
        lax.select_n(jnp.full(6, -1), x, x + 1, x * 2),
        lax.cond(above, jnp.sin, jnp.cos, x) * above.astype(x.dtype),
        lax.cond(above, lambda: 1.0, lambda: 2.0),
    )


@problem(X)
def branches(x):
    positive = lax.cond(x.sum() > 0, jnp.sin, lambda x: x * 2, x)
    which = jnp.argmax(x) % 3
    return positive, lax.switch(which, [jnp.cos, lambda x: x, jnp.exp], x)


@problem(X)
def known_branch(x):
    return lax.cond(jnp.array(True), jnp.sin, jnp.cos, x) + lax.switch(
        jnp.array(5), [jnp.sin, jnp.tanh], x
    )


@problem(X)
def branch_with_two_results(x):
    def yes(x):
        return x, x * 2, jnp.ones(3)

    return lax.cond(x[0] > 0, yes, lambda x: (x * 3, x, jnp.ones(3)), x)


@problem(X)
def calls(x):
    @jax.jit
    def scaled(x, scale):
        return jnp.sin(x) * scale, scale

    first, one = scaled(x, 1.0)
    second, _ = scaled(first, 2.0)
    return second * one


@problem(X)
def rematerialised(x):
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * 1.0))
    named = el.Remat(
        lambda x: el.name(jnp.cos(x), "half") * x, policy=el.policies.save_names("half")
    )
    return f(x) + named(x)


@problem(X)
def grad_of_rematerialised(x):
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum(), prevent_cse=False)
    return jax.grad(f)(x)


@jax.custom_jvp
def clipped(x, n):
    return jnp.clip(x, -0.5, 0.5) * n


@clipped.defjvp
def _(primals, tangents):
    x, n = primals
    return clipped(x, n), tangents[0] * n


@problem(X)
def custom_forward_rule(x):
    return clipped(x * 1.0, 3), clipped(x, 2)


@jax.custom_vjp
def reversed_gradient(x, scale):
    return x * 1.0, jnp.arange(3)


reversed_gradient.defvjp(
    lambda x, scale: (reversed_gradient(x, scale), scale),
    lambda scale, cts: (-cts[0] * scale, jnp.zeros(())),
)


@problem(X)
def custom_backward_rule(x):
    return reversed_gradient(jnp.sin(x), 0.5)


@problem(X)
def barrier(x):
    y, z = lax.optimization_barrier((x, x + 1))
    return y * z, lax.optimization_barrier(x) + x


@problem(X)
def associative(x):
    return lax.associative_scan(lambda a, b: a * b + a, x)


@problem(X)
def mapped(x):
    return lax.map(lambda x: jnp.sin(x) * 1.0, x), jax.vmap(lax.cumsum)(
        MATRIX * x[None]
    )


# This library's own.


@problem(X)
def recursive_scan(x):
    return el.CheckpointedScan(lambda c, x: (jnp.sin(c + x), c * x), base=2)(0.0, x)


@problem(X)
def binomial_scan(x):
    step = lambda c, x: (jnp.sin(c * 1.0 + x), None)
    return el.Scan(step, schedule=el.Binomial(2))(0.0, x)[0]


@problem(X)
def grad_of_scan(x):
    loss = lambda x: el.CheckpointedScan(lambda c, x: (jnp.sin(c * x), c))(1.0, x)[0]
    return jax.grad(loss)(x)


def under_vmap(f):
    return lambda x, *rest: jax.vmap(lambda x: f(x, *rest))(jnp.stack([x, x / 2]))


def total_under_vmap(f):
    return lambda *args: jnp.sum(under_vmap(f)(*args))


def jvp(f):
    return lambda x, *rest: jax.jvp(lambda x: f(x, *rest), (x,), (x,))


# The first of these of every loop, and one of the second order; all of them each week.
DERIVATIVES = {
    "grad": jax.grad,
    "jvp": jvp,
    "hessian": jax.hessian,
    "vmap_of_grad": lambda f: under_vmap(jax.grad(f)),
    "grad_of_vmap": lambda f: jax.grad(total_under_vmap(f)),
}


def own(name, f, *args):
    """The derivatives of a loop of this library as problems."""
    for way, derivative in DERIVATIVES.items():
        g = functools.partial(derivative(f))
        g.__name__ = f"{way}_of_{name}"
        is_quick = way == "grad" or (way, name) == ("hessian", "binomial_scan")
        PROBLEMS[g.__name__] = Problem(g, args, False, is_quick)


def own_scan(schedule):
    step = lambda h, x: (jnp.sin(h * x) + 0.1 * h, h * x)

    def loss(h, xs):
        h, ys = el.Scan(step, schedule=schedule)(h, xs)
        return h + jnp.sum(ys)

    return loss


def own_while(make, **settings):
    loop = make(
        lambda c: c[0] < 3.0, lambda c: (c[0] * 1.5 + 0.1, jnp.sin(c[1])), **settings
    )
    return lambda x: loop((x, x))[1]


START = jnp.asarray(0.3, float)
own("stored_scan", own_scan(el.StoreAll()), START, X)
own("recursive_scan", own_scan(el.Recursive(2)), START, X)
own("binomial_scan", own_scan(el.Binomial(2)), START, X)
own("chunked_scan", own_scan(el.Chunked(2)), START, X)
own("budgeted_scan", own_scan(el.Budget("10KiB")), START, X)
own("checkpointed_while", own_while(el.CheckpointedWhileLoop, checkpoints=2), START)
own("bounded_while", own_while(el.BoundedWhileLoop, max_steps=9), START)
chunked = el.ChunkedVmap(lambda x: jnp.sin(x) * x.sum(), chunk_size=2)
own("chunked_map", lambda m: jnp.sum(chunked(m)), MATRIX[:3, :2])


@problem(X)
def scan_under_vmap(x):
    f = el.CheckpointedScan(lambda c, x: (c * x + 1.0, c), base=2)
    return jax.vmap(f, in_axes=(0, None))(x, x)


@problem(MATRIX)
def chunked_map(m):
    return el.ChunkedVmap(lambda x: jnp.sin(x) * x.sum(), chunk_size=4)(m)


# Effects.


@problem(X)
def printing(x):
    jax.debug.print("first {x} {{}}", x=x[0])
    y, _ = lax.scan(lambda c, x: (c + x, jax.debug.print("{}", c)), 0.0, x)
    jax.debug.print("last", ordered=False)
    return y
