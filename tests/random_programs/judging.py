"""Whether a case is as it has to be: the library's result beside the reference's."""

import dataclasses
import re
import traceback
from typing import Any

import jax
import numpy as np
from jax.experimental import hijax

from .cases import Case, Result
from .modes import FORWARD
from .rules import RULES

DISHONEST = {name for name, rule in RULES.items() if not rule.is_honest}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a case.

    Attributes:
        case: The case.
        kind: What is the same for all findings of a kind.
        detail: What was seen.
    """

    case: Case
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}\n{self.detail}\n{self.case}"


class Skipped(Exception):
    """Plain JAX does not evaluate this case, so there is nothing to compare to."""


def judge(case: Case) -> Finding | None:
    """What is wrong with a case, if anything is.

    Raises:
        Skipped: If plain JAX cannot evaluate it.
    """
    if _ends_the_process(case):
        raise Skipped("XLA would end the process")
    with case.environment():
        try:
            expected = case.evaluate(is_written_out=True)
        except Exception as error:
            raise Skipped(kind_of(error)) from error
        try:
            found = case.evaluate(is_written_out=False, is_jitted=case.is_jitted)
        except Exception as error:
            if _is_refused(case, error) or _is_theirs(case, error):
                return None
            return Finding(case, kind_of(error), "".join(traceback.format_exc()))
        return _compared(case, expected, found)


def judge_slopes(case: Case) -> Finding | None:
    """What is wrong with the `slopes` of a case: they must be those of its own values.

    This judges programs for which there is no reference: if rows can see their chunk,
    other chunks make another function. But it is one function, and its derivative.
    Where examples speak to each other, the gradient of one has parts of the others in
    it, and only the sums belong together.

    Raises:
        Skipped: If plain JAX cannot evaluate it, or it has a kink or a jump here.
    """
    if _ends_the_process(case):
        raise Skipped("XLA would end the process")
    with case.environment():
        try:
            at = case.evaluator(is_written_out=False)
            are_joined = case.has_axis and case.vmap == "outside"
            pairs = _pairs_of_sums if are_joined else _pairs
            found, *moved = (pairs(at(by).arrays) for by in (0.0, *_STEPS))
        except Exception as error:
            if _is_refused(case, error) or _is_too_large(error):
                return None
            try:
                case.evaluate(is_written_out=True)
            except Exception as other:
                raise Skipped(kind_of(other)) from other
            return Finding(case, kind_of(error), "".join(traceback.format_exc()))
    for (_, slope), *others in zip(found, *moved, strict=True):
        more, less, some_more, some_less = (value for value, _ in others)
        coarse = (more - less) / (2 * _STEPS[0])
        fine = (some_more - some_less) / (2 * _STEPS[2])
        if min(distance(slope, fine), distance(slope, coarse)) <= _SLOPE:
            continue
        if distance(coarse, fine) > _SLOPE / 10:
            raise Skipped("it has a kink or a jump")
        kind = f"another slope: {case.program.transform.name}"
        return Finding(case, kind, f"{slope}\nfor\n{fine}")
    return None


# How far the inputs are moved for finite differences.
_STEPS = (1e-5, -1e-5, 1e-6, -1e-6)
# How near a slope must be to that of finite differences.
_SLOPE = 1e-4


def _pairs(slopes: Any) -> list[tuple[Any, Any]]:
    leaves = list(map(np.asarray, jax.tree.leaves(slopes)))
    return list(zip(leaves[::2], leaves[1::2], strict=True))


def _pairs_of_sums(slopes: Any) -> list[tuple[Any, Any]]:
    return [(value.sum(0), slope.sum(0)) for value, slope in _pairs(slopes)]


def _is_too_large(error: Exception) -> bool:
    """Whether a map says that its budget is too small for what it is asked for."""
    return isinstance(error, ValueError) and str(error).startswith("Budget: ")


def _ends_the_process(case: Case) -> bool:
    """Whether XLA may end the process, with plain JAX as well.

    The derivative of a sort is a scatter with unsigned indices. XLA fails a check of
    its own if it splits these unevenly over devices, as it does beside a map whose rows
    are padded.
    """
    is_sorted = case.program.names() & {"sort", "sort2"}
    is_split = "ParallelMap(" in str(case.program)
    is_reversed = case.mode not in {mode.__name__ for mode in FORWARD}
    return bool(is_sorted) and is_split and is_reversed


def _is_refused(case: Case, error: Exception) -> bool:
    """Whether the error says that this cannot be done, of what cannot be.

    Steps that are run again may not write to refs. JAX 0.10 does
    not transpose a scan that hands on integers on the host, which offloaded slots are.
    A carry is differentiated if it starts so, as that of `lax.scan` is, whether or not
    steps keep to it; then a rule without a forward mode may be asked for one.
    Within `shard_map`, JAX's own loops and branches do not let a result be the same on
    all devices at one time and differ at another.
    Without `jit`, JAX has no scans of no steps. `jax.checkpoint` cannot save complex
    residuals. And the backward pass of a loop that stops is not stored, which reversing
    a cotangent's clipping would need.
    """
    if not isinstance(error, ValueError | TypeError | NotImplementedError):
        return False
    if "so the manual axis types do not match" in str(error):
        return "lax." in str(case.program)
    if case.rescheduled and "branches must have equal output types" in str(error):
        return True
    if case.rescheduled and _is_too_large(error):
        return True
    if "reduce_precision does not accept dtype complex" in str(error):
        return True
    if "zero-length scan is not supported in disable_jit" in str(error):
        return True
    if "cannot be differentiated twice in reverse mode" in str(error):
        clips = case.program.transform.get("backward") is not None
        return clips or "damped" in case.program.names()
    if not hasattr(hijax, "HiPrim") and "type float0<host>" in str(error):
        return True
    no_forward = (
        "forward-mode autodiff (jvp) to a custom_vjp",
        "rule for 'custom_lin'",
    )
    if any(text in str(error) for text in no_forward):
        return "ClipCotangent" in str(case.program) or any(
            not RULES[name].is_forward for name in case.program.names() & {*RULES}
        )
    if "ref" in case.program.names() and case.mode != "primal":
        return "StoreAll" in str(error)
    return False


def _is_theirs(case: Case, error: Exception) -> bool:
    """Whether JAX raises it as well if it compiles nothing.

    What a rule computes and nobody needs is left out of what is compiled.
    """
    if case.is_jitted:
        return False
    try:
        case.evaluate(is_written_out=True, is_jitted=False)
    except Exception as other:
        return kind_of(other) == kind_of(error)
    return False


def kind_of(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    first = re.sub(r"call \w+ under", "call it under", re.sub(r"[0-9]+", "#", first))
    return f"{type(error).__name__}: {first[:100]}"


def _compared(case: Case, expected: Result, found: Result) -> Finding | None:
    if jax.tree.structure(expected.arrays) != jax.tree.structure(found.arrays):
        trees = map(jax.tree.structure, (expected.arrays, found.arrays))
        return Finding(case, "another tree", "{} for {}".format(*trees))
    pairs = zip(*map(jax.tree.leaves, (expected.arrays, found.arrays)), strict=True)
    for want, got in pairs:
        types = [(np.shape(x), jax.dtypes.result_type(x)) for x in (want, got)]
        if types[0] != types[1]:
            return Finding(case, "another type", f"{types[1]} for {types[0]}")
    for log in ("ordered", "unordered"):
        want, got = (getattr(result, log) for result in (expected, found))
        if len(want) != len(got) or not np.allclose(want, got, 1e-3, 1e-3):
            return Finding(case, f"{log} effects differ", f"{got}\nfor\n{want}")
    worst = distance(expected.arrays, found.arrays)
    if worst <= case.precision.tolerance:
        return None
    if worst <= 100 * _sensitivity(case, expected):
        return None
    kind = f"other numbers: {case.mode} of {case.program.transform.name}"
    dishonest = sorted(case.program.names() & DISHONEST)
    if dishonest:
        kind += f" with {', '.join(dishonest)}"
    arrays = f"{jax.tree.leaves(found.arrays)}\nfor\n{jax.tree.leaves(expected.arrays)}"
    return Finding(case, kind, f"off by {worst:.2g}\n{arrays}")


def _sensitivity(case: Case, expected: Result) -> float:
    """How far rounding the inputs takes the reference: no more can be asked for."""
    nudge = case.precision.nudge
    results = [
        case.evaluate(is_written_out=True, nudge=by).arrays for by in (nudge, -nudge)
    ]
    results.append(case.evaluate(is_written_out=True, is_jitted=False).arrays)
    return max(distance(expected.arrays, arrays) for arrays in results)


def distance(one: Any, other: Any) -> float:
    """The largest difference, beside the numbers that it is among."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype.kind not in "fc":
            worst = max(worst, float(np.inf) if (a != b).any() else 0.0)
            continue
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        finite = np.abs(a[np.isfinite(a)])
        scale = 1 + finite.max(initial=0.0)
        off = np.where(same, 0.0, np.abs(a - b))
        off = np.where(np.isnan(off), np.inf, off) / scale
        worst = max(worst, float(off.max(initial=0.0)))
    return worst
