"""Our loops stand in for theirs: they give the same, are ours, and go again."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqloop as el

from ..marks import slow, slow_if
from .stand_ins import VARIANTS, replaced, stand_in

_PLACES = [
    *[(lax, name) for name in ("scan", "while_loop", "fori_loop", "map")],
    *[(eqxi, name) for name in ("while_loop", "scan")],
]
_X = jnp.arange(1.0, 6.0) / 5


def _step(carry: Any, x: Any) -> Any:
    return jnp.sin(carry + x), carry * x


def _grows(carry: Any) -> Any:
    return carry[0] < 5


def _grow(carry: Any) -> Any:
    return carry[0] + 1, jnp.sin(2 * carry[1])


def _scan(x: Any) -> Any:
    return lax.scan(_step, x[0], x, reverse=True, unroll=2)


def _counted(x: Any) -> Any:
    return lax.fori_loop(1, 4, lambda i, y: y * x[i], x[0])


def _map(x: Any) -> Any:
    return lax.map(lambda y: jnp.sin(y), x), lax.map(jnp.cos, x, batch_size=2)


def _equinox_scan(x: Any) -> Any:
    return [
        eqxi.scan(_step, x[0], x, kind="checkpointed", checkpoints=checkpoints)
        for checkpoints in (None, 3, "all")
    ]


def _equinox_while(x: Any) -> Any:
    settings: list[Any] = [
        dict(kind="checkpointed", checkpoints=2),
        dict(kind="bounded", max_steps=3),
    ]
    return [eqxi.while_loop(_grows, _grow, (0, x), **some)[1] for some in settings]


def _forward_loops(x: Any) -> Any:
    def counted(stop: Any) -> Any:
        return lax.fori_loop(0, stop, lambda i, y: jnp.sin(y + i.astype(y.dtype)), x)

    return (
        lax.while_loop(_grows, _grow, (0, x)),
        jax.jit(counted)(3),
        eqxi.while_loop(_grows, _grow, (0, x), kind="lax", max_steps=3),
    )


def _pushed(f: Callable[..., Any]) -> Any:
    return jax.jvp(f, (_X,), (jnp.cos(_X),))


def _pulled(f: Callable[..., Any]) -> Any:
    out, pull = jax.vjp(f, _X)
    return out, pull(jax.tree.map(jnp.ones_like, out))


# The others are as much work to compile, and have less in them that could go wrong.
_SOME = slow_if(lambda variant: variant != "binomial", VARIANTS)


@pytest.mark.parametrize("variant", _SOME)
@pytest.mark.parametrize(
    ("take", "f"),
    [
        (_pulled, _scan),
        *[slow(_pulled, f) for f in (_counted, _map)],
        slow(_pulled, _equinox_scan),
        slow(_pulled, _equinox_while),
        (_pushed, _forward_loops),
    ],
)
def test_they_give_the_same(
    variant: str, take: Callable[..., Any], f: Callable[..., Any]
) -> None:
    expected = take(f)
    with replaced(VARIANTS[variant]):
        ours = take(f)
    assert eqx.tree_equal(ours, expected, typematch=False, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_they_are_ours(variant: str) -> None:
    ours = el.Scan(_step, schedule=VARIANTS[variant].schedule)
    expected = str(jax.make_jaxpr(lambda x: ours(x[0], x))(_X))
    with replaced(VARIANTS[variant]):
        theirs = str(jax.make_jaxpr(lambda x: lax.scan(_step, x[0], x))(_X))
    assert theirs == expected


def test_a_number_that_comes_back_is_an_array() -> None:
    with replaced(VARIANTS["plain"]):
        kept, _ = lax.scan(lambda carry, _: (carry, None), 2.0, length=3)
    assert isinstance(kept, jax.Array)


def test_they_look_like_theirs() -> None:
    signatures = [inspect.signature(getattr(*place)) for place in _PLACES]
    with replaced(VARIANTS["plain"]):
        ours = [inspect.signature(getattr(*place)) for place in _PLACES]
    assert ours == signatures


def test_they_go_again() -> None:
    before = [getattr(*place) for place in _PLACES]

    def fail() -> None:
        with replaced(VARIANTS["plain"]):
            during = [getattr(*place) for place in _PLACES]
            assert all(a is not b for a, b in zip(before, during, strict=True))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(a is getattr(*b) for a, b in zip(before, _PLACES, strict=True))


def test_our_adjoint_stands_in_for_theirs() -> None:
    diffrax = pytest.importorskip("diffrax")
    ours = pytest.importorskip("eqloop.diffrax").CheckpointedAdjoint

    def end(y0: Any, **settings: Any) -> Any:
        term = diffrax.ODETerm(lambda t, y, args: -y)
        how = term, diffrax.Euler(), 0.0, 1.0, 0.25, y0
        return diffrax.diffeqsolve(*how, **settings).ys[0]

    theirs = diffrax.diffeqsolve, diffrax.RecursiveCheckpointAdjoint
    push = lambda **settings: jax.jvp(lambda y0: end(y0, **settings), (1.0,), (1.0,))
    with stand_in("adjoint"):
        assert diffrax.RecursiveCheckpointAdjoint is ours
        # Theirs has no forward mode.
        assert jnp.allclose(push()[1], 0.75**4)
        with pytest.raises(Exception, match="forward"):
            push(adjoint=theirs[1]())
    assert (diffrax.diffeqsolve, diffrax.RecursiveCheckpointAdjoint) == theirs


def test_what_is_theirs_stays_in_place() -> None:
    scan = lax.scan
    with stand_in("theirs"):
        assert lax.scan is scan
    with stand_in("plain"):
        assert lax.scan is not scan
