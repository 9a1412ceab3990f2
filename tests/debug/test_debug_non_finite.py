"""What `DebugNonFinite` leaves as it is, and how its error comes out."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import eqloop as el

from ..asserts import assert_close
from ..mapping.devices import mesh_of
from ..marks import slow

near = functools.partial(assert_close, rtol=1e-5, atol=0)


def step(carry: Any, x: Any) -> tuple[Any, Any]:
    h, count = carry
    h = jnp.tanh(h * x["w"] + 1)
    return (h, count + 1), {"y": h[0], "even": count % 2 == 0}


def model(scale: Any, xs: Any) -> tuple[Any, Any]:
    carry, ys = el.CheckpointedScan(step, 2)((scale * jnp.ones(3), 0), xs)
    kept = jnp.where(ys["even"], ys["y"], -jnp.inf)  # infinities that are meant
    total = lax.cond(scale > 0, jnp.sum, jnp.prod, jnp.where(ys["even"], kept, 0.0))
    rows = el.ChunkedVmap(jnp.sin, 2)(ys["y"])
    return total + rows.sum(), {"last": carry, "name": "static"}


XS = {"w": jnp.linspace(0.1, 2.0, 5)}
SCALE = jnp.float32(1.5)


@pytest.fixture
def quiet() -> Iterator[None]:
    """What `jax.jit` logs of callbacks that raise is not of interest."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def loss(scale: Any, xs: Any) -> Any:
    return el.DebugNonFinite(model)(scale, xs)[0]


def plain_loss(scale: Any, xs: Any) -> Any:
    return model(scale, xs)[0]


def small(x: Any) -> Any:
    step = lambda h, i: (jnp.tanh(h * x + i), None)
    return el.CheckpointedScan(step, 2)(x, jnp.arange(3.0))[0]


@pytest.mark.parametrize("either_width", [False, slow(True)], indirect=True)
@pytest.mark.usefixtures("either_width")
def test_values_and_derivatives_are_the_same() -> None:
    run = lambda loss: jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(SCALE, XS)
    near(run(loss), run(plain_loss))


@pytest.mark.slow
def test_modes_of_differentiation_are_the_same() -> None:
    def everything(f: Any) -> Any:
        def run(x: Any, xs: Any) -> Any:
            return (
                jax.jvp(f, (x,), (x,)),
                jax.vmap(jax.grad(f))(xs),
                jax.grad(lambda xs: jax.vmap(f)(xs).sum())(xs),
                jax.jacfwd(jax.grad(f))(x),
                lax.scan(lambda c, x: (c, f(x)), None, xs)[1],
            )

        return jax.jit(run)(SCALE, jnp.array([0.3, 0.5]))

    near(everything(el.DebugNonFinite(small)), everything(small))


def test_structure_and_static_leaves_are_the_same() -> None:
    out = el.DebugNonFinite(model)(SCALE, XS)
    expected = model(SCALE, XS)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    assert out[1]["name"] == "static"
    assert out[1]["last"][1].dtype == expected[1]["last"][1].dtype


def test_off_is_the_same_program() -> None:
    off = el.DebugNonFinite(model, when=False)
    assert str(jax.make_jaxpr(lambda s: off(s, XS)[0])(SCALE)) == str(
        jax.make_jaxpr(lambda s: model(s, XS)[0])(SCALE)
    )


def test_when_may_be_traced(quiet: None) -> None:
    @el.Jit
    def f(x: Any, when: Any) -> Any:
        return el.DebugNonFinite(jnp.log, when=when)(x)

    assert f(jnp.zeros(()), jnp.array(False)) == -jnp.inf
    with pytest.raises(el.NonFiniteError, match="`log` gave -inf"):
        f(jnp.zeros(()), jnp.array(True))
    grad = jax.grad(lambda x, when: el.DebugNonFinite(jnp.sqrt, when=when)(x))
    assert grad(jnp.zeros(()), jnp.array(False)) == jnp.inf
    with pytest.raises(el.NonFiniteError, match="as it is differentiated"):
        grad(jnp.zeros(()), jnp.array(True))
    flags = jnp.array([False, True])
    f = lambda x, when: el.DebugNonFinite(jnp.log, when=when)(x)
    near(jax.vmap(f)(jnp.ones(2), flags), jnp.zeros(2))
    with pytest.raises(el.NonFiniteError):
        jax.vmap(f)(jnp.zeros(2), flags)


