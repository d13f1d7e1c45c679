"""Ticket numbers: sets of them, and the place in the data that a number stands for.

Numbers count up from 0 in the order of issue. Nearly all stand for the next place in the data; now and then one is a
retry of a dead ticket, which takes the next number as well, and the places go on behind it:

    number   0  1  2  3        4  5           places go on behind a retry
    stands   0  1  2  retry 1  3  4           its place is that of the ticket that it repeats

So a number still says everything, given the retries so far. Pure: nothing here waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping


class NumberSet:
    """A set of numbers from 0 on, kept as disjoint ranges in order."""

    def __init__(self, ranges: tuple[tuple[int, int], ...] = ()) -> None:
        self._starts = [start for start, _ in ranges]
        self._ends = [end for _, end in ranges]
        self._size = sum(end - start for start, end in ranges)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        return self._size

    def add(self, number: int) -> None:
        assert number not in self, f"{number} is in the set already"
        at = bisect_right(self._starts, number)
        follows = at > 0 and self._ends[at - 1] == number
        precedes = at < len(self._starts) and self._starts[at] == number + 1
        if follows and precedes:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif follows:
            self._ends[at - 1] = number + 1
        elif precedes:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number + 1)
        self._size += 1

    def ranges(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self._starts, self._ends, strict=True))

    def gaps(self, end: int) -> Iterator[int]:
        """The numbers below `end` that are not in the set, in order."""
        reached = 0
        for start, stop in (*self.ranges(), (end, end)):
            yield from range(reached, min(start, end))
            reached = stop


class Retries:
    """Which tickets repeat a dead one, and what that means for the places of all."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        self._dead_of = dict(known or {})  # by the number of the retry
        self._numbers = sorted(self._dead_of)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, dead: int) -> None:
        assert number not in self._dead_of, f"ticket {number} is a retry already"
        assert 0 <= dead < number, f"ticket {number} cannot repeat ticket {dead}, which comes after it"
        self._dead_of[number] = dead
        insort(self._numbers, number)

    def dead_of(self, number: int) -> int | None:
        """The ticket that this one repeats, if it does."""
        return self._dead_of.get(number)

    def place(self, number: int) -> int:
        """How many tickets of the data come before the one that this number stands for."""
        while (dead := self._dead_of.get(number)) is not None:  # a retry may have died, and be repeated itself
            number = dead
        return number - bisect_left(self._numbers, number)

    def known(self) -> dict[int, int]:
        """By the number of the retry, the ticket that it repeats."""
        return dict(self._dead_of)
