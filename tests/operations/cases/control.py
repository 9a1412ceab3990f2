"""Branches, loops, calls, and functions with rules of their own."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..case import Case
from ..values import ALL, indices, keys, mixed, plain


def cases() -> Iterator[Case]:
    yield from _branches()
    yield from _whiles()
    yield from _scans()
    yield from _calls()
    yield from _hijax()


def _branches() -> Iterator[Case]:
    ways = [lambda x: x + 1, lambda x: x * 2, lambda x: lax.rev(x, (0,))]
    for dtype in ("int32", "uint8", "int64"):
        f = lambda i, x: lax.switch(i, ways, x)
        yield Case("cond", dtype, f, [indices(dtype, limit=3), plain("float32", 3)], 4)
    f = lambda i, x: lax.cond(i, *ways[:2], x)
    yield Case("cond", "bool", f, [plain("bool"), plain("float32", 3)], 4)
    f = lambda i, x: lax.cond(x[0] > 0, lambda: x, lambda: x * i)
    yield Case("cond", "read inside", f, [plain("float32"), plain("float32", 3)], 4)
    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: x + 1, default=lambda x: x - 1
    )
    yield Case("platform_index", "", f, [plain("float32", 3)])
    other = lambda x: lax.platform_dependent(
        x, tpu=lambda x: x + 1, default=lambda x: x - 1
    )
    yield Case("platform_index", "other", other, [plain("float32", 3)])


def _whiles() -> Iterator[Case]:
    count = plain("int32") % 5

    def until(n: Any, x: Any) -> Any:
        return lax.while_loop(
            lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0 * n, x)
        )

    yield Case(
        "while",
        "a counter, to a bound of the row",
        until,
        [count, plain("float32", 2)],
        16,
    )

    def from_nothing(x: Any) -> Any:
        go = lambda c: (c[1] < 20) & (c[0] < 50)
        return lax.while_loop(
            go, lambda c: (c[0] + 1, c[1] + x * x + 0.5), (0, jnp.float32(0))
        )

    yield Case(
        "while",
        "a counter from 0, to a value of the row",
        from_nothing,
        [plain("float32")],
        16,
    )
    yield Case(
        "while",
        "a bound",
        lambda n: lax.fori_loop(0, n, lambda i, c: c + i, 0),
        [count],
    )
    yield Case(
        "while",
        "a start",
        lambda n: lax.fori_loop(n, 5, lambda i, c: c + 2 * i, 1),
        [count],
    )
    yield Case(
        "while",
        "a sum",
        lambda n, x: lax.fori_loop(0, n, lambda i, c: c + x[i], jnp.float32(0)),
        [count, plain("float32", 5)],
        16,
        has_slope=False,
    )

    def consts(n: Any, x: Any) -> Any:
        return lax.while_loop(
            lambda c: jnp.sum(c) < n,
            lambda c: c + jnp.abs(x) + 1,
            jnp.zeros(2, "float32"),
        )

    yield Case(
        "while",
        "constants of both",
        consts,
        [plain("float32") + 4, plain("float32", 2)],
        16,
    )

    def unlike(n: Any) -> Any:
        step = lambda c: (c[1], c[0] + 1, c[2] + n)
        return lax.while_loop(lambda c: c[0] + c[1] < 7, step, (0, 0, 0 * n))

    yield Case("while", "carries change places", unlike, [count])

    def never(n: Any) -> Any:
        return lax.while_loop(lambda c: c < 0, lambda c: c + 1, n * n)

    yield Case("while", "never", never, [count])
    yield Case(
        "while",
        "for all rows",
        lambda x: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, x)
        ),
        [plain("float32", 2)],
        16,
    )

    def booleans(x: Any) -> Any:
        step = lambda c: (c[0] + 1, (c[0] > 3) | (x[0] > 1))
        return lax.while_loop(lambda c: ~c[1], step, (0, jnp.array(False)))

    yield Case("while", "a flag", booleans, [plain("float32", 2)])


def _scans() -> Iterator[Case]:
    def run(x: Any, reverse: bool = False, unroll: int = 1, length: Any = None) -> Any:
        step = lambda h, x: (h * 0.5 + x, h - x)
        return lax.scan(step, x[0], x, length, reverse, unroll)

    for reverse, unroll, n in itertools.product((False, True), (1, 2), (4, 5, 1)):
        f = functools.partial(run, reverse=reverse, unroll=unroll)
        yield Case("scan", f"{reverse} {unroll} {n}", f, [plain("float32", n)], 16)
    f = lambda x: lax.scan(lambda h, _: (h + x, h), x * 0, None, 3)
    yield Case("scan", "no xs", f, [plain("float32", 2)], 16)
    f = lambda x, w: lax.scan(lambda h, y: (jnp.tanh(w @ h + y), None), x[0], x)[0]
    yield Case(
        "scan", "constants", f, [plain("float32", 3, 2), plain("float32", 2, 2)], 32
    )
    f = lambda x: lax.scan(lambda h, y: (h, y), 0, x)
    yield Case("scan", "nothing changes", f, [plain("int32", 3)])
    f = lambda x: lax.scan(lambda i, y: (i + 1, y * i), 0, x)
    yield Case("scan", "a counter", f, [plain("int32", 3)])
    f = lambda k: lax.scan(
        lambda k, _: (jax.random.split(k)[0], jax.random.bits(k)), k, None, 2
    )
    yield Case("scan", "keys", f, [keys("threefry2x32")])


@jax.custom_jvp
def _pushed(x: Any) -> Any:
    return jnp.abs(x)


@_pushed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _pushed(*primals), 3 * tangents[0]


@jax.custom_vjp
def _pulled(x: Any) -> Any:
    return jnp.abs(x)


_pulled.defvjp(lambda x: (jnp.abs(x), x), lambda x, ct: (5 * ct * x,))


@jax.custom_batching.custom_vmap
def _mapped(x: Any) -> Any:
    return x * 2


@_mapped.def_vmap
def _(size: int, batched: Any, x: Any) -> Any:
    del size
    return x * 2, batched[0]


def _calls() -> Iterator[Case]:
    for dtype in ("float32", "bfloat16", "complex64"):
        x = [plain(dtype, 3)]
        yield Case(
            "custom_jvp_call",
            "",
            _pushed,
            x if dtype[0] != "c" else [plain("float64", 3)],
        )
        yield Case(
            "custom_vjp_call",
            "",
            _pulled,
            x if dtype[0] != "c" else [plain("float64", 3)],
        )
        yield Case("jit", "", jax.jit(lambda x: x * 2 + 1), x)
        yield Case("remat2", "", jax.checkpoint(lambda x: jnp.sin(x) * 2), x)
    policy = jax.checkpoint_policies.everything_saveable
    f = jax.checkpoint(lambda x: jnp.sin(x) * 2, policy=policy, prevent_cse=False)
    yield Case("remat2", "policy", f, [plain("float32", 3)])
    yield Case("custom_vmap_call", "", _mapped, [plain("float32", 3)])
    yield Case(
        "custom_vmap_call", "two", lambda x: _mapped(jnp.sin(x)), [plain("float64", 3)]
    )
    linear = lambda x: jax.custom_derivatives.linear_call(
        lambda r, y: r * y, lambda r, y: r * y, x, x + 1
    )
    yield Case("linear_call", "", linear, [plain("float32", 3)])
    composite = lax.composite(lambda x: x * 2, "eqloop.twice")
    yield Case("composite", "", composite, [plain("float32", 3)])
    other = lax.composite(lambda x, k: x * k, "eqloop.times", version=1)
    yield Case(
        "composite",
        "attributes",
        lambda x: other(x, k=np.float32(3)),
        [plain("float32", 3)],
    )
    solve = lambda mv, b: b / mv(jnp.ones_like(b))
    for symmetric in (True, False):
        f = lambda d, b, s=symmetric: lax.custom_linear_solve(
            lambda x: (jnp.abs(d) + 1) * x, b, solve, None if s else solve, symmetric=s
        )
        yield Case(
            "custom_linear_solve",
            f"{symmetric}",
            f,
            [plain("float32", 3), plain("float32", 3)],
            32,
        )
    aux = lambda mv, b: (b / mv(jnp.ones_like(b)), b)
    f = lambda d, b: lax.custom_linear_solve(
        lambda x: (jnp.abs(d) + 1) * x, b, aux, symmetric=True, has_aux=True
    )[0]
    yield Case(
        "custom_linear_solve", "aux", f, [plain("float32", 3), plain("float32", 3)], 32
    )
    f = lambda x: lax.custom_root(
        lambda y: y**3 - x,
        x,
        lambda f, y: jnp.cbrt(x),
        lambda g, y: y / g(jnp.ones_like(y)),
    )
    yield Case("custom_root", "", f, [plain("float32", low=0.5)], 64)
    shut = jax.closure_convert(lambda x: jnp.sin(x), plain("float32")[0])[0]
    yield Case("jit", "closed", lambda x: jax.jit(shut)(x), [plain("float32")])


def _hijax() -> Iterator[Case]:
    xp = np.array([-1.0, -0.5, 0.0, 0.0, 1.5], "float32")
    for dtype in ("float32", "int32", "bfloat16", "float64"):
        for side, method in itertools.product(
            ("left", "right"), ("scan", "sort", "compare_all")
        ):
            f = lambda a, v, s=side, m=method: jnp.searchsorted(
                jnp.sort(a), v, side=s, method=m
            )
            yield Case(
                "SearchSorted",
                f"{side} {method}",
                f,
                [mixed(dtype, 5), mixed(dtype, 3)],
            )
    yield Case(
        "SearchSorted",
        "interp",
        lambda x: jnp.interp(x, xp, xp**2),
        [mixed("float32", 3)],
    )
    yield Case(
        "SearchSorted", "digitize", lambda x: jnp.digitize(x, xp), [mixed("float32", 3)]
    )
    for size, fill in ((2, 0), (5, -1)):
        f = lambda x, s=size, v=fill: jnp.nonzero(x > 0, size=s, fill_value=v)
        yield Case("Nonzero", f"{size} {fill}", f, [mixed("float32", 4)])
    yield Case(
        "Nonzero", "unique", lambda x: jnp.unique(x, size=4), [plain("int32", 4)]
    )
    f = lambda k: jax.random.choice(
        k, 4, (3,), p=jnp.array([0.1, 0.2, 0.3, 0.4], "float32")
    )
    yield Case("SearchSorted", "choice", f, [keys("threefry2x32")])
    for dtype in ALL:
        yield Case("Ldexp", "", jnp.ldexp, [mixed(dtype, 4), mixed("int32", 4)])
        yield Case("Frexp", "", jnp.frexp, [mixed(dtype, 4)])
