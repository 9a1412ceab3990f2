"""The differences between versions of JAX, with the version beside each line.

Nothing else in the library asks which JAX is installed. `tests/canaries/` tries what is
said here of XLA, with each jaxlib.
"""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.custom_derivatives
import jax.extend.core as jex
import jax.numpy as jnp
import jax.stages
import jaxlib.version
import numpy as np
from jax import api_util, lax
from jax.experimental import hijax

from ._device import planning_device
from ._types import AnyJaxpr, PyTree, Value

# XLA comes with jaxlib, which may be older than JAX. Nightly builds have more numbers.
_JAXLIB = tuple(map(int, re.findall(r"\d+", jaxlib.version.__version__)[:3]))

# Versions of jaxlib that there is no way around, and why. `pyproject.toml` leaves them
# out as well, but is not asked about what was installed before or after.
_REFUSED: dict[tuple[int, ...], str] = {
    (0, 11, 1): "On the CPU, its loops rewrite a whole array to write a small row of "
    "it, so that they take time quadratic in their length "
    "(https://github.com/jax-ml/jax/issues/40101)."
}


def refuse_broken_version(version: tuple[int, ...] = _JAXLIB) -> None:
    """Refuses a jaxlib that is known to be broken: that of JAX 0.11.1."""
    if (why := _REFUSED.get(version)) is not None:
        number = ".".join(map(str, version))
        raise ImportError(
            f"eqloop cannot be used with jaxlib {number}. {why} Install another one: "
            f"`pip install --upgrade jax 'jaxlib!={number}'`."
        )


refuse_broken_version()

# Pallas's backend Mosaic GPU takes slices of arrays in memory from 0.12 on, and that
# for Triton warns since 0.11 that it will be removed.
HAS_MOSAIC_GPU = _JAXLIB >= (0, 12)


def jax_version() -> str:
    """The version itself ("0.12.0" for JAX 0.12.0), to be written down with results."""
    return jax.__version__


def jaxlib_version() -> str:
    """The version of what compiles: perhaps 0.12.1, beside JAX 0.12.0."""
    return jaxlib.version.__version__


