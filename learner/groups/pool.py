"""What is known of each prompt's reward spread, and the probability of drawing the prompt again.

A group contributes two counts: its samples, and how many of them missed its most frequent reward. So no threshold has
to say which reward counts as correct, and rewards that always differ change nothing:

    minority    samples with another reward than the most frequent one; 0 if the group taught nothing
    e           the chance that a sample is in the minority: unknown per prompt, Beta(a0, b0) over a dataset's prompts
    alike       the chance that all n samples of the next group get one reward

                E (1 - e)^n = prod_k<n (b + k) / (a + b + k)      a = a0 + minority,  b = b0 + samples - minority

                minority and samples are this prompt's, decayed by each pass since
    admission   the chance that eight groups in a row would each teach, E (1 - (1 - e)^n)^8, divided by the largest of
                all prompts. A new prompt has its dataset's chance, which is high where many fit, so it is tried

A dataset's Beta has the mean of its prompts' e, and the breadth that explains the share of prompts whose latest group
was alike. Where prompts resemble each other, one group tells little about its prompt; where they are solved or
hopeless, it tells everything. As knowledge of a prompt decays, a solved one is tried again, and a hopeless one gets its
next chance. Pure: no Redis, no disk, nothing that blocks.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.recipe.algorithms import num_alike

_DECAY = 0.9  # decay of the knowledge about a prompt, per pass
_MIN_ADMISSION = 1 / 64  # floor: every prompt is drawn eventually
_TINY = 1e-9  # below this a difference may be rounding only
_IN_A_ROW = 8  # required teaching groups: with 1, a prompt alike every other time would be drawn half as often
_MIN_OBSERVED = 4  # prompts of a dataset, or half of it, before its prior is fitted
_BREADTH = (0.02, 2000.0)  # bounds of a0 + b0: from prompts always or never alike, to identical prompts
_SEEN = np.dtype(
    [("row", "<i4"), ("at", "<i4"), ("samples", "<f8"), ("minority", "<f8"), ("reward", "<f8"), ("alike", "<f8")]
)
Chances = npt.NDArray[np.float64]  # of rows, or of states of knowledge
Rows = npt.NDArray[np.int32]
Number = TypeVar("Number", float, Chances)


class Pool:
    def __init__(self, datasets: Sequence[str], *, num_samples: int, packed: str = "") -> None:
        """`datasets` names the dataset of each row."""
        self._names = list(dict.fromkeys(datasets))
        numbers = {name: number for number, name in enumerate(self._names)}
        self._dataset_of = np.array([numbers[name] for name in datasets], dtype=np.int32)
        self._num_samples = num_samples
        self._seen = np.zeros(len(datasets), dtype=_SEEN)
        known = np.frombuffer(zlib.decompress(base64.b64decode(packed)) if packed else b"", dtype=_SEEN)
        self._seen[known["row"]] = known
        self.refit()

    def packed(self) -> str:
        """The pool's whole state, bit for bit."""
        known = self._seen[self._seen["samples"] > 0]
        return base64.b64encode(zlib.compress(known.tobytes(), 1)).decode()

    def observe(self, row: int, rewards: Sequence[float], *, at: int, informative: bool) -> None:
        """Add a group of a prompt that was drawn in pass `at`."""
        count, seen = len(rewards), self._seen[row]
        minority = count - num_alike(rewards) if informative else 0
        if not seen["samples"] or at >= seen["at"]:
            seen["alike"] = not informative
        latest = max(at, int(seen["at"]))
        before, now = _DECAY ** (latest - int(seen["at"])), _DECAY ** (latest - at)
        for name, value in (("samples", count), ("minority", minority), ("reward", sum(rewards))):
            seen[name] = seen[name] * before + value * now
        seen["row"], seen["at"] = row, latest

    def refit(self) -> None:
        """Fit each dataset's prior to everything known; later admissions use it."""
        seen, dataset_of = self._observed()
        self._priors = np.ones((len(self._names), 2))  # [datasets, (a0, b0)]
        self._known = np.zeros(len(self._names), dtype=np.bool_)
        sizes = np.bincount(self._dataset_of, minlength=len(self._names))
        for number, size in enumerate(sizes.tolist()):
            observed = seen[dataset_of == number]
            if len(observed) >= min(_MIN_OBSERVED, (size + 1) // 2) and self._num_samples > 1:
                self._known[number] = True
                self._priors[number] = _beta(observed, self._num_samples)
        self._admission: dict[int, Chances] = {}  # by pass

    def admission(self, at: int) -> Chances:
        """For each row, the chance that it is admitted as a candidate in this pass."""
        if at not in self._admission:
            seen, dataset_of, state_of = self._states()
            teach, known = _all_teach(self._alike(seen, dataset_of, at, times=_IN_A_ROW)), self._known[dataset_of]
            is_some_prompts = np.bincount(state_of, minlength=len(seen)) > 0
            chances = np.where(known, teach / teach[known & is_some_prompts].max(initial=_TINY), 1.0)
            self._admission = {at: np.maximum(_MIN_ADMISSION, chances)[state_of]}
        return self._admission[at]

    def census(self, at: int) -> Mapping[str, int]:
        """How many prompts are new, fitting, solved or hopeless.

        The next group of a solved or hopeless prompt is alike with a chance of at least one half; a solved one's reward
        is at least the mean over all drawn prompts, a hopeless one's is below.
        """
        seen, dataset_of = self._observed()
        means = np.divide(seen["reward"], seen["samples"])
        is_resting = self._alike(seen, dataset_of, at, times=1)[0] >= 0.5
        is_above_mean = means >= (means.mean() if len(means) else 0.0)
        return {
            "new": len(self._seen) - len(seen),
            "fitting": int((~is_resting).sum()),
            "solved": int((is_resting & is_above_mean).sum()),
            "hopeless": int((is_resting & ~is_above_mean).sum()),
        }

    def _observed(self) -> tuple[npt.NDArray[np.void], Rows]:
        is_observed = self._seen["samples"] > 0
        return self._seen[is_observed], self._dataset_of[is_observed]

    def _states(self) -> tuple[npt.NDArray[np.void], Rows, Rows]:
        """What is known, each state once: first one for the new prompts of each dataset, then each observed prompt's.

        With the states' datasets, and each row's state. So a million new prompts cost what one costs.
        """
        seen, dataset_of = self._observed()
        new = np.zeros(len(self._names), dtype=_SEEN)
        state_of = self._dataset_of.copy()
        state_of[self._seen["samples"] > 0] = np.arange(len(new), len(new) + len(seen))
        datasets = np.concatenate([np.arange(len(new), dtype=np.int32), dataset_of])
        return np.concatenate([new, seen]), datasets, state_of

    def _alike(self, seen: npt.NDArray[np.void], dataset_of: Rows, at: int, *, times: int) -> list[Chances]:
        """For each state, the chances that its next group is alike, that its next two are all one reward, and so on."""
        decay = _DECAY ** np.maximum(0, at - seen["at"])
        minority, samples = seen["minority"] * decay, seen["samples"] * decay
        a0, b0 = self._priors[dataset_of].T
        return _chances_of_alike(a0 + minority, b0 + samples - minority, self._num_samples, times=times)


def _all_teach(alike: list[Chances]) -> Chances:
    """The chance that all groups would teach, from the chances that one is alike, that two are, and so on."""
    terms: list[Chances] = [math.comb(len(alike), k) * (-1) ** k * chance for k, chance in enumerate(alike, 1)]
    return np.maximum(_TINY, 1 + sum(terms))


def _beta(seen: npt.NDArray[np.void], num_samples: int) -> tuple[float, float]:
    """(a0, b0) for the prompts of a dataset."""
    mean = max(float((seen["minority"] / seen["samples"]).mean()), 0.5 / (num_samples * len(seen)))
    share = (float(seen["alike"].sum()) + 0.5) / (len(seen) + 1)  # never 0 or 1
    low, high = _BREADTH
    for _ in range(20):  # bisection: the larger a0 + b0, the rarer are groups that are alike
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
