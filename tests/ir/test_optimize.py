"""`optimize`, its report, `Optimize`, and what jaxprs are made of and taken apart."""

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import eqloop as el
from eqloop import ir
from eqloop.ir._atoms import count_equations

X = jnp.linspace(-1.0, 1.0, 3)


def f(x):
    return jnp.sin(x * 1.0) + jnp.sin(x)


def test_the_report_tells_each_run_of_a_pass():
    reports = []
    ir.optimize(jax.make_jaxpr(f)(X), report=reports.append)
    (report,) = reports
    assert (report.before, report.after) == (4, 2)
    assert report.runs == (
        ("simplify_algebra", 4, 3),
        ("eliminate_common_subexpressions", 3, 2),
    )
    table = str(report).splitlines()
    assert table[0].split() == ["equations", "before", "after"]
    assert table[-1].split() == ["together", "4", "2"]
    assert len({len(line) for line in table}) == 1


def test_nothing_to_do_is_told_by_identity():
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    assert ir.optimize(jaxpr) is jaxpr
    assert all(passed(jaxpr) is jaxpr for passed in ir.PASSES)


def test_passes_are_chosen():
    jaxpr = jax.make_jaxpr(f)(X)
    only = ir.optimize(jaxpr, passes=[ir.eliminate_common_subexpressions])
    assert len(only.eqns) == 4
    assert ir.optimize(jaxpr, passes=[]) is jaxpr


class Layer(eqx.Module):
    weight: jax.Array
    name: str

    @ir.Optimize(passes=[ir.simplify_algebra])
    def __call__(self, x, scale=None):
        y = self.weight * x * 1.0
        return (y if scale is None else y * scale), self.name


def test_optimize_is_a_transform():
    layer = Layer(X, "layer")
    y, name = layer(X)
    assert name == "layer"
    np.testing.assert_allclose(y, X * X)
    grads = eqx.filter_grad(lambda layer: layer(X, scale=2.0)[0].sum())(layer)
    np.testing.assert_allclose(grads.weight, 2 * X)
    whole = ir.Optimize(layer)
    assert jax.tree.leaves(whole) == jax.tree.leaves(layer)
    jaxpr = jax.make_jaxpr(lambda x: whole(x)[0])(X)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["mul"]


@pytest.mark.parametrize(
    "mode",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.vjp(f, X)[1](X),
        lambda f: jax.jacfwd(jax.jacrev(f))(X),
        lambda f: jax.vmap(f)(jnp.stack([X, X])),
        lambda f: jax.lax.scan(lambda c, _: (f(c), None), X, None, 2),
        lambda f: jax.grad(lambda c: f(c * X).sum())(2.0),
        lambda f: jax.jit(lambda c: ir.Optimize(lambda x: f(x * c))(X))(3.0),
    ],
    ids=["jvp", "vjp", "hessian", "vmap", "scan", "grad", "closed over"],
)
def test_modes(mode):
    run = jax.jit(mode, static_argnums=0)
    found, expected = run(ir.Optimize(f)), run(f)
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6)
    jax.tree.map(same, found, expected)


def test_under_strict_promotion():
    wide = lambda x: x.astype(jnp.float32).astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jaxpr = jax.make_jaxpr(wide)(X.astype(jnp.float16))
        assert len(ir.optimize(jaxpr).eqns) == 1


@pytest.mark.parametrize(
    "g",
    [
        lambda x: x * jnp.sqrt(jnp.float32(2)),
        lambda x: lax.cond(jnp.float32(2) > 1, jnp.sin, jnp.cos, x),
        lambda x: lax.select(jnp.arange(3) < 9, x, -x) * jnp.ones(3),
        lambda x: x * jnp.asarray([1.0, 1.0, 1.0]) * 1.0,
    ],
    ids=["fold", "branch", "select", "constant"],
)
def test_no_transfer_that_the_user_has_not_asked_for(g):
    expected = jax.jit(g)(X)
    with jax.transfer_guard("disallow"):
        found = jax.jit(ir.Optimize(g))(X)
    np.testing.assert_array_equal(found, expected)