def test_programs_raise_and_can_be_run_again(quiet: None) -> None:
    f = el.DebugNonFinite(lambda x: jnp.log(x) * 2)
    for wrap, error in (
        (el.Jit, el.NonFiniteError),
        (jax.jit, jax.errors.JaxRuntimeError),
        (eqx.filter_jit, jax.errors.JaxRuntimeError),
        (lambda f: f, el.NonFiniteError),
    ):
        run = wrap(f)
        for _ in range(2):
            with pytest.raises(error, match="`log` gave -inf"):
                jax.block_until_ready(run(jnp.zeros(())))
            assert run(jnp.ones(())) == 0.0


def test_lowered_and_compiled_program_raises_the_error_itself() -> None:
    f = el.Jit(el.DebugNonFinite(lambda x: jnp.log(x) * 2))
    compiled = f.lower(jnp.zeros(())).compile()
    with pytest.raises(el.NonFiniteError, match="`log` gave -inf"):
        compiled(jnp.zeros(()))


def test_error_of_another_program_is_left_alone(quiet: None) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.jit(el.DebugNonFinite(jnp.log))(jnp.zeros(())).block_until_ready()

    @el.Jit
    def other(x: Any) -> Any:
        return el.error_if(x, x > 0, "mine")

    with pytest.raises(RuntimeError, match="mine"):
        other(jnp.ones(()))


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for f in (el.DebugNonFinite(jnp.log), el.Jit(el.DebugNonFinite(jnp.log))):
        with pytest.raises(el.NonFiniteError):
            f(jnp.zeros(()))
    assert capfd.readouterr().err == ""


def test_error_is_an_error_of_the_runtime() -> None:
    assert issubclass(el.NonFiniteError, jax.errors.JaxRuntimeError)


def test_infinities_that_are_given_are_no_error() -> None:
    def attention(scores: Any, mask: Any) -> Any:
        weights = jax.nn.softmax(scores + mask)
        return weights, jax.nn.softmax(jnp.where(mask == 0, scores, -jnp.inf))

    mask = jnp.array([0.0, -jnp.inf, 0.0])
    one, other = el.DebugNonFinite(attention)(jnp.arange(3.0), mask)
    near(one, other)
    best = el.DebugNonFinite(lambda best, x: (jnp.minimum(best, x), best))
    assert best(jnp.inf * jnp.ones(()), jnp.ones(()))[1] == jnp.inf


def test_argument_with_nan_is_named_if_it_reaches_a_result() -> None:
    data = jnp.array([1.0, jnp.nan])
    fill = el.DebugNonFinite(lambda x: jnp.where(jnp.isnan(x), 0.0, x) * 2)
    near(fill(data), jnp.array([2.0, 0.0]))

    class Scale(eqx.Module):
        weight: Any

        def __call__(self, x: Any) -> Any:
            return x["a"] * self.weight

    with pytest.raises(el.NonFiniteError, match=r"x\['a'\] came in with NaN"):
        el.DebugNonFinite(Scale(jnp.ones(2)))({"a": data})
    with pytest.raises(el.NonFiniteError, match=r"f\.weight came in with NaN"):
        el.DebugNonFinite(Scale(data))({"a": jnp.ones(2)})
    f = lambda x: el.DebugNonFinite(lambda x: 2 * x)(x) * jnp.nan
    with pytest.raises(el.NonFiniteError, match="the cotangent of the result came"):
        jax.grad(f)(1.0)


def test_ranges_of_operands() -> None:
    def f(x: Any, n: Any) -> Any:
        return x.reshape(4) / n.astype(x.dtype)

    x, n = jnp.array([[1.0, 2], [-5, 4]]), jnp.arange(4, dtype=jnp.bfloat16)
    with pytest.raises(el.NonFiniteError) as error:
        el.DebugNonFinite(f)(x, n)
    text = str(error.value)
    assert "operand 0: float32[4] from -5 to 4" in text
    assert "operand 1: float32[4] from 0 to 3" in text


def test_every_kind_of_number() -> None:
    def f(x: Any, key: Any) -> Any:
        noise = jax.random.normal(key, (2,))
        z = lax.complex(x, noise)
        return jnp.abs(jnp.exp(z)), x.astype(jnp.bfloat16) / 3, key, x[:0].sum()

    key = jax.random.key(0)
    out = el.DebugNonFinite(f)(jnp.ones(2), key)
    near(out[0], f(jnp.ones(2), key)[0])
    with pytest.raises(el.NonFiniteError, match="`exp` gave"):
        el.DebugNonFinite(f)(jnp.full(2, 1e3), key)
    with jax.enable_x64(True):
        big = el.DebugNonFinite(lambda x: x * 1e200)
        assert big(jnp.asarray(1e100, jnp.float64)) == 1e300
        with pytest.raises(el.NonFiniteError, match="from 1e\\+200 to 1e\\+200"):
            big(jnp.asarray(1e200, jnp.float64))


