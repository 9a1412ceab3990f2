"""Programs are rewritten wherever they are programs, and nowhere else."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from eqloop._programs._jaxprs import map_equations

# As the linear solves of lineax are: a primitive that holds an operator as a jaxpr.
solve_p = jex.Primitive("solve")
solve_p.def_impl(lambda x, *, operator: x)
solve_p.def_abstract_eval(lambda x, *, operator: x)


def test_an_operator_that_closes_over_arrays_is_left_alone():
    matrix = jnp.arange(4.0)
    operator = jax.make_jaxpr(lambda x: matrix * x)(matrix).jaxpr
    solve = lambda x: solve_p.bind(jnp.sin(x), operator=operator)
    program = jax.make_jaxpr(jax.jit(solve))(matrix)
    assert map_equations(program, lambda eqn: eqn) is program