SYMBOLIC = {
    "elementwise": lambda x: jnp.sin(x * 1.0) + jnp.zeros_like(x),
    "sizes": lambda x: (x.mean(), jnp.arange(x.shape[0]).sum() * 1),
    "shapes": lambda x: jnp.ones((3, x.shape[0])).T.T @ x[None].reshape(-1)[::-1],
    "slices": lambda x: jnp.concatenate(
        [x[:0], x[-1:], lax.dynamic_slice(x, (9,), (1,))]
    ),
    "updates": lambda x: x.at[0].set(3.0) * (lax.iota(x.dtype, 3) * 2).sum(),
    "scan": lambda x: lax.scan(lambda c, y: ((c[0] + y * 1.0, c[1]), y), (0.0, x), x)[
        1
    ],
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2, c[1] + c[2]), (0, x, x)
    )[1],
    "vmap": jax.vmap(lambda x: lax.while_loop(lambda c: c < 3, lambda c: c + 1, x)),
    "cond": lambda x: lax.cond(x.sum() > 0, jax.jit(jnp.sin), lambda x: x, x),
    "grad": jax.grad(lambda x: jnp.sin(x).sum()),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_sizes_that_are_not_known(name):
    f = SYMBOLIC[name]
    (n,) = export.symbolic_shape("n")
    passes = [*ir.PASSES, ir.inline_jit]

    def both(x):
        assert "[n" in str(ir.draw(f)(x))
        assert "[n" in ir.draw(f)(x).dot
        assert el.Trace(f).leaf_usage(x)
        return f(x), ir.Optimize(f, passes=passes)(x)

    x = jnp.linspace(0.1, 1.0, 5)
    exported = export.export(jax.jit(both))(jax.ShapeDtypeStruct((n,), x.dtype))
    expected, found = exported.call(x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_beyond_the_last_case_there_is_no_gradient():
    g = lambda x: lax.select_n(jnp.int32(5), x, 2 * x, 3 * x)
    for differentiate in (lambda f: f(2.0), lambda f: jax.grad(f)(2.0)):
        assert differentiate(ir.Optimize(g)) == differentiate(g)


def test_names_of_arguments_that_are_no_arrays():
    # JAX keeps a name for each argument, also where some are fixed.
    tail = lambda x: jax.scipy.special.log_ndtr(x) * 1.0
    choose = lambda x: lax.cond(x[0] > 0, lambda x: (tail(x), x), lambda x: (x, x), x)[
        0
    ]
    g = lambda x: choose(x) + jax.jit(tail)(x)
    jaxpr = jax.make_jaxpr(g)(X)
    new = ir.optimize(jaxpr)
    assert count_equations(new) < count_equations(jaxpr)
    assert ir.optimize(new) is new
    run = jax.jit(jax.value_and_grad(lambda f, x: f(x).sum(), 1), static_argnums=0)
    jax.tree.map(np.testing.assert_array_equal, run(ir.Optimize(g), X), run(g, X))


def test_inline_jit_with_a_condition():
    inner = jax.jit(lambda x: jnp.sin(x) * 2)

    @jax.jit
    def outer(x):
        return jax.lax.scan(lambda c, x: (c, inner(x)), x[0], x)[1] + inner(x)

    def calls(jaxpr):
        return str(jaxpr).count("jit[")

    jaxpr = jax.make_jaxpr(outer)(X)
    assert calls(jaxpr) == 3
    partly = ir.inline_jit(jaxpr, lambda eqn: eqn.params["name"] == "outer")
    assert calls(partly) == 2
    whole = ir.inline_jit(jaxpr)
    assert calls(whole) == 0
    for new in (partly, whole):
        jex.check_jaxpr(new.jaxpr)
        np.testing.assert_allclose(jex.jaxpr_as_fun(new)(X)[0], outer(X), rtol=1e-6)


def test_calls_that_donate_are_not_inlined():
    donating = jax.jit(jnp.sin, donate_argnums=0)
    jaxpr = jax.make_jaxpr(donating)(X)
    assert ir.inline_jit(jaxpr) is jaxpr


def test_jaxprs_of_equations():
    jaxpr = jax.make_jaxpr(lambda x, y: jnp.sin(jnp.exp(x) * y))(X, X)
    whole = ir.eqns_to_jaxpr(jaxpr.eqns)
    assert str(whole) == str(jaxpr)
    last = ir.eqns_to_closed_jaxpr(jaxpr.eqns[1:])
    np.testing.assert_allclose(jex.jaxpr_as_fun(last)(X, X)[0], jnp.sin(X * X))
    (product,) = jaxpr.eqns[1].outvars
    both = ir.eqns_to_jaxpr(jaxpr.eqns, outvars=[*jaxpr.jaxpr.outvars, product])
    assert len(both.outvars) == 2


def test_jaxprs_of_equations_with_constants():
    table = np.arange(3.0, dtype=np.float32)
    jaxpr = jax.make_jaxpr(lambda x: x * jnp.asarray(table))(X)
    constvars = jaxpr.jaxpr.constvars
    new = ir.eqns_to_closed_jaxpr(jaxpr.eqns, constvars=constvars, consts=jaxpr.consts)
    np.testing.assert_allclose(jex.jaxpr_as_fun(new)(X)[0], X * table)
    assert new.in_avals == jaxpr.in_avals
