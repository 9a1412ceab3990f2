"""Chooses what each part of a function stores, by one price of a byte.

The parts are run one after the other, and taken back in the opposite order. While a
part is taken back, all that it and the parts before it have stored is there, and what
its own way back takes:

    stored   [1] [1 2] [1 2 3] | [1 2 3] [1 2] [1]
    taken                      |     3     2    1

Nothing here knows of JAX.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

_T = TypeVar("_T")

# How often the interval is halved in which the price is.
_HALVINGS = 40
# Of so many budgets for each choice that is wanted, some have the same.
_FINER = 4
# Those of a byte on the host, beside that of one on the device. At the last, none is
# used.
_PRICES_OF_HOST = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, math.inf)
# The highest price of a byte, in nanoseconds.
_HIGHEST = 1e9


@dataclasses.dataclass(frozen=True)
class Option:
    """One of the ways to run a part.

    Attributes:
        nanoseconds: How long the part takes, there and back.
        stored: Bytes that it alone stores, from its forward pass to its way back.
        shared: Values that it needs on its way back, and that others may need as well.
        working: Bytes that its way back takes besides what is stored.
        on_host: Bytes that it stores in the memory of the host.
    """

    nanoseconds: float
    stored: int
    shared: frozenset[int]
    working: int
    on_host: int = 0

    def without(self, values: set[int]) -> "Option":
        """This option where some values are there anyway."""
        return dataclasses.replace(self, shared=self.shared - values)

    def slower(self, factor: float) -> "Option":
        """This option if it takes so many times as long."""
        return dataclasses.replace(self, nanoseconds=factor * self.nanoseconds)


# For each part, which of its options is chosen.
Chosen = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The parts of a function, each with its options.

    Attributes:
        parts: The options of each part. The first of each is the fastest.
        sizes: The bytes of the values that parts share.
        host: The bytes that all may store in the memory of the host. The fastest option
            of each part stores none there.
    """

    parts: Sequence[Sequence[Option]]
    sizes: Mapping[int, int]
    host: int = 0

    @property
    def fastest(self) -> Chosen:
        """The fastest option of each part."""
        return (0,) * len(self.parts)

    def nanoseconds(self, chosen: Chosen, among: Sequence[bool] | None = None) -> float:
        """How long the function takes, there and back, or some of its parts."""
        times = [part[i].nanoseconds for part, i in self._pairs(chosen)]
        return sum(times if among is None else itertools.compress(times, among))

    def stored(self, chosen: Chosen) -> list[int]:
        """The bytes that each part adds to what is stored."""
        shared, added = set[int](), list[int]()
        for part, i in self._pairs(chosen):
            new = part[i].shared - shared
            added.append(part[i].stored + sum(map(self.sizes.__getitem__, new)))
            shared |= new
        return added

    def peaks(self, chosen: Chosen) -> list[int]:
        """The bytes that are taken at once while each part is taken back."""
        stored = itertools.accumulate(self.stored(chosen))
        pairs = zip(stored, self._pairs(chosen), strict=True)
        return [size + part[i].working for size, (part, i) in pairs]

    def on_host(self, chosen: Chosen) -> int:
        """The bytes that are stored in the memory of the host."""
        return sum(part[i].on_host for part, i in self._pairs(chosen))

    def peak(self, chosen: Chosen) -> int:
        """The most bytes that are taken at once."""
        return max(self.peaks(chosen), default=0)

    def within(self, nbytes: float) -> Chosen | None:
        """The fastest options that fit; `None` if none are found that do."""
        if self.peak(self.fastest) <= nbytes:
            return self.fastest
        low, high = 0.0, _HIGHEST
        best = self._at(high)
        if self.peak(best) > nbytes:
            best = self.smallest()
            return self.faster(best, nbytes) if self.peak(best) <= nbytes else None
        for _ in range(_HALVINGS):
            # Prices of a byte differ by orders of magnitude.
            price = (low * high) ** 0.5 if low else high / 1e3
            chosen = self._at(price)
            if self.peak(chosen) <= nbytes:
                best, high = chosen, price
            elif low or price > 1e-12:
                low = price
        return self.faster(best, nbytes)

    def spread(self, count: int) -> list[Chosen]:
        """Up to so many choices from the least memory to the least time."""
        low, high = (self.peak(c) or 1 for c in (self.smallest(), self.fastest))
        steps = _FINER * count
        sizes = (low * (high / low) ** (k / steps) for k in range(steps))
        every = [chosen for size in sizes if (chosen := self.within(size))]
        return spread(list(dict.fromkeys((*every, self.fastest))), count)

    def smallest(self) -> Chosen:
        """Options that take little memory: no part alone could take less."""
        chosen = self._at(_HIGHEST)
        while True:
            peak = self.peak(chosen)
            smaller = min(self._neighbours(chosen), key=self.peak, default=chosen)
            if self.peak(smaller) >= peak:
                return chosen
            chosen = smaller

    def _pairs(self, chosen: Chosen) -> zip:
        return zip(self.parts, chosen, strict=True)

    def _at(self, price: float) -> Chosen:
        """What each part would choose at a price, in nanoseconds for a byte."""
        # The memory of the host has a price of its own. Where it is too small, that is
        # a part of the price of the device's, at which none is used.
        every = (self._at_prices(price, part * price) for part in _PRICES_OF_HOST)
        return next(one for one in every if self.on_host(one) <= self.host)

    def _at_prices(self, price: float, of_host: float) -> Chosen:
        def cost(option: Option) -> float:
            shared = sum(map(self.sizes.__getitem__, option.shared))
            nbytes = option.stored + shared + option.working / len(self.parts)
            on_host = of_host * option.on_host if option.on_host else 0.0
            return option.nanoseconds + price * nbytes + on_host

        return tuple(
            min(range(len(part)), key=lambda i, part=part: cost(part[i]))
            for part in self.parts
        )

    def faster(self, chosen: Chosen, nbytes: float) -> Chosen:
        """The choice with faster options for single parts where these still fit."""
        while True:
            now = self.nanoseconds(chosen)
            better = sorted(
                (time, other)
                for other in self._neighbours(chosen)
                if (time := self.nanoseconds(other)) < now
            )
            fits = (other for _, other in better if self.peak(other) <= nbytes)
            if (found := next(fits, None)) is None:
                return chosen
            chosen = found

    def _neighbours(self, chosen: Chosen) -> list[Chosen]:
        """All choices with another option for one part that fit on the host."""
        left = self.host - self.on_host(chosen)
        return [
            (*chosen[:p], i, *chosen[p + 1 :])
            for p, part in enumerate(self.parts)
            for i in range(len(part))
            if i != chosen[p] and part[i].on_host <= left + part[chosen[p]].on_host
        ]


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Up to so many of these, two at least, with the first and the last."""
    last = len(items) - 1
    numbers = {round(last * k / (count - 1)) for k in range(count)}
    return [items[i] for i in sorted(numbers)]
