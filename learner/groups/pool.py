"""What is known of each prompt: how far its samples' rewards differed when it was last asked, and with what chance it
is asked again.

Of a group two numbers count: how many samples it has, and how many of them did not get the reward that most got. So no
bound has to say from where on a reward counts as right, and rewards that always differ leave everything as it is:

    minority    samples with another reward than the most frequent one; none where the group taught nothing
    e           the chance that a sample is one of them: unknown of each prompt, over a dataset's as Beta(a0, b0)
    alike       the chance that all n samples of the next group get one reward

                E (1 - e)^n = prod_k<n (b + k) / (a + b + k)      a = a0 + minority,  b = b0 + samples - minority

                minority and samples are this prompt's, faded by each pass since
    admission   the chance that eight groups in a row would each teach, E (1 - (1 - e)^n)^8, over the largest of all
                prompts. A new one has that of its dataset: high where many fit, though as many do not, so it is tried

The Beta is that of a dataset's prompts: its mean is that of their e, and it is as broad as needed for the share of them
whose latest group was alike. Where prompts are much like one another, a group says little of its prompt; where they are
solved or hopeless, it says all. As what is known of a prompt fades, a solved one comes back to be looked at, and a
hopeless one gets its next chance. Pure: no Redis, no disk, nothing that waits.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

_FADE = 0.9  # of what is known of a prompt, with each pass
_LEAST = 1 / 64  # nobody waits for ever
_TINY = 1e-9  # of small differences nothing but rounding may be left
_IN_A_ROW = 8  # groups that would each teach: with one, a prompt that is alike every other time is asked half as often
_ENOUGH = 4  # prompts of a dataset, or half of all, before anything is said of them
_BREADTH = (0.02, 2000.0)  # a0 + b0: each prompt is always alike, or never; each is like another
_SEEN = np.dtype(
    [("row", "<i4"), ("at", "<i4"), ("samples", "<f8"), ("minority", "<f8"), ("reward", "<f8"), ("alike", "<f8")]
)
Chances = npt.NDArray[np.float64]  # [rows]
Number = TypeVar("Number", float, Chances)


class Pool:
    def __init__(self, datasets: Sequence[str], *, num_samples: int, packed: str = "") -> None:
        """`datasets`: of each row."""
        self._names = list(dict.fromkeys(datasets))
        numbers = {name: number for number, name in enumerate(self._names)}
        self._dataset_of = np.array([numbers[name] for name in datasets], dtype=np.int32)
        self._num_samples = num_samples
        self._seen = np.zeros(len(datasets), dtype=_SEEN)
        known = np.frombuffer(zlib.decompress(base64.b64decode(packed)) if packed else b"", dtype=_SEEN)
        self._seen[known["row"]] = known
        self.refit()

    def packed(self) -> str:
        """All that is known, to the last bit."""
        known = self._seen[self._seen["samples"] > 0]
        return base64.b64encode(zlib.compress(known.tobytes(), 1)).decode()

    def observe(self, row: int, rewards: Sequence[float], *, at: int, teaches: bool) -> None:
        """A group ended that was asked for in this pass."""
        count, seen = len(rewards), self._seen[row]
        minority = count - max(Counter(rewards).values()) if teaches else 0
        if not seen["samples"] or at >= seen["at"]:
            seen["alike"] = not teaches
        latest = max(at, int(seen["at"]))
        before, now = _FADE ** (latest - int(seen["at"])), _FADE ** (latest - at)
        for name, value in (("samples", count), ("minority", minority), ("reward", sum(rewards))):
            seen[name] = seen[name] * before + value * now
        seen["row"], seen["at"] = row, latest

    def refit(self) -> None:
        """What the prompts of each dataset are like, by all that is known: admission goes by it from here on."""
        seen, dataset_of = self._asked()
        self._priors = np.ones((len(self._names), 2))  # [datasets, (a0, b0)]
        self._known = np.zeros(len(self._names), dtype=np.bool_)
        sizes = np.bincount(self._dataset_of, minlength=len(self._names))
        for number, size in enumerate(sizes.tolist()):
            of_it = seen[dataset_of == number]
            if len(of_it) >= min(_ENOUGH, (size + 1) // 2) and self._num_samples > 1:
                self._known[number] = True
                self._priors[number] = _beta(of_it, self._num_samples)
        self._admission: dict[int, Chances] = {}  # by pass

    def admission(self, at: int) -> Chances:
        """Of each row, the chance with which it is asked where it is a candidate in this pass."""
        if at not in self._admission:
            teach, known = _all_teach(self._alike(at, times=_IN_A_ROW)), self._known[self._dataset_of]
            chances = np.where(known, teach / teach[known].max(initial=_TINY), 1.0)
            self._admission = {at: np.maximum(_LEAST, chances)}
        return self._admission[at]

    def census(self, at: int) -> Mapping[str, int]:
        """How many prompts were never asked, fit, are solved or hopeless: of the latter two the next group is alike as
        likely as not, and their reward is at least the mean of all that were asked, or less."""
        seen, _ = self._asked()
        means = np.divide(seen["reward"], seen["samples"])
        rests = self._alike(at, times=1)[0][self._seen["samples"] > 0] >= 0.5
        above = means >= (means.mean() if len(means) else 0.0)
        return {
            "new": len(self._seen) - len(seen),
            "fitting": int((~rests).sum()),
            "solved": int((rests & above).sum()),
            "hopeless": int((rests & ~above).sum()),
        }

    def _asked(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32]]:
        asked = self._seen["samples"] > 0
        return self._seen[asked], self._dataset_of[asked]

    def _alike(self, at: int, *, times: int) -> list[Chances]:
        """Of each row, the chances that its next group is alike, that its next two are all one, and so on."""
        kept = _FADE ** np.maximum(0, at - self._seen["at"])
        minority, samples = self._seen["minority"] * kept, self._seen["samples"] * kept
        a0, b0 = self._priors[self._dataset_of].T
        return _chances_of_alike(a0 + minority, b0 + samples - minority, self._num_samples, times=times)


def _all_teach(alike: list[Chances]) -> Chances:
    """The chance that so many groups would each teach, by the chances that one is alike, that two are, and so on."""
    terms: list[Chances] = [math.comb(len(alike), k) * (-1) ** k * chance for k, chance in enumerate(alike, 1)]
    return np.maximum(_TINY, 1 + sum(terms))


def _beta(seen: npt.NDArray[np.void], num_samples: int) -> tuple[float, float]:
    """(a0, b0) for the prompts of a dataset."""
    mean = max(float((seen["minority"] / seen["samples"]).mean()), 0.5 / (num_samples * len(seen)))
    share = (float(seen["alike"].sum()) + 0.5) / (len(seen) + 1)  # never all, never none
    low, high = _BREADTH
    for _ in range(20):  # the more prompts are like one another, the rarer are groups that are alike
        middle = (low * high) ** 0.5
        [alike] = _chances_of_alike(middle * mean, middle * (1 - mean), num_samples, times=1)
        low, high = (middle, high) if alike > share else (low, middle)
    return high * mean, high * (1 - mean)


def _chances_of_alike(a: Number, b: Number, num_samples: int, *, times: int) -> list[Number]:
    found = []
    chance = b / (a + b)
    for k in range(1, times * num_samples + 1):
        if k % num_samples == 0:
            found.append(chance)
        chance = chance * (b + k) / (a + b + k)
    return found
