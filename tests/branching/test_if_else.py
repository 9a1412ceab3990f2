"""`IfElse`: Python's `if`, `elif`, `else`; and its check when the program runs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqloop as el

BRANCHES = [lambda x: -x, lambda x: 2 * x, lambda x: jnp.sin(x)]
CHECKED = el.IfElse(BRANCHES)
UNCHECKED = el.IfElse(BRANCHES, check_conditions=False)
CONDITIONS = [[bool(n & 4), bool(n & 2), bool(n & 1)] for n in range(8)]
X = jnp.float32(0.5)


def python(conditions):
    if conditions[0]:
        return BRANCHES[0](X)
    elif conditions[1]:
        return BRANCHES[1](X)
    else:
        return BRANCHES[2](X)


def test_without_the_check_it_is_that_of_python():
    run = jax.jit(jax.vmap(lambda holds: UNCHECKED(holds, X)))
    out = run(jnp.array(CONDITIONS))
    np.testing.assert_allclose(out, [python(c) for c in CONDITIONS], rtol=1e-6)


@pytest.mark.parametrize("as_list", [False, True])
def test_the_check_when_compiled(as_list):
    @eqx.filter_jit
    def run(holds):
        return CHECKED(list(holds) if as_list else holds, X)

    for conditions in CONDITIONS:
        holds = jnp.array(conditions)
        if sum(conditions) == 1:
            np.testing.assert_allclose(run(holds), python(conditions), rtol=1e-6)
        else:
            what = "several do" if sum(conditions) else "none does"
            with pytest.raises(RuntimeError, match=f"must hold, but {what}"):
                jax.block_until_ready(run(holds))


def test_the_check_when_not_compiled():
    assert CHECKED([False, True, False], X) == 1
    with pytest.raises(RuntimeError, match="must hold, but none does"):
        CHECKED([X > 1, False, np.bool_(False)], X)


def test_the_check_under_vmap():
    run = eqx.filter_jit(jax.vmap(lambda holds: CHECKED(holds, X)))
    right = jnp.eye(3, dtype=bool)
    np.testing.assert_allclose(run(right), [python(c) for c in right], rtol=1e-6)
    with pytest.raises(RuntimeError, match="must hold, but several do"):
        jax.block_until_ready(run(right.at[1, 2].set(True)))


def test_gradients():
    weights = [eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(2)]

    @jax.jit
    @jax.grad
    def gradient(branches, x):
        positive = x[0] > 0
        return jnp.sum(el.IfElse(branches)([positive, ~positive], x))

    grads = gradient(weights, jnp.array([1.0, 2.0]))
    np.testing.assert_allclose(grads[0].weight, [[1, 2], [1, 2]])
    np.testing.assert_array_equal(grads[1].weight, 0)