def test_nested_ones_report_once() -> None:
    inner = el.DebugNonFinite(lambda c, i: (c, jnp.log(jnp.abs(i - 2.0))))
    outer = el.DebugNonFinite(lambda x: el.Scan(inner)(x, jnp.arange(4.0)))
    with pytest.raises(el.NonFiniteError, match="iteration 2 of Scan"):
        outer(1.0)
    with pytest.raises(el.NonFiniteError, match="`log` gave -inf"):
        el.Jit(lambda x: el.Scan(inner)(x, jnp.arange(4.0)))(1.0)


def test_first_of_several_is_named() -> None:
    def f(x: Any) -> Any:
        early = jnp.log(x)
        ys = lax.scan(lambda c, i: (c, c / (i - 1)), x, jnp.arange(3.0))[1]
        return early, ys, jnp.sqrt(x - 2)

    f = el.DebugNonFinite(f)
    for x, operation in ((0.0, "log"), (1.0, "div"), (-3.0, "log")):
        with pytest.raises(el.NonFiniteError, match=f"`{operation}`"):
            f(jnp.float32(x))


def test_a_loop_that_a_nan_or_infinity_would_not_let_end_is_left() -> None:
    count = lambda x: lax.while_loop(lambda x: x != 3, lambda x: x + 1, jnp.log(x))
    with pytest.raises(el.NonFiniteError, match="`log` gave -inf"):
        el.DebugNonFinite(count)(0.0)


def test_each_of_several_results_is_checked() -> None:
    with pytest.raises(
        el.NonFiniteError, match=r"result: float32\[2,2\], the first NaN"
    ):
        el.DebugNonFinite(jnp.linalg.qr)(jnp.full((2, 2), 3e38))


def test_the_sweep_of_a_compiled_gradient(quiet: None) -> None:
    @jax.custom_vjp
    def halved(x: Any) -> Any:
        return x / 2

    halved.defvjp(lambda x: (x / 2, x), lambda x, ct: (ct / x,))

    def last(x: Any) -> Any:
        return el.CheckpointedScan(lambda h, _: (jnp.log(h), None))(x, length=9)[0]

    # The result is not needed: what is checked is the forward pass of the gradient.
    for f, x, sweep in (
        (lambda x: jnp.sin(jnp.log(x)), 0.0, "forward, as it is differentiated"),
        (last, 0.5, "forward, as it is differentiated"),
        (halved, 0.0, "backward"),
    ):
        with pytest.raises(el.NonFiniteError, match=f"sweep: {sweep}"):
            el.Jit(el.Grad(el.DebugNonFinite(f)))(jnp.float32(x))


def test_closed_over_tracers_are_differentiated(quiet: None) -> None:
    def f(x: Any) -> Any:
        return el.DebugNonFinite(lambda y: jnp.sqrt(x) * y)(2.0 * x)

    expected = jax.grad(lambda x: jnp.sqrt(x) * 2 * x)(4.0)
    near(jax.jit(jax.grad(f))(4.0), expected)
    with pytest.raises(el.NonFiniteError, match="as it is differentiated"):
        el.Jit(jax.grad(f))(0.0)


@pytest.mark.parametrize("check", [True, slow(False)])
def test_inside_shard_map(check: bool) -> None:
    mesh, spec = mesh_of(i=2), PartitionSpec("i")

    def body(c: Any, x: Any) -> tuple[Any, Any]:
        return c, lax.psum(jnp.log(x + c), "i")

    def f(x: Any) -> Any:
        run = lambda x: el.CheckpointedScan(body, 2)(jnp.float32(0.0), x)[1]
        while_ = lambda x: lax.while_loop(lambda y: jnp.all(y < 1), lambda y: 2 * y, x)
        both = lambda x: (run(x), lax.psum(while_(x).sum(), "i"))
        return el.DebugNonFinite(both)(x)

    out_specs = (spec, PartitionSpec())
    mapped = el.Jit(
        jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=check)
    )
    near(mapped(jnp.ones(6)), (jnp.zeros(6), jnp.float32(6)))
    with pytest.raises(el.NonFiniteError, match="iteration 1 of CheckpointedScan"):
        mapped(jnp.array([1.0, 1.0, 1.0, 1.0, 0.0, 1.0]))


