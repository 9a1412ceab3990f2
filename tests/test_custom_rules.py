"""Custom rules: a derivative of any order is that of the steps written out.

A rule gives the primal as well, and where it is differentiated again it is what the
rule has computed. JAX 0.10 loses that in `lax.scan`, so the judge is a Python loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

from .marks import slow
from .schedules import BLOCKS, CHUNKS, LAST, NESTED, SLOTS

pytestmark = pytest.mark.sampled

XS = jnp.linspace(0.5, 1.5, 5)


@jax.custom_jvp
def leaves(x: Any) -> Any:
    """A straight-through estimator whose rule leaves itself."""
    return jnp.round(x)


leaves.defjvp(lambda p, t: (jnp.round(p[0]), t[0]))


@jax.custom_jvp
def keeps(x: Any) -> Any:
    """One whose rule calls itself."""
    return jnp.round(x)


keeps.defjvp(lambda p, t: (keeps(p[0]), t[0]))


@jax.custom_jvp
def another(x: Any) -> Any:
    """A rule with another value than the function."""
    return jnp.sin(x)


another.defjvp(lambda p, t: (jnp.tanh(p[0]), t[0] * jnp.cos(p[0])))


@jax.custom_vjp
def backward(x: Any) -> Any:
    """A rule that has no forward mode, and keeps a residual that is not its input."""
    return jnp.sin(x)


backward.defvjp(
    lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, ct: (ct * cos + 0.1 * ct,)
)


@jax.custom_vjp
def clips(x: Any) -> Any:
    """A rule that is not linear in the cotangent that it is given."""
    return jnp.sin(x)


clips.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.tanh(ct) * jnp.cos(x),))


@jax.custom_vjp
def inside(x: Any) -> Any:
    """A rule whose forward pass has another rule in it."""
    return leaves(x) + x


inside.defvjp(
    lambda x: (leaves(x) + jnp.sin(x), x), lambda x, ct: (ct * keeps(x) + ct,)
)

FORWARD = (leaves, keeps, another)
REVERSE = (*FORWARD, backward, clips, inside)

SCHEDULES = {
    "Recursive": NESTED,
    "Chunked": CHUNKS,
    "Binomial": SLOTS,
    "blocks": BLOCKS,
    "StoreLast": LAST,
    "Offload": el.Offload(SLOTS),
}
SECOND: dict[str, Callable[[Any], Any]] = {
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
}
SECOND_OF_FORWARD: dict[str, Callable[[Any], Any]] = {
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "linearize": lambda f: lambda h: jax.linearize(f, h)[1](1.0),
}


THIRD: dict[str, Callable[[Any], Any]] = {
    "third, all in reverse": lambda f: jax.grad(jax.grad(jax.grad(f))),
    "third, forward in between": lambda f: jax.grad(jax.jacfwd(jax.grad(f))),
}


def step_of(rule: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda h, x: (jnp.sin(h * x) + 0.1 * rule(3 * h), rule(h) * x)


def written_out(step: Callable[[Any, Any], Any], h: Any) -> Any:
    ys = []
    for x in XS:
        h, y = step(h, x)
        ys.append(y)
    return h, jnp.stack(ys)


def loss(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def of(h: Any) -> Any:
        h, ys = run(h)
        return jnp.sin(h) + jnp.sum(ys**2)

    return of


def check_modes(
    rule: Any, run: Callable[[Any], Any], wanted: Callable[[Any], Any], modes: Any = ()
) -> None:
    modes = modes or {"value and gradient": jax.value_and_grad, **SECOND}
    if rule in FORWARD:
        modes = {**modes, **SECOND_OF_FORWARD}
    # All in one program each, since much of what is written out is the same.
    everything = lambda f: jax.jit(lambda h: {m: d(f)(h) for m, d in modes.items()})
    found, expected = (everything(f)(0.7) for f in (run, wanted))
    for mode in modes:
        np.testing.assert_allclose(
            found[mode], expected[mode], rtol=2e-3, atol=1e-4, err_msg=mode
        )


def check_scan(rule: Any, schedule: Any, modes: Any = ()) -> None:
    step = step_of(rule)
    scan = el.Scan(step, schedule=schedule)
    wanted = loss(lambda h: written_out(step, h))
    check_modes(rule, loss(lambda h: scan(h, XS)), wanted, modes)


@pytest.mark.parametrize(
    # The others are in the loops and maps below, and in the weekly test.
    "rule",
    [leaves, backward],
    ids=lambda rule: rule.__name__,
)
def test_scans(rule):
    check_scan(rule, SCHEDULES["Recursive"])


@pytest.mark.slow
@pytest.mark.parametrize("rule", REVERSE, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_scans_under_all_schedules(rule, schedule):
    check_scan(rule, schedule, {**SECOND, **THIRD})


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (leaves, "ChunkedVmap"),
        (clips, "ChunkedVmap"),
        (inside, "Map"),
        slow(another, "CheckpointedForLoop"),
        *[slow(rule, kind) for rule in REVERSE for kind in ("ChunkedVmap", "Map")],
    ],
)
def test_maps(rule, kind):
    row = lambda h: lambda x: rule(3 * h * x) * jnp.sin(h * x) ** 2
    maps = {
        "ChunkedVmap": lambda f: el.ChunkedVmap(f, 3),  # rows in two chunks
        "CheckpointedForLoop": el.CheckpointedForLoop,
        "Map": el.Map,
    }
    run = lambda h: jnp.sum(jnp.sin(maps[kind](row(h))(XS)))
    check_modes(rule, run, lambda h: jnp.sum(jnp.sin(jax.vmap(row(h))(XS))))


WHILES = {
    "Bounded": lambda cond, body: el.BoundedWhileLoop(cond, body, max_steps=9, base=2),
    "Checkpointed": lambda cond, body: el.CheckpointedWhileLoop(
        cond, body, checkpoints=3
    ),
}


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (leaves, "Bounded"),
        (inside, "Checkpointed"),
        *[slow(rule, kind) for rule in (*FORWARD, backward) for kind in WHILES],
    ],
)
def test_whiles(rule, kind):
    step = step_of(rule)
    body = lambda c: (c[0] + 1, step(c[1], XS[c[0]])[0])
    loop = WHILES[kind](lambda c: c[0] < len(XS), body)
    wanted = lambda h: jnp.sin(written_out(step, h)[0])
    check_modes(rule, lambda h: jnp.sin(loop((0, h))[1]), wanted)


@pytest.mark.parametrize("kind", WHILES)
def test_a_while_loop_twice_in_reverse_with_a_rule_that_is_not_linear(kind):
    loop = WHILES[kind](lambda c: c[0] < 3, lambda c: (c[0] + 1, clips(c[1])))
    f = lambda h: loop((0, h))[1]
    wanted = lambda h: clips(clips(clips(h)))
    derive = lambda f: jax.jit(jax.jacfwd(jax.grad(f)))(0.5)
    np.testing.assert_allclose(derive(f), derive(wanted), rtol=1e-5)
    with pytest.raises(ValueError, match=r"not linear in the cotangent .*el\.Scan"):
        jax.grad(jax.grad(f))(0.5)


@pytest.mark.parametrize(
    "rule", [slow(leaves), another], ids=lambda rule: rule.__name__
)
@pytest.mark.slow
def test_prefixes(rule):
    combine = lambda a, b: jnp.sin(a) + rule(2 * b) * 0.3 * b

    def chunked(h: Any) -> Any:
        # Not associative, so that only the order of one element a chunk is defined.
        return jnp.sum(el.AssociativeScan(combine, chunk_size=1)(XS * h) ** 2)

    def written(h: Any) -> Any:
        prefix = XS[0] * h
        total = prefix**2
        for x in XS[1:]:
            prefix = combine(prefix, x * h)
            total += prefix**2
        return total

    check_modes(rule, chunked, written)


@pytest.mark.parametrize(
    "rule", [leaves, slow(another)], ids=lambda rule: rule.__name__
)
def test_checked_functions(rule):
    f = lambda h: jnp.sin(h) * rule(3 * h)
    check_modes(rule, el.DebugNonFinite(f), f)


@pytest.mark.parametrize("rule", [slow(leaves), clips], ids=lambda rule: rule.__name__)
def test_slices_from_the_end(rule):
    step = step_of(rule)
    scan = el.SlicedScan(step, step=3, schedule=el.Recursive(2), reverse=True)

    def written(h: Any) -> Any:
        ys = {}
        for i in reversed(range(len(XS))):
            h, ys[i] = step(h, XS[i])
        return h, jnp.stack([ys[i] for i in range(0, len(XS), 3)])

    check_modes(rule, loss(lambda h: scan(h, XS)), loss(written))


def test_a_batch_of_hessians_of_loops_in_loops():
    inner = lambda h: el.Scan(
        lambda h, x: (jnp.sin(h * x) + 0.1 * leaves(3 * h), None),
        schedule=el.Binomial(2),
    )(h, XS[:3])[0]

    def outer(h: Any) -> Any:
        return el.Scan(lambda h, x: (inner(h) * x, None), schedule=el.Recursive(2))(
            h, XS[:3]
        )[0]

    def written(h: Any) -> Any:
        for x in XS[:3]:
            for y in XS[:3]:
                h = jnp.sin(h * y) + 0.1 * leaves(3 * h)
            h = h * x
        return h

    hs = jnp.array([0.3, 0.7])
    got, want = (jax.jit(jax.vmap(jax.hessian(f)))(hs) for f in (outer, written))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@jax.custom_vjp
def calls_itself(x: Any) -> Any:
    return jnp.sin(x)


# What the rule returns of itself is needed by nobody once it is differentiated.
calls_itself.defvjp(lambda x: (calls_itself(x), x), lambda x, ct: (ct * jnp.cos(x),))


@pytest.mark.parametrize("schedule", [el.Recursive(2), el.Binomial(2)], ids=str)
def test_forward_over_reverse_of_a_rule_that_calls_itself(schedule):
    def final(loop: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            calls_itself(x * h)
            return jnp.sin(h * x), None

        return lambda h: loop(step)(h, jnp.linspace(0.5, 1.0, 5))[0]

    ours = lambda step: el.Scan(step, schedule=schedule)
    theirs = lambda step: lambda h, xs: jax.lax.scan(step, h, xs)
    found, expected = (jax.jit(jax.hessian(final(f)))(0.4) for f in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("mode", SECOND.values(), ids=SECOND)
def test_a_loop_of_no_steps_has_none_of_its_rules(mode, schedule):
    scan = el.Scan(lambda h, x: (calls_itself(h * x), h), schedule=schedule)

    def loss(h: Any) -> Any:
        carry, ys = scan(h, jnp.zeros(0))
        return carry**3 + ys.sum()

    np.testing.assert_allclose(jax.jit(mode(loss))(0.5), 3.0)


@jax.custom_jvp
def refuses(x: Any) -> Any:
    """It cannot be differentiated, as the times of Diffrax's Brownian paths."""
    return x


