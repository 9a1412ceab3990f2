"""One thing that is alive."""

import dataclasses
import re
from typing import Literal, NamedTuple

from .._programs import Place

Kind = Literal["input", "output", "stored", "temporary", "constant", "padding"]


class LoopAt(NamedTuple):
    """A loop of the program.

    Attributes:
        name: The transform that it is of, or `"loop"`.
        place: The line that calls it, if that is known.
        steps: How many steps it has, if the compiler knows.
    """

    name: str
    place: Place | None
    steps: int | None


@dataclasses.dataclass(frozen=True)
class Alive:
    """Memory that is taken where a program takes the most.

    Attributes:
        nbytes: How much.
        shape: The shape of the array in it.
        dtype: Its dtype, as JAX calls it; `""` for what is no array.
        place: The line of the user's program that made it, if that is known.
        kind: An `"input"` or an `"output"`; what is `"stored"` for the way back;
            `"temporary"`; a `"constant"` of the program; or `"padding"`, which is what
            XLA leaves free between buffers.
        library: The line of a library that was called there, if it made it.
        loop: The loop that made it.
        name: The path of an input.
        is_on_host: Whether it is in the memory of the host.
        is_donated: Whether it is an input that an output overwrites.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    place: Place | None
    kind: Kind
    library: Place | None = None
    loop: LoopAt | None = None
    name: str = ""
    is_on_host: bool = False
    is_donated: bool = False

    @property
    def is_at_peak(self) -> bool:
        """Whether it is an array among those that come and go."""
        return self.kind in ("stored", "temporary") and not self.is_on_host

    @property
    def type_in_words(self) -> str:
        """Its type as JAX writes it, such as `f32[8,128]`."""
        short = re.sub(r"(l?oat|nt|omplex)(?=\d)", "", self.dtype)
        dims = ",".join(map(str, self.shape))
        return f"{short}[{dims}]" if short else ""
