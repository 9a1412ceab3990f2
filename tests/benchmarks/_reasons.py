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


REASONS: tuple[Reason, ...] = ()


def reason_for(title: str, claim: str, version: str) -> str:
    """Why a claim is missed; nothing, if nobody has said."""
    found = (one.why for one in REASONS if one.is_for(title, claim, version))
    return next(found, "")
