"""Why claims are missed: the page shows a sentence beside each.

A claim that asked for the wrong thing is changed where it is made. What is left here
are bounds that should hold and do not.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why some claims are missed.

    Args:
        titles: of their comparisons, as a pattern.
        claims: their texts, as a pattern.
        why: a sentence.
        version: that of JAX, if they hold with another one.
    """

    titles: str
    claims: str
    why: str
    version: str = ""

    def is_for(self, title: str, claim: str, version: str) -> bool:
        """Whether it says why a claim is missed with a version of JAX."""
        found = re.search(self.titles, title) and re.search(self.claims, claim)
        return found is not None and version.startswith(self.version)


REASONS: tuple[Reason, ...] = (
    Reason(
        "Budgets: wave",
        "8MiB",
        "By three per cent, which is less than the runs of a loop as short as this "
        "differ.",
        version="0.10",
    ),
    Reason(
        "every 10th of 20000 carries",
        r"Recursive\(16\) over `lax.scan`",
        "The gradient of `lax.scan` takes a fifth of the time that it took with JAX "
        "0.10, so it counts that steps are run four times: for a thirtieth of the "
        "memory.",
        version="0.12",
    ),
    Reason(
        "over 4597 rows",
        "trace and compile, ChunkedVmap over netket",
        "By one per cent, which is less than compiling differs from one time to the "
        "next.",
        version="0.10",
    ),
    Reason(
        "The plan for a carry of 50 leaves",
        "trace and compile",
        "The program of the plan is compiled, to see what memory it really takes, and "
        "for a step with so many leaves that is most of the time.",
    ),
    Reason(
        "12 transformer layers",
        "budget of 12.4 MB over the fastest",
        "By one per cent, which is less than the runs of one policy differ.",
        version="0.10",
    ),
    Reason(
        "recurrent step of width 64, 4096 steps",
        "predicted time of Budget",
        "It takes less than foreseen: pieces of this small step take longer where they "
        "are timed alone.",
        version="0.12",
    ),
)


def reason_for(title: str, claim: str, version: str) -> str:
    """Why a claim is missed; nothing, if nobody has said."""
    found = (one.why for one in REASONS if one.is_for(title, claim, version))
    return next(found, "")