def test_outside_shard_map() -> None:
    f = el.DebugNonFinite(jax.grad(lambda x: el.ParallelMap(jnp.sqrt)(x).sum()))
    near(f(jnp.ones(8)), jnp.full(8, 0.5))
    with pytest.raises(el.NonFiniteError, match="`div` gave inf"):
        f(jnp.arange(8.0))


@pytest.mark.parametrize("wrap", [lambda f: f, el.Jit])
def test_effects_are_kept(wrap: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def step(i: Any, x: Any) -> Any:
        jax.debug.print("{}", x, ordered=True)
        return x * 2

    f = wrap(el.DebugNonFinite(lambda x: lax.fori_loop(0, 2, step, x)))
    assert f(3.0) == 12.0
    jax.effects_barrier()
    assert capfd.readouterr().out == "3.0\n6.0\n"


def test_references_are_kept(quiet: None) -> None:
    def f(x: Any) -> Any:
        kept = jax.new_ref(x)

        def step(total: Any, v: Any) -> Any:
            kept[1] = jnp.log(kept[1]) + v
            return total + kept[1], None

        total, _ = lax.scan(step, 0.0, x)
        kept[0] += total
        return kept[...]

    x = jnp.array([3.0, 4.0])
    near(el.DebugNonFinite(f)(x), f(x))
    with pytest.raises(el.NonFiniteError, match="`log`") as caught:
        el.DebugNonFinite(f)(x - 3.5)
    assert "iteration 1 of lax.scan" in str(caught.value)


def test_progress_bars_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    scan = el.DebugNonFinite(el.CheckpointedScan(step, progress=True))
    jax.block_until_ready(scan((jnp.ones(3), 0), XS))
    jax.effects_barrier()
    assert "5/5" in capfd.readouterr().err


def test_passes_on_the_program_keep_it() -> None:
    f = el.Optimize(el.DebugNonFinite(lambda x: jnp.log(x * 1)))
    assert f(jnp.ones(())) == 0.0
    with pytest.raises(el.NonFiniteError, match="`log`"):
        el.Jit(f)(jnp.zeros(()))


def test_is_a_transform() -> None:
    class Model(eqx.Module):
        weight: Any

        @el.DebugNonFinite
        def __call__(self, x: Any) -> Any:
            return jnp.log(self.weight * x)

    assert Model(jnp.ones(()))(jnp.ones(())) == 0.0
    with pytest.raises(el.NonFiniteError):
        Model(jnp.zeros(()))(jnp.ones(()))


def test_error_if_and_breakpoint_if() -> None:
    @el.Jit
    def f(x: Any) -> Any:
        el.breakpoint_if(x < -1)
        return el.error_if({"x": x, "name": "x"}, x < 0, "negative")["x"]

    assert f(jnp.ones(())) == 1.0
    with pytest.raises(RuntimeError, match="negative"):
        f(-0.5 * jnp.ones(()))


@pytest.mark.parametrize("checkpoints", [slow(None), 2, slow(8)])
def test_the_iteration_of_a_while_loop_that_is_reversed(checkpoints):
    def f(x: Any) -> Any:
        body = lambda carry: (carry[0] + 1, jnp.log(2.5 - carry[0]) * carry[1])
        loop = el.CheckpointedWhileLoop(
            lambda carry: carry[0] < 6, body, checkpoints=checkpoints
        )
        return loop((jnp.zeros(()), x))[1]

    for evaluate in (f, jax.grad(f)):
        with pytest.raises(el.NonFiniteError, match="iteration 3 of"):
            el.DebugNonFinite(evaluate)(jnp.float32(1.0))


def test_the_entry_that_fails_says_which_row_it_is_of():
    logs, x = el.DebugNonFinite(lambda x: jnp.log(x[1:])), jnp.ones((4, 3))
    for call in (jax.vmap(logs), jax.jit(jax.vmap(logs)), jax.vmap(jax.grad(of(logs)))):
        with pytest.raises(
            Exception, match=r"float32\[4,2\], the first NaN at \[2, 1\]"
        ):
            jax.block_until_ready(call(x.at[3].set(0.0).at[2, 2].set(-1.0)))
    with pytest.raises(el.NonFiniteError, match=r"x came in with NaN at \[1, 0\]"):
        jax.vmap(logs)(x.at[2].set(jnp.nan).at[1, 0].set(jnp.nan)[:, ::-1][:, ::-1])


def of(f):
    return lambda x: jnp.sum(f(x))
