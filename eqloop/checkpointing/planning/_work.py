"""How much work a step is: counted in its jaxpr, never run.

The unit is a nanosecond, roughly, on the device that the plan is for. Nothing depends
on the unit: plans are compared with one another.
"""

import dataclasses
import math

import jax.extend.core as jex

from ..._compat import form_of
from ..._device import PlannedDevice, planning_device
from ..._programs import aval_of, equations, formula_of, programs_in
from ..._types import AnyJaxpr
from ..engine._costs import Rates

# fmt: off
_COSTLY = frozenset({
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos",
    "tan", "erf", "erfc", "erf_inv", "pow", "sqrt", "rsqrt", "cbrt", "asin",
    "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh",
    "digamma", "lgamma", "div",
})
# fmt: on
# fmt: off
_FREE = frozenset({
    "broadcast_in_dim", "reshape", "squeeze", "transpose",
    "convert_element_type", "copy", "stop_gradient", "optimization_barrier",
    "name", "known_cast",
})
# fmt: on


# Measured on two cores, by `tests/benchmarks/calibrate.py`. Two are fitted to gradients
# of loops under many layouts: `run` to those of a three-variable ODE under `Binomial`,
# and `dot_of_batch` to those of `h <- tanh(W tanh(W h + x))`, a GRU and a neural ODE in
# batches of 8 and of 64.
CPU = Rates(
    flop=0.01,
    entry=0.06,
    costly_entry=0.5,
    equation=20.0,
    dot_of_batch=1e3,
    byte=0.05,
    byte_of_sums=0.02,
    cached_byte=0.01,
    cache=2**20,
    iteration=5.0,
    dynamic_iteration=5.0,
    run=3e3,
    byte_to_host=0.05,
    byte_to_file=0.5,
    callback=2e5,
)


def rates() -> Rates:
    """The rates of the device that plans are for."""
    device = planning_device()
    return CPU if device.platform == "cpu" else _rates_of(device)


def _rates_of(device: PlannedDevice) -> Rates:
    """The rates of an accelerator: those of its data sheet, in nanoseconds."""
    sheet = device.rates
    byte, start = 1e9 / sheet.memory, 1e9 * sheet.start
    # On a GPU, the host sees the condition of a loop, which takes tens of microseconds;
    # a TPU runs all of a program by itself.
    waits = 10 * start if device.platform == "gpu" else start
    return Rates(
        flop=1e9 / sheet.float32,
        entry=4 * byte,
        costly_entry=4 * byte,
        equation=start,
        dot_of_batch=0.0,
        byte=byte,
        byte_of_sums=byte,
        # Of the second cache of a GPU; a TPU says itself what is in its vector memory.
        cached_byte=byte / 2,
        cache=2**24 if device.platform == "gpu" else 0,
        iteration=start,
        dynamic_iteration=waits,
        run=3 * waits,
        byte_to_host=1e9 / sheet.to_host,
        # Of a fast disk, and of a callback to Python.
        byte_to_file=0.5,
        callback=2e5,
    )


def work(jaxpr: AnyJaxpr, rate: Rates) -> float:
    """The time that the equations of a jaxpr take, one after the other."""
    return sum(equation_work(eqn, rate) for eqn in jaxpr.eqns)


def work_of(jaxpr: AnyJaxpr) -> float:
    """The time that the equations of a jaxpr take on the device that plans are for."""
    return work(jaxpr, rates())


def start(jaxpr: AnyJaxpr, rate: Rates) -> float:
    """The part of that time which does not depend on sizes."""
    return work(jaxpr, rate) - work(jaxpr, dataclasses.replace(rate, equation=0.0))


def count_dots(jaxpr: AnyJaxpr) -> int:
    """How many dots there are in a jaxpr; those in a loop are counted once."""
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))


def equation_work(eqn: jex.JaxprEqn, rate: Rates) -> float:
    """The time that an equation takes."""
    inner = [work(jaxpr, rate) for jaxpr in programs_in(eqn)]
    if inner:
        if eqn.primitive.name == "cond":
            return max(inner)
        # How often a `while` iterates is not known; once is a lower bound.
        formula = formula_of(eqn)
        times = formula.times if formula else eqn.params.get("length", 1)
        return sum(inner) * times
    size = sum(math.prod(getattr(aval_of(var), "shape", ())) for var in eqn.outvars)
    match form_of(eqn):
        case name if name in _FREE:
            return 0.0
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(aval_of(eqn.invars[0]).shape[i] for i in contracted)
            return rate.equation + 2 * size * depth * rate.flop
        case "conv_general_dilated":
            kernel = aval_of(eqn.invars[1]).shape
            features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
            depth = math.prod(kernel) // features
            return rate.equation + 2 * size * depth * rate.flop
        case name if name in _COSTLY:
            return rate.equation + size * rate.costly_entry
        case _:
            return rate.equation + size * rate.entry
