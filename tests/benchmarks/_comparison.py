"""A comparison: cases measured beside one another, and what is claimed of them."""

import dataclasses
from collections.abc import Sequence

from ._claims import Claim
from ._measure import Case, Measurement, Skipped, measure


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
    """

    title: str
    cases: Sequence[Case]
    claims: Sequence[Claim] = ()
    tolerance: float = 1e-4
    rounds: int = 15
    compile_rounds: int = 1

    def run(self) -> "Outcome":
        """Measures the cases."""
        rows = measure(
            self.cases, rounds=self.rounds, compile_rounds=self.compile_rounds
        )
        return Outcome(self, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Verdict:
    """What a claim came to."""

    claim: Claim
    figure: float

    @property
    def holds(self) -> bool:
        return self.figure <= self.claim.at_most


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What a comparison measured."""

    comparison: Comparison
    rows: dict[str, Measurement | Skipped]

    @property
    def measured(self) -> dict[str, Measurement]:
        """The rows that were not skipped."""
        return {
            name: row for name, row in self.rows.items() if isinstance(row, Measurement)
        }

    @property
    def verdicts(self) -> list[Verdict]:
        """The claims whose cases were all measured."""
        measured = self.measured
        return [
            Verdict(claim, claim.figure(measured))
            for claim in self.comparison.claims
            if all(name in measured for name in claim.cases)
        ]

    @property
    def disagreeing(self) -> list[str]:
        """The cases whose results are not the reference's."""
        return [
            name
            for name, row in self.measured.items()
            if row.error > self.comparison.tolerance
        ]

    @property
    def holds(self) -> bool:
        """Whether all results agree and every claim holds."""
        return not self.disagreeing and all(v.holds for v in self.verdicts)
