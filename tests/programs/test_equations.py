"""Programs are rewritten wherever they are programs, and nowhere else."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from eqloop._compat import HiPrimitive
from eqloop._programs import formula_of, input_names, map_programs, reached, with_parts
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


class OfOthers(HiPrimitive):
    """A primitive of another library that has names of methods in common with ours."""

    def __init__(self, x):
        self.in_avals, self.out_aval, self.params = (x, x), x, {}
        super().__init__()

    def expand(self, x, y):
        return x + y

    def rewritten(self, rewrite):
        raise AssertionError("not ours to call")

    nonzeros_out = reached_out = jaxprs = rewritten


def test_a_primitive_of_others_is_not_taken_for_ours():
    x = jax.typeof(jnp.ones(3))
    program = jax.make_jaxpr(OfOthers(x))(x, x)
    (eqn,) = program.eqns
    assert formula_of(eqn) is None
    assert map_programs(eqn, lambda program: program) is eqn
    assert reached(program, (True, False)) == (True,)
    assert reached(program, (False, True), is_derivative=True) == (True,)


def test_names_are_forgotten_with_the_inputs_that_they_are_for():
    x = jnp.ones(3)
    program = jax.make_jaxpr(lambda first, second: first * second)(x, x)
    assert input_names(program) == ["first", "second"]
    one, two = program.jaxpr.invars
    with jax.enable_checks(True):
        closed = with_parts(program, invars=[two], constants={one: x})
    assert input_names(closed) == [""]
    assert (jex.jaxpr_as_fun(closed)(2 * x)[0] == 2).all()
