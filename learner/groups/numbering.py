"""Numbers of tickets: which of them have ended, as ranges, and which place in the data each stands for.

Nearly every number stands for the next place in the data, in the order of issue; some are retries of a dead ticket. A
retry takes the next number too, and the places continue after it:

    number   0  1  2  3        4  5           places continue after a retry
    stands   0  1  2  retry 1  3  4           its place is that of the ticket it retries

So a number still identifies its prompt, given the retries so far.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping
from itertools import chain


class NumberSet:
    """A set of numbers from 0 on, stored as ordered disjoint ranges."""

    def __init__(self, ranges: tuple[tuple[int, int], ...] = ()) -> None:
        self._bounds = list(chain.from_iterable(ranges))  # start, end, start, end, ...
        self._size = sum(end - start for start, end in ranges)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self._bounds, number) % 2 == 1

    def __len__(self) -> int:
        return self._size

    def add(self, number: int) -> None:
        assert number not in self, f"{number} is in the set already"
        for bound in (number, number + 1):  # toggle a bound: insert it, or remove it and so extend a range
            at = bisect_left(self._bounds, bound)
            if at < len(self._bounds) and self._bounds[at] == bound:
                del self._bounds[at]
            else:
                self._bounds.insert(at, bound)
        self._size += 1

    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._bounds[::2], self._bounds[1::2], strict=True))

    def gaps(self, end: int) -> Iterator[int]:
        """The numbers below `end` that are not in the set, in order."""
        reached = 0
        for start, stop in (*self.ranges(), (end, end)):
            yield from range(reached, min(start, end))
            reached = stop


class Retries:
    """Which tickets retry a dead one, and how that shifts the places of all tickets."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._dead_of = dict(known or {})  # retry's number -> dead ticket
        self._numbers = sorted(self._dead_of)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, dead: int) -> None:
        assert number not in self._dead_of, f"ticket {number} is a retry already"
        assert 0 <= dead < number, f"ticket {number} cannot repeat ticket {dead}, which comes after it"
        self._dead_of[number] = dead
        insort(self._numbers, number)

    def dead_of(self, number: int) -> int | None:
        """The ticket that this one retries, or None."""
        return self._dead_of.get(number)

    def place(self, number: int) -> int:
        """The place in the data that this number stands for."""
        while (dead := self._dead_of.get(number)) is not None:  # a retry may itself have died and been retried
            number = dead
        return self.num_places(number)

    def num_places(self, end: int) -> int:
        """How many places of the data the numbers below `end` stand for."""
        return end - bisect_left(self._numbers, end)

    def known(self) -> dict[int, int]:
        """Retry's number -> the ticket it retries."""
        return dict(self._dead_of)