def _without_literals(expand: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Stages a literal: JAX 0.10 cannot lower it as the output of a primitive."""
    # An example is the cotangent 1.0 that a loop hands through from its end to its
    # start.

    def stage(x: Value) -> Value:
        return x if isinstance(x, jax.Array) else lax.optimization_barrier(x)

    @functools.wraps(expand)
    def staged(self: Any, *args: PyTree) -> Value:
        return jax.tree.map(stage, expand(self, *args))

    return staged


# JAX 0.12 has `HiPrim`, JAX 0.10 `VJPHiPrimitive`; of what eqloop overrides, both have
# the same methods. A version that has neither is to fail here, and not later.
_HAS_HIPRIM = hasattr(hijax, "HiPrim")
_VJPHiPrimitive: Any = object if _HAS_HIPRIM else hijax.VJPHiPrimitive


class _HiPrimitive(_VJPHiPrimitive):
    """As JAX 0.10 calls it, for an `expand` that returns literals as they came."""

    # And for one that has effects: JAX 0.10 leaves it out where no output is used.

    def dce(self, used_outs: PyTree) -> tuple[PyTree, PyTree, Any]:
        # A collective alone is dead code.
        if any(type(e).__name__ != "NamedAxisEffect" for e in self.effects):
            return True, True, self
        return super().dce(used_outs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "expand" in vars(cls):
            cls.expand = _without_literals(cls.expand)


# JAX 0.10 needs the class above; JAX 0.12 can lower literals.
HiPrimitive: type = getattr(hijax, "HiPrim", _HiPrimitive)


def call_primitive() -> jex.Primitive:
    """The one primitive that all `hijax` primitives are (JAX 0.10 to 0.12)."""
    # JAX exports it under no name.

    class Same(HiPrimitive):
        def __init__(self) -> None:
            self.in_avals = (jax.typeof(np.float32(0)),)
            self.out_aval, self.params = self.in_avals[0], {}
            super().__init__()

    (eqn,) = jax.make_jaxpr(Same())(np.float32(0)).eqns
    return eqn.primitive


# JAX 0.10 makes a tangent for each output of a `hijax` primitive that is linearized,
# whatever the primitive says, and then asks for the derivatives of all that is computed
# from it. JAX 0.12 takes the word of the primitive.
_ALL_MOVE = not _HAS_HIPRIM


def linearization(
    outputs: PyTree, residuals: PyTree, nonzeros_out: PyTree
) -> tuple[PyTree, ...]:
    """What `lin` and `vjp_fwd` of a `hijax` primitive return."""
    # JAX 0.12 is told which outputs move, JAX 0.10 takes it that all of them do.
    result = outputs, residuals
    return result if _ALL_MOVE else (*result, nonzeros_out)


def is_accumulator(x: object) -> bool:
    """Whether JAX passes something to add a cotangent to, in place of an input."""
    # JAX 0.11 exports the class, JAX 0.10 does not.
    kind = getattr(hijax, "GradAccum", None)
    return hasattr(x, "accum") if kind is None else isinstance(x, kind)


def linear_outputs(tangents: PyTree) -> PyTree:
    """What `linearized` returns, from tangents with symbolic zeros among them."""
    # JAX 0.10 takes arrays alone.
    if not _ALL_MOVE:
        return tangents
    is_zero = lambda x: isinstance(x, hijax.Zero)
    return jax.tree.map(hijax.instantiate_zeros, tangents, is_leaf=is_zero)


def with_symbolic_zeros(
    moved_by: Callable[[], Sequence[Sequence[int]]],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
) -> list[Value]:
    """The outputs of a primitive, so that those without a tangent are known to be."""
    # JAX 0.12 knows it from `linearization`, JAX 0.10 from a custom derivative.
    # `moved_by` has, for each output, the numbers of the inputs that move it.
    if not _ALL_MOVE:
        return list(outputs)
    # Each by itself: where JAX 0.10 leaves out unused outputs of a custom derivative
    # with symbolic zeros, the others get wrong tangents. And each with those inputs
    # alone that move it, as partial evaluation takes an output for unknown if one of
    # them is.
    return [
        _through(tuple(inputs[i] for i in moving), out)
        for moving, out in zip(moved_by(), outputs, strict=True)
    ]


# Where JAX 0.10 leaves out unused outputs of a custom derivative with symbolic zeros,
# the others get wrong tangents.
LOSES_SYMBOLIC_ZEROS = _ALL_MOVE


def rule_tangent(tangent: Value) -> Value:
    """A tangent as a rule returns it, an array on JAX 0.10: `LOSES_SYMBOLIC_ZEROS`."""
    if not isinstance(tangent, hijax.Zero):
        return tangent
    if LOSES_SYMBOLIC_ZEROS:
        return hijax.instantiate_zeros(tangent)
    return jax.custom_derivatives.SymbolicZero(tangent.aval)


def is_through(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is that of `with_symbolic_zeros`, and so no user's rule."""
    # JAX 0.10 alone has any.
    if eqn.primitive.name != "custom_jvp_call":
        return False
    info = eqn.params["call_jaxpr"].jaxpr.debug_info
    return info.func_src_info.startswith("_through ") and __file__ in info.func_src_info


@jax.custom_jvp
def _through(inputs: tuple[Value, ...], output: Value) -> Value:
    del inputs
    return output


@functools.partial(_through.defjvp, symbolic_zeros=True)
def _through_jvp(primals: PyTree, tangents: PyTree) -> PyTree:
    (_, output), (dots_in, dot) = primals, tangents
    is_zero = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
    if not all(map(is_zero, dots_in)):
        return output, dot
    aval = jax.typeof(output).to_tangent_aval()
    return output, jax.custom_derivatives.SymbolicZero(aval)


# JAX 0.10 to 0.12 hands numbers to custom rules as subclasses of the types of Python,
# which remember a dtype; `stop_gradient(1.0)` is one as well. They have no public name.
_MARKED = {kind: lax.stop_gradient(kind()) for kind in (int, float, complex)}

# Each of these types, and that of Python which it stands for (JAX 0.10 to 0.12).
MARKED_NUMBERS: dict[type, type] = {
    type(number): kind for kind, number in _MARKED.items() if isinstance(number, kind)
}


# What JAX has named a function, it keeps here (JAX 0.10 to 0.12), and looks here before
# it makes up a name. Should it cease to, errors name functions that are made here.
_NAME = "__fun_debug_info__"


def name_as(
    run: Callable[..., Any], kind: str, f: Callable[..., Any], names: Sequence[str]
) -> None:
    """Has a function that was made here called by the name of another."""
    # JAX 0.10 to 0.12 names functions in errors.
    info = api_util.debug_info(kind, f, (), {})
    setattr(run, _NAME, info._replace(arg_names=tuple(names)))


def share_name(run: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Has a function called as another is that `name_as` named (JAX 0.10 to 0.12)."""
    if (info := getattr(other, _NAME, None)) is not None:
        setattr(run, _NAME, info)


def batching_rule(eqn: jex.JaxprEqn) -> Any:
    """The function that a user has given a `custom_vmap` as its rule, if it shows."""
    # JAX 0.10 to 0.12 wraps it. Where the function has been differentiated, the rule is
    # one of JAX's own, and so it is where JAX made it.
    return getattr(eqn.params["rule"], "__wrapped__", None)


def maps_in_sequence(eqn: jex.JaxprEqn) -> bool:
    """Whether a `custom_vmap` is a `sequential_vmap`, which runs row by row."""
    # JAX 0.10 to 0.12 gives it this name.
    name = getattr(batching_rule(eqn), "__qualname__", "")
    return name.startswith("sequential_vmap.")


def effect_on(effect: Any, renamed: Callable[[Any], Any]) -> Any:
    """An effect on a reference, where the variable that holds it has another name."""
    # JAX 0.10 to 0.12 has these effects name it, and exports no classes of them.
    var = getattr(effect, "input", None)
    return effect.replace(input=renamed(var)) if isinstance(var, jex.Var) else effect


def called_back(eqn: jex.JaxprEqn) -> Any:
    """The function that a callback calls, `None` if the equation is no callback."""
    # JAX 0.10 to 0.12 wraps it.
    return getattr(eqn.params.get("callback"), "callback_func", None)


def identity(x: object) -> object:
    """What is the same object for two tracers if they stand for the same value."""
    # A program that is being lowered makes a new tracer each time it reads a variable
    # (JAX 0.10 to 0.12). Should they cease to have this attribute, no two are the same.
    return getattr(x, "val", x) if isinstance(x, jax.core.Tracer) else x


# With the flags `jax_remat3`, `jax_custom_jvp3` and `jax_custom_vjp3`, JAX 0.12 makes
# names, checkpoints and functions with derivative rules another kind of primitive
# (`hijax`). They mean what these mean that it makes without; it exports no classes.
_NEW_FORMS = {
    "CheckpointName": "name",
    "CheckpointNameFwd": "name",
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "RematTraced": "remat2",
}


def form_of(eqn: jex.JaxprEqn) -> str:
    """What an equation is, whichever of two forms JAX has given it (JAX 0.12)."""
    # It is the name of its primitive, and for a name, a checkpoint or a function with
    # derivative rules that of the primitive without flags: `name`, `remat2`,
    # `custom_jvp_call` or `custom_vjp_call`. A `hijax` primitive of another kind is a
    # `call_hi_primitive`, as JAX calls it.
    name = eqn.primitive.name
    if name != "call_hi_primitive":
        return name
    primitive = eqn.params["_prim"]
    if not type(primitive).__module__.startswith("jax."):
        return name
    form = _NEW_FORMS.get(type(primitive).__name__, name)
    # Where JAX computes a function again, its rule may need more inputs than it does.
    # Then they are not those of a program, and it is one of another kind.
    if form == "custom_vjp_call" and jax.tree.leaves(primitive.in_avals[1]):
        return name
    return form


def form_params(eqn: jex.JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation, by the names that they have in its form."""
    # JAX 0.12 has two forms, see `form_of`.
    # For a name `name`, for a checkpoint `jaxpr`, `policy` and `prevent_cse`, for a
    # function with derivative rules `call_jaxpr`, and others.
    if form_of(eqn) == eqn.primitive.name:
        return eqn.params
    primitive = eqn.params["_prim"]
    traced = getattr(primitive, "traced", None)
    return {**primitive.params, **({"call_jaxpr": traced.jaxpr} if traced else {})}


def with_form_params(eqn: jex.JaxprEqn, params: dict[str, Any]) -> jex.JaxprEqn:
    """An equation with other parameters, of the names of `form_params` (JAX 0.12)."""
    # Its inputs and outputs keep their types.
    if form_of(eqn) == eqn.primitive.name:
        return eqn.replace(params=params)
    old, params = eqn.params["_prim"], dict(params)
    if (program := params.pop("call_jaxpr", None)) is not None:
        params["traced"] = _with_program(params["traced"], program)
    # The base class of JAX sets up everything else in `__init__`, from the types.
    primitive = copy.copy(old)
    primitive.params = params
    primitive.__dict__.update(params)
    return eqn.replace(params={**eqn.params, "_prim": primitive})


def _with_program(traced: Any, program: jex.ClosedJaxpr) -> Any:
    """A function that has been traced (`jax.stages.Traced`), with another program."""
    # It is not traced once more: that would need the axes that it was traced in.
    if program is traced.jaxpr:
        return traced
    new = copy.copy(traced)
    new._params = {**traced._params, "jaxpr": program}
    new._lojax = new._closure_converted = None
    assert new.jaxpr is program, "`jax.stages.Traced` holds its program elsewhere"
    return new


# The equations that run a program once, and the parameter that holds it.
CALLS: dict[str, str] = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    # Of a scan inside `jax.checkpoint`, and of custom derivatives.
    "closed_call": "call_jaxpr",  # JAX 0.10
    "eval_jaxpr": "call_jaxpr",  # JAX 0.12
}


def called_by(eqn: jex.JaxprEqn) -> AnyJaxpr | None:
    """The program that an equation runs once, from all its operands; see `CALLS`."""
    # Functions with derivative rules are not among the calls. JAX 0.12 has two forms of
    # them, see `form_of`.
    name = form_of(eqn)
    return form_params(eqn)[CALLS[name]] if name in CALLS else None


def is_for_kernels(eqn: jex.JaxprEqn) -> bool:
    """Whether an equation is a branch of which one is for kernels on a TPU alone."""
    # JAX 0.10 to 0.12 takes the diagonal of a matrix in another way in there.
    return eqn.params.get("branches_platforms") == (("mosaic",), None)


def programs_held(eqn: jex.JaxprEqn) -> list[AnyJaxpr]:
    """The programs in an equation of JAX's, or of another library's."""
    # A `hijax` primitive may hold them as jaxprs, or as functions that have been traced
    # (JAX 0.12).
    programs: list[AnyJaxpr] = list(jex.jaxprs_in_params(form_params(eqn)))
    primitive = eqn.params.get("_prim")
    if programs or primitive is None:
        return programs
    held = primitive.params
    traced = [x for x in held.values() if isinstance(x, jax.stages.Traced)]
    return [*jex.jaxprs_in_params(held), *(x.jaxpr for x in traced)]


def is_high(eqn: jex.JaxprEqn) -> bool:
    """Whether JAX must replace a primitive in an equation before it is compiled."""
    # It does that in a program which says so of itself, as those that it traces do (in
    # JAX 0.10 to 0.12).
    return eqn.primitive.is_high(*(x.aval for x in eqn.invars), **eqn.params)


def is_open(program: AnyJaxpr) -> bool:
    """Whether a program lacks the values of its constants: never so in JAX 0.12."""
    is_closed = isinstance(program, jex.ClosedJaxpr)  # JAX 0.12: the same as `Jaxpr`
    return isinstance(program, jex.Jaxpr) and not is_closed


def close(program: Any) -> jex.ClosedJaxpr:
    """A program in an equation, which has no constants if it is open (JAX 0.10)."""
    # It is the same object each time, so that what is called twice stays shared.
    return _close_open(program) if is_open(program) else program


@functools.lru_cache(maxsize=1024)
def _close_open(program: jex.Jaxpr) -> jex.ClosedJaxpr:
    return jex.ClosedJaxpr(program, ())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a `scan` equation are its constants, and its carry."""
    if "ft_in" in params:  # JAX 0.12
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def refuse_scan3() -> None:
    """Checks that JAX is not to run scans in its next form (JAX 0.10 to 0.12)."""
    if getattr(jax.config, "jax_scan3", False):
        raise ValueError(
            "eqloop cannot run with JAX's flag `jax_scan3`: with it `jax.lax.scan` "
            "ignores `reverse`, and gradients of loops would be wrong. Turn it off by "
            "`jax.config.update('jax_scan3', False)`, and do not set the environment "
            "variable `JAX_SCAN3`."
        )


def drops_barriers() -> bool:
    """Whether XLA removes `optimization_barrier` before it decides what is copied."""
    # On the CPU, JAX 0.10 to 0.11.0 does. What is read before a barrier may then be
    # read behind it, and a buffer that is written there is copied first.
    return _JAXLIB < (0, 11, 1) and planning_device().platform == "cpu"


def misreads_shifted_writes() -> bool:
    """Whether XLA may read what it has written itself, in a write that moves rows."""
    # On the CPU, JAX 0.10 to 0.12 does (xla #49176).
    return planning_device().platform == "cpu"


def is_widened(dtype: np.dtype) -> bool:
    """Whether XLA computes slices of such arrays in a wider type."""
    # On the CPU, it converts all of the array for each slice that is read or written:
    # of bfloat16 in JAX 0.10 to 0.11.1, of smaller floats in JAX 0.12 as well. It moves
    # the conversion of what a loop only reads out of the loop, which takes two to four
    # times the memory of the array; what the loop writes to is converted there and back
    # at every step.
    if planning_device().platform != "cpu" or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return dtype.itemsize < 2 or (dtype == jnp.bfloat16 and _JAXLIB < (0, 11, 2))
