"""The passes together, until there is nothing left for them to do."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.extend.core as jex

from .._tracebacks import border
from ._algebra import simplify_algebra
from ._atoms import check_closed, count_equations
from ._common import eliminate_common_subexpressions
from ._copies import propagate_copies
from ._dead_code import eliminate_dead_code
from ._fold import constant_fold

PASSES: tuple[Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr], ...] = (
    constant_fold,
    simplify_algebra,
    propagate_copies,
    eliminate_common_subexpressions,
    eliminate_dead_code,
)
"""The five passes, in the order in which `optimize` applies them."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What passes have done, counted in equations, nested ones included.

    Attributes:
        before: The equations before the first run of a pass.
        after: The equations after the last.
        runs: For each run that changed something its pass, and the equations before
            and after it.

    Examples:
        >>> import eqloop as el, jax
        >>> jaxpr = jax.make_jaxpr(lambda x: x * 1)(2.0)
        >>> reports = []
        >>> jaxpr = el.ir.optimize(jaxpr, report=reports.append)
        >>> reports[0].before, reports[0].after
        (1, 0)
    """

    before: int
    after: int
    runs: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        rows = [*self.runs, ("together", self.before, self.after)]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'equations':<{width}}  before  after"]
        lines += [
            f"{name:<{width}}  {before:>6}  {after:>5}" for name, before, after in rows
        ]
        return "\n".join(lines)


@border
def optimize(
    jaxpr: jex.ClosedJaxpr,
    passes: Sequence[Callable[[jex.ClosedJaxpr], jex.ClosedJaxpr]] = PASSES,
    report: Callable[[Report], Any] | None = None,
) -> jex.ClosedJaxpr:
    """Applies passes again and again, until none of them changes anything.

    The result has the same meaning and the same signature, the same effects in the same
    order, and the same derivatives. It never has more equations. XLA also does this,
    and does it better. Use this to read, print, draw or transform jaxprs.

    Args:
        jaxpr: A closed jaxpr, as `jax.make_jaxpr(f)(*args)` gives.
        passes: The passes in their order, by default all five. `inline_jit` can be one.
        report: Called at the end with a `Report` of what each pass has done. `print`
            prints it as a table.

    Returns:
        A closed jaxpr.

    Raises:
        TypeError: `jaxpr` is not a closed jaxpr, or a pass is not a function.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from eqloop import ir
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x * 1.0) + jnp.sin(x))(1.0)
        >>> jaxpr = ir.optimize(jaxpr, report=lambda report: print(report.after))
        2
        >>> jaxpr
        { lambda ; a:f32[]. let b:f32[] = sin a; c:f32[] = add b b in (c,) }
    """
    check_closed(jaxpr, "optimize")
    check_passes(passes, "optimize")
    if not (report is None or callable(report)):
        raise TypeError(
            f"optimize: `report` must be a function of a `Report`, such as `print`, "
            f"not {report!r}."
        )
    runs: list[tuple[str, int, int]] = []
    before = count = count_equations(jaxpr)
    changed = bool(passes)
    while changed:
        changed = False
        for apply in passes:
            new = apply(jaxpr)
            if new is not jaxpr:
                runs.append((_name(apply), count, count := count_equations(new)))
                jaxpr, changed = new, True
    if report is not None:
        report(Report(before, count, tuple(runs)))
    return jaxpr


def check_passes(passes: Any, name: str) -> None:
    """Raises a `TypeError` for what is not a sequence of passes."""
    if callable(passes):
        raise TypeError(
            f"{name}: `passes` must be a sequence of passes, but it is a single one: "
            f"write `passes=[{_name(passes)}]`."
        )
    if not isinstance(passes, Iterable) or isinstance(passes, str):
        raise TypeError(
            f"{name}: `passes` must be a sequence of passes, such as "
            f"`eqloop.ir.PASSES`, not {passes!r}."
        )
    for i, apply in enumerate(passes):
        if not callable(apply):
            raise TypeError(
                f"{name}: `passes[{i}]` must be a function from a ClosedJaxpr to one, "
                f"such as `eqloop.ir.constant_fold`, but it is {apply!r}."
            )


def _name(apply: Callable[..., Any]) -> str:
    return getattr(apply, "__name__", repr(apply))
