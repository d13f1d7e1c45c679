"""The learner's step with compiled layers (`model.compile`) and without, interleaved on the same samples.

A 20M-parameter model on one thread, responses of very different lengths, whole steps as the loop runs them. The first
step of both starts from the same weights, and the norms of its gradients are compared. (Not the losses: these are small
sums of large terms.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bench.learner import LENGTHS, MAX_LENGTH, MICRO_BATCH_TOKENS, SIZE
from bench.long_tailed import make_config, make_groups, num_tokens
from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from bench.stepping import Stepping
from streamrl.learner.objective.optimizer import Update
from streamrl.protocol.wire.group import Group

_APART = {"float32": 1e-5, "bfloat16": 2**-8}  # relative, of the first gradient's norm; one bf16 rounding
_AS_FAST = 1.0


def bench(*, quick: bool, say: Say) -> list[Line]:
    torch.set_num_threads(1)
    groups = make_groups(2 if quick else 4, num_samples=8, lengths=LENGTHS, vocabulary=SIZE.vocabulary)
    dtypes = ["float32"] if quick else list(_APART)
    return [line for dtype in dtypes for line in _of(dtype, groups, num_rounds=3 if quick else 7, say=say)]


def _of(dtype: str, groups: Sequence[Group], *, num_rounds: int, say: Say) -> Iterator[Line]:
    plain, compiled = (_stepping(dtype, is_compiled=is_compiled) for is_compiled in (False, True))
    first = plain.learn(groups)
    firsts: list[Update] = []
    waited_s = seconds(lambda: firsts.append(compiled.learn(groups)))
    say(f"{dtype}: the first step, with its compiling, took {waited_s:.1f} s")
    ways = {
        "as it is": lambda: seconds(lambda: plain.learn(groups)),
        "compiled": lambda: seconds(lambda: compiled.learn(groups)),
    }
    rounds = Rounds(ways, num_rounds=num_rounds, say=say)
    apart = abs(firsts[0].grad_norm / first.grad_norm - 1)
    speed, tokens = rounds.ratio("as it is", "compiled"), num_tokens(groups)
    yield Bar(
        name=f"{dtype}: gradient of the first step, apart", value=apart, unit="x", goal=_APART[dtype], better="lower"
    )
    yield Bar(name=f"{dtype}: steps compiled / as they are", value=speed, unit="x", goal=_AS_FAST, better="higher")
    yield Fact(name=f"{dtype}: compiled", value=tokens / rounds.median("compiled"), unit="tokens/s")
    yield Fact(name=f"{dtype}: as it is", value=tokens / rounds.median("as it is"), unit="tokens/s")
    yield Fact(name=f"{dtype}: first step, compiling", value=waited_s, unit="s")


def _stepping(dtype: str, *, is_compiled: bool) -> Stepping:
    config = make_config(micro_batch_tokens=MICRO_BATCH_TOKENS, dtype=dtype)
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": is_compiled})})
    return Stepping(SIZE, config, max_length=MAX_LENGTH, device=torch.device("cpu"))
