"""`Trace.leaf_usage`, beside what changes when a leaf does."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqloop as el

X, Y, Z = jnp.arange(1.0, 4.0), jnp.array([0.5, -1.0, 2.0]), jnp.array([3.0, 5.0, 7.0])
N = jnp.int32(2)


@jax.custom_vjp
def first(a, b):
    return 2 * a


first.defvjp(lambda a, b: (2 * a, b), lambda b, g: (2 * g, b))


@jax.custom_jvp
def second(a, b):
    return b * 2


second.defjvp(lambda primals, tangents: (2 * primals[1], 2 * tangents[1]))


def count_down(state):
    n, x, y = state
    return n - 1, x * 2, y


def rotate(h, x):
    """Each leaf of the carry becomes another one."""
    return (h[2], h[0], h[1] * 2), x


def layers(scan):
    return lambda a, b, c: scan(lambda h, x: (jnp.sin(h * b[0] + x), None))(a[0], c)[0]


UNUSED, PASSED, READ = ORDER = ("unused", "passed", "read")
CASES = {
    "identity": (lambda a, b: (b, a), [X, Y], [PASSED, PASSED]),
    "arithmetic": (lambda a, b, c: a + b, [X, Y, Z], [READ, READ, UNUSED]),
    "read and passed": (lambda a, b: (a, a * b), [X, Y], [READ, READ]),
    "of its shape alone": (lambda a, b: jnp.ones_like(a) + b, [X, Y], [UNUSED, READ]),
    "computed in vain": (lambda a, b: (jnp.sin(a), b)[1], [X, Y], [UNUSED, PASSED]),
    "where": (
        lambda n, a, b: jnp.where(a > n.astype(float), a, 2 * b),
        [N, X, Y],
        [READ] * 3,
    ),
    "integers": (lambda n, m: (n + 1, m), [N, jnp.arange(2)], [READ, PASSED]),
    "a key": (
        lambda key, a: (jax.random.normal(key), a),
        [jax.random.key(0), X],
        [READ, PASSED],
    ),
    "jit": (jax.jit(lambda a, b, c: (a, b * 2)), [X, Y, Z], [PASSED, READ, UNUSED]),
    "jit in vain": (
        lambda a, b: jax.jit(lambda a, b: (a * 2, b * 3))(a, b)[0],
        [X, Y],
        [READ, UNUSED],
    ),
    "jit that is read": (
        lambda a, b: jax.jit(lambda a, b: (a, b))(a, b)[0] * 2,
        [X, Y],
        [READ, UNUSED],
    ),
    "checkpoint": (
        jax.checkpoint(lambda a, b: (a, jnp.sin(a), b)),
        [X, Y],
        [READ, PASSED],
    ),
    "custom_vjp": (first, [X, Y], [READ, UNUSED]),
    "custom_jvp": (second, [X, Y], [UNUSED, READ]),
    "grad of a custom_vjp": (
        lambda a, b: jax.grad(lambda a: jnp.sum(first(a, b)) ** 2)(a),
        [X, Y],
        [READ, UNUSED],
    ),
    "cond": (
        lambda n, a, b, c: lax.cond(n > 1, lambda: (a, b), lambda: (a, -c)),
        [N, X, Y, Z],
        [READ, PASSED, PASSED, READ],
    ),
    "cond in vain": (
        lambda n, a, b: lax.cond(n > 1, lambda: (a, b), lambda: (a * 2, b))[1],
        [N, X, Y],
        [UNUSED, UNUSED, PASSED],
    ),
    "switch": (
        lambda n, a, b: lax.switch(n, [jnp.sin, jnp.cos, lambda a: a], a),
        [N, X, Y],
        [READ, READ, UNUSED],
    ),
    "scan": (layers(lambda f: functools.partial(lax.scan, f)), [X, Y, Z], [READ] * 3),
    "scan that passes": (
        lambda a, b, c: lax.scan(lambda h, x: (h, (x, h)), a, b)[1][0],
        [X, Y, Z],
        [UNUSED, PASSED, UNUSED],
    ),
    "scan whose carry stays": (
        lambda a, b, c: lax.scan(lambda h, x: ((h[0], h[1] * c), x), (a, b), None, 2)[
            0
        ],
        [X, Y, Z],
        [PASSED, READ, READ],
    ),
    "scan that stacks": (
        lambda a, b: lax.scan(lambda h, x: (h, b), a, None, 2),
        [X, Y],
        [PASSED, READ],
    ),
    "scan that rotates": (
        lambda a, b, c: sum(lax.scan(rotate, (a, b, c), None, 2)[0]),
        [X, Y, Z],
        [READ, READ, READ],
    ),
    "scan of nothing": (
        lambda a, b: lax.scan(lambda h, x: (h * b, None), a, None, 0)[0],
        [X, Y],
        [PASSED, UNUSED],
    ),
    "while": (
        lambda n, a, b: lax.while_loop(lambda s: s[0] > 0, count_down, (n, a, b)),
        [N, X, Y],
        [READ, READ, PASSED],
    ),
    "while in vain": (
        lambda n, a, b: lax.while_loop(lambda s: s[0] > 0, count_down, (n, a, b))[2],
        [N, X, Y],
        [UNUSED, UNUSED, PASSED],
    ),
    "while with consts": (
        lambda n, a, b: lax.while_loop(lambda s: s[0] < n, lambda s: s + a, b),
        [jnp.float32(9.0), X, Y],
        [READ, READ, READ],
    ),
    "Scan": (layers(el.Scan), [X, Y, Z], [READ] * 3),
    "CheckpointedScan": (
        lambda a, b, c: el.CheckpointedScan(lambda h, x: ((h[0], h[1] * c), None), 2)(
            (a, b), X
        )[0],
        [X, Y, Z],
        [PASSED, READ, READ],
    ),
    "grad of a CheckpointedScan": (
        lambda a, b, c: jax.grad(layers(lambda f: el.CheckpointedScan(f, 2)))(a, b, c),
        [X, Y, Z],
        [READ, READ, READ],
    ),
    "ChunkedVmap": (
        lambda a, b, c: el.ChunkedVmap(lambda a, b: a * c, 2)(a, b),
        [X, Y, Z],
        [READ, UNUSED, READ],
    ),
    "Cond": (
        lambda n, a, b: el.Cond(lambda a, b: a, lambda a, b: -a)(n > 1, a, b),
        [N, X, Y],
        [READ, READ, UNUSED],
    ),
    "vmap with a collective": (
        lambda a, b: jax.vmap(lambda a, b: lax.psum(a, "i"), axis_name="i")(a, b),
        [X, Y],
        [READ, UNUSED],
    ),
    "linear_solve": (
        lambda a, b: jnp.linalg.solve(jnp.diag(a), b),
        [X, Y],
        [READ, READ],
    ),
}


def changed(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(5)
    return leaf - 1 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf * 0.75 + 0.1


def raw(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def same(one, other):
    return one.shape == other.shape and np.array_equal(raw(one), raw(other))


def usage_by_changing(f, args):
    """What a leaf is, from what becomes of the results when it is another one."""
    elsewhere = [*map(changed, args)]  # on another branch, for instance
    return [
        max(_usage_at(f, point, i) for point in (args, elsewhere))
        for i in range(len(args))
    ]


def _usage_at(f, args, i):
    before, now = jax.tree.leaves(f(*args)), changed(args[i])
    after = jax.tree.leaves(f(*args[:i], now, *args[i + 1 :]))
    moved = [(b, a) for b, a in zip(before, after, strict=True) if not same(b, a)]
    # Whatever moved is the leaf itself, before and after.
    is_leaf = [same(b, args[i]) and same(a, now) for b, a in moved]
    return ORDER.index((PASSED if all(is_leaf) else READ) if moved else UNUSED)


@pytest.mark.parametrize("case", CASES)
def test_usage_agrees_with_changing_each_leaf(case):
    f, args, expected = CASES[case]
    assert list(el.Trace(f).leaf_usage(*args).values()) == expected
    by_changing = usage_by_changing(jax.jit(f), args)
    assert [ORDER[usage] for usage in by_changing] == expected


def test_effects_read():
    def f(a, b):
        jax.debug.print("{}", a)
        lax.fori_loop(0, 2, lambda i, b: (jax.debug.print("{}", b), b)[1], b)
        return a

    assert list(el.Trace(f).leaf_usage(X, Y).values()) == [READ, READ]


class Model(eqx.Module):
    used: jax.Array
    spare: jax.Array
    name: str = "model"

    def __call__(self, x, *, scale):
        return {
            "y": self.used * x["a"] * (scale > 1).astype(float),
            "spare": self.spare,
        }


def test_leaves_are_named_as_one_would_write_them():
    usage = el.Trace(Model(X, Y)).leaf_usage({"a": X, "b": [Y, "s"]}, scale=N)
    assert usage == {
        "f.used": READ,
        "f.spare": PASSED,
        "x['a']": READ,
        "x['b'][0]": UNUSED,
        "scale": READ,
    }
    assert el.Trace(lambda *xs: xs[0]).leaf_usage(X, Y) == {
        "args[0]": PASSED,
        "args[1]": UNUSED,
    }


def test_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    specs = dict(in_specs=(spec, spec), out_specs=(spec, spec))
    f = jax.shard_map(lambda a, b: (a * 2, b), mesh=mesh, **specs)
    assert list(el.Trace(f).leaf_usage(X, Y).values()) == [READ, PASSED]
