"""A schedule from outside is one like any other."""

import dataclasses
from typing import assert_type

import eqloop as el


@dataclasses.dataclass(frozen=True)
class Halves(el.AbstractSchedule):
    within: el.AbstractSchedule = el.Chunked(1)

    def layout(self, loop: el.LoopSpec) -> el.Layout:
        half = assert_type(loop.length, int) // 2
        cut = loop.cut([(half, self.within), (loop.length - half, el.StoreAll())])
        return assert_type(cut, el.Layout)


scan = el.Scan(lambda h, x: (h + x, None), schedule=Halves())
plan = el.CheckpointedScan(lambda h, x: (h + x, None), schedule=Halves(el.Binomial(2)))


def wrong() -> None:
    el.AbstractSchedule()  # pyright: ignore[reportAbstractUsage]
    el.Offload(Halves)  # pyright: ignore[reportArgumentType]
