"""Properties of JAX's primitives, by name: the primitives differ between versions."""


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# One operand, elementwise, of the same name in `jax.lax`.
UNARY = _named(
    """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj cos
    cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag is_finite lgamma log log1p
    log2 logistic neg not population_count real rsqrt sign sin sinh sqrt square tan
    tanh"""
)

# Two operands, elementwise, of the same name in `jax.lax`.
BINARY = _named(
    """add and atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt max min mul
    ne nextafter or polygamma pow rem shift_left shift_right_arithmetic
    shift_right_logical sub xor zeta"""
)

# Other functions of their names in `jax.lax`, whose settings are parameters.
OF_LAX = _named(
    """bitcast_convert_type broadcast_in_dim clamp conv_general_dilated
    convert_element_type cumlogsumexp cummax cummin cumprod cumsum dot_general gather
    integer_pow lu_pivots_to_permutation pad ragged_dot_general reduce_and reduce_max
    reduce_min reduce_or reduce_precision reduce_prod reduce_sum reduce_xor reshape rev
    round scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    scatter_add scatter_max scatter_min scatter_mul scatter_sub slice split squeeze
    stop_gradient transpose"""
)

# Those for which `f(x, y)` and `f(y, x)` are the same, to the last bit. `max` and `min`
# are not among them: which of two zeros, or of two NaNs, they give is not specified.
COMMUTATIVE = _named("add and eq mul ne or xor")

# Without effects, and quickly computed from small operands.
_MOVES = _named(
    "argmax argmin concatenate dynamic_slice dynamic_update_slice iota select_n sort"
)
FOLDABLE = UNARY | BINARY | OF_LAX | _MOVES

# Cheaper to compute than to hold in memory.
GENERATORS = _named("broadcast_in_dim iota")

# Equal equations that must not be merged: that would undo what they are for.
DISTINCT = _named("create_token optimization_barrier remat2 rng_uniform")

# JAX's own primitives that expand themselves and are functions of `jax.numpy` (JAX
# 0.12): the function can be transposed, while the expansion cannot.
FORMULAS = {"Ldexp": "ldexp"}
