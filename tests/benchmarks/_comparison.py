"""A comparison: cases measured beside one another, and what is claimed of them."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ._claims import Claim, Figure
from ._measure import Case, Measurement, measure
from ._results import Outcome, Row, Verdict


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Cases to measure together, with the bounds that they should hold.

    Args:
        title: a heading.
        cases: the rows; the first of those with the same arguments is the reference
            for their results.
        claims: bounds on figures of the rows.
        tolerance: results differ from the reference by at most this.
        rounds: how many times every case is run.
        compile_rounds: how many times every case is compiled.
        size: where this stands on the horizontal axis, if its group is drawn.
        clock: tells the time of a run, in seconds.
    """

    title: str
    cases: Sequence[Case]
    claims: Sequence[Claim] = ()
    tolerance: float = 1e-4
    rounds: int = 15
    compile_rounds: int = 1
    size: int | None = None
    clock: Callable[[], float] = time.perf_counter

    def once(self) -> "Comparison":
        """The same with each case compiled and run once: to see that all of it runs."""
        return dataclasses.replace(self, rounds=1, compile_rounds=1)

    def run(self) -> Outcome:
        """Measures the cases; a claim stands where its cases could all be measured."""
        found = measure(
            self.cases,
            rounds=self.rounds,
            compile_rounds=self.compile_rounds,
            clock=self.clock,
        )
        measured = {
            name: one for name, one in found.items() if isinstance(one, Measurement)
        }
        return Outcome(
            title=self.title,
            size=self.size,
            rounds=self.rounds,
            tolerance=self.tolerance,
            rows=tuple(
                _row(case, measured[case.name])
                for case in self.cases
                if case.name in measured
            ),
            skipped=tuple(
                (case.name, case.requires or "")
                for case in self.cases
                if case.name not in measured
            ),
            verdicts=tuple(
                _verdict(claim, figure)
                for claim in self.claims
                if all(name in measured for name in claim.cases)
                if (figure := claim.figure(measured)) is not None
            ),
        )


def _verdict(claim: Claim, figure: Figure) -> Verdict:
    low, median, high = np.quantile(figure, [0.25, 0.5, 0.75]).tolist()
    quartiles = (low, high) if np.size(figure) > 1 else None
    return Verdict(claim.text, median, claim.at_most, claim.unit, quartiles)


def _row(case: Case, measurement: Measurement) -> Row:
    plan, there = measurement.plan, measurement.on_h100
    return Row(
        name=case.name,
        line=case.line,
        seconds=float(np.median(measurement.seconds)),
        quartiles=tuple(np.quantile(measurement.seconds, [0.25, 0.75]).tolist()),
        compile_seconds=float(np.median(measurement.compile_seconds)),
        temp_bytes=measurement.temp_bytes,
        error=measurement.error,
        evaluations=plan and plan.evaluations,
        kernels=there and there.kernels,
        h100_bytes=there and there.temp_bytes,
    )