@refuses.defjvp
def _refuses(primals: Any, tangents: Any) -> Any:
    raise RuntimeError("this has a tangent")


BUDGET = el.Budget("64KiB", measure=False)


@pytest.mark.parametrize("rounding", [jax.lax.stop_gradient, jnp.floor])
@pytest.mark.parametrize("schedule", [el.Recursive(2), slow(BUDGET)], ids=str)
def test_a_rule_is_asked_for_what_has_a_tangent_alone(schedule, rounding):
    def step(carry: Any, _: Any) -> Any:
        t, x = carry
        return (refuses(t) + 0.1 + rounding(x * x), x * jnp.cos(refuses(t))), None

    expected = lambda x: jax.lax.scan(step, (0.0, x), length=6)[0][1]
    scan = el.CheckpointedScan(step, schedule=schedule)
    ours = lambda x: scan((0.0, x), length=6)[0][1]
    for mode in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(mode(ours)(0.7), mode(expected)(0.7), rtol=1e-6)
    assert [found.plan.length for found in el.plans(jax.grad(ours))(0.7)] == [6]


def test_a_rule_of_a_while_loop_is_asked_for_what_has_a_tangent_alone():
    def body(carry: Any) -> Any:
        t, x = carry
        return refuses(t) + 0.1 + jax.lax.stop_gradient(x), x * jnp.cos(refuses(t))

    def end(run: Any) -> Callable[[Any], Any]:
        return lambda x: run(lambda carry: carry[0] < 3, body, (0.0, x))[1]

    ours = end(lambda *f: el.CheckpointedWhileLoop(*f[:2], checkpoints=3)(f[2]))
    pushed = jax.jacfwd(end(jax.lax.while_loop))(0.7)
    np.testing.assert_allclose(jax.grad(ours)(0.7), pushed, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(ours)(0.7), pushed, rtol=1e-6)
    assert len(el.plans(jax.grad(ours))(0.7)) == 1
