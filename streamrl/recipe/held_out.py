"""Statistics of answers to held-out prompts: pass@k, majority vote, and the confidence interval of a share.

pass@k      1 - C(n - c, k) / C(n, k) for a prompt with n samples of which c pass: the chance that one of k passes,
            unbiased (Chen et al. 2021, arXiv 2107.03374); averaged over the prompts with at least k samples, since
            some samples may have failed
majority    the most frequent answer to a prompt passes; several that are equally frequent count by their shares (Wang
            et al. 2022, arXiv 2203.11171); a sample without an answer has no vote
interval    Wilson's score interval of 95 % over prompts, since samples of one prompt are correlated. It assumes that
            each prompt is right or wrong, and so is a little wide where a prompt's own share lies between
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HALF_CHARACTER = "\ufffd"  # what tokenizers decode a character to whose last bytes are in the next token
_Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
_SEARCH_S = 0.5  # for the answer in one text; of the process's CPU time
_MOST_LATE = 20  # texts
_TOO_SLOW = (
    f"validation.answer: searching one text took more than {_SEARCH_S:g} s, which counts as no answer; after "
    f"{_MOST_LATE} such texts no more are searched. Does the pattern nest repetitions, such as (x+)*?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSample:
    """The verdict on one sample."""

    passed: bool
    answer: str | None = None  # None: it gave none, or answers are not extracted


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """The mean pass@k of some prompts."""

    share: float
    num_prompts: int  # those with at least k samples


def pass_at(k: int, *, num_samples: int, num_passed: int) -> float:
    assert 1 <= k <= num_samples, "k must not exceed the number of samples"
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def passes(prompts: Sequence[Sequence[JudgedSample]], *, num_samples: int) -> dict[int, Passing]:
    """Return pass@k for k = 1, 2, 4, ... up to `num_samples`, which were asked for, that number included; without the k
    for which no prompt has enough samples."""
    counts = [(len(samples), sum(one.passed for one in samples)) for samples in prompts]
    found = {}
    for k in numbers_of_samples(num_samples):
        shares = [pass_at(k, num_samples=n, num_passed=c) for n, c in counts if n >= k]
        if shares:
            found[k] = Passing(share=fmean(shares), num_prompts=len(shares))
    return found


def numbers_of_samples(most: int) -> list[int]:
    """Return the reported k of pass@k: powers of two, and the largest."""
    powers = {1 << i for i in range(most.bit_length())}
    return sorted(k for k in {*powers, most} if 1 <= k <= most)


def majority(prompts: Sequence[Sequence[JudgedSample]]) -> float | None:
    """Return the share of prompts whose majority answer passes; None without prompts."""
    return fmean(map(_majority_of, prompts)) if prompts else None


def _majority_of(samples: Sequence[JudgedSample]) -> float:
    votes = Counter(one.answer for one in samples if one.answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    voted = [one.passed for one in samples if one.answer is not None and votes[one.answer] == most]
    return fmean(voted)


def wilson(share: float, num_prompts: int) -> tuple[float, float]:
    """Return the interval's bounds, which are never on the wrong side of the share, as rounding would have them."""
    assert num_prompts > 0, "there are no prompts"
    square = _Z * _Z / num_prompts
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(share * (1 - share) / num_prompts + square / (4 * num_prompts))
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def mean_over_prompts(prompts: Iterable[Sequence[float]]) -> float | None:
    """Return the mean of the prompts' own means, so that one with failed samples counts no less than others; those
    without values are left out. None if all are."""
    means = [fmean(values) for values in prompts if values]
    return fmean(means) if means else None


def rewards_by_source(prompts: Sequence[Sequence[Sampled]]) -> dict[str, float]:
    """Return each source's mean over prompts, of the samples that it applies to."""
    sources = sorted({source for samples in prompts for one in samples for source in one.rewards})
    found = {}
    for source in sources:
        mean = mean_over_prompts([s.rewards[source] for s in samples if source in s.rewards] for samples in prompts)
        assert mean is not None, "some sample has the source"
        found[source] = mean
    return found


class Sampled(Protocol):
    """A sample, as a group holds it."""

    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...  # [T]

    @property
    def rewards(self) -> Mapping[str, float]: ...  # by source


def judge_samples(
    samples: Sequence[Sampled],
    *,
    by: str,
    at_least: float,
    search: AnswerSearch | None,
    stop: Sequence[str],
    decode: Callable[[list[int]], str],
) -> list[JudgedSample]:
    """Judge one prompt's samples. A sample to which the source does not apply does not pass."""
    return [
        JudgedSample(
            passed=one.rewards.get(by, -math.inf) >= at_least,
            answer=None if search is None else search(completion_of(one.token_ids.tolist(), stop, decode)),
        )
        for one in samples
    ]


def completion_of(token_ids: list[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> str:
    """Return the text as rewards read it: without the stop string that ended it, which its last token completed."""
    text = decode(token_ids)
    num_before = len(decode(token_ids[:-1]).rstrip(HALF_CHARACTER)) if stop else 0
    for one in stop:
        begin = text.find(one, max(0, num_before - len(one) + 1))
        if begin >= 0:
            return text[:begin]
    return text


class AnswerSearch:
    """Finds answers by a pattern of the user's (`validation.answer`), which may nest repetitions, and then take years
    on a text that a model wrote: each search has a limit, and after some that were too slow there are no more.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._num_late = 0

    def __call__(self, text: str) -> str | None:
        """Return the pattern's last match in the text, or its first group if it has one; None: there is none."""
        import regex  # lazy: slow to import, and most readers of this module search nothing. `re` has no time limit

        if self._num_late >= _MOST_LATE:
            return None
        try:
            found = list(regex.finditer(self._pattern, text, timeout=_SEARCH_S, concurrent=True))
        except TimeoutError:
            self._num_late += 1
            warnings.warn(_TOO_SLOW, RuntimeWarning, stacklevel=1)  # Python shows it once in a process
            return None
        if not found:
            return None
        held = found[-1][1] if found[-1].re.groups else found[-1][0]
        return None if held is None else held.strip()
