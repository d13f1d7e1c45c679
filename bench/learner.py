"""The learner's step on a CPU: a 20M-parameter model, and responses of very different lengths.

    bare forward and backward ─┐
    the learner's whole step  ─┼─ interleaved, on the same samples      useful tokens per second, as ratios
    TRL's RLOO learning step  ─┘

Also: the memory of logprobs at a vocabulary of 131,072, each implementation in its own process; and the fraction of its
time that a learner waits, fetches and verifies when groups are plentiful, with the real stream and simulated workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from bench import logprob_memory
from bench.answering import VOCABULARY as STREAMED_VOCABULARY
from bench.answering import Shape, Team, answer_tickets, in_background
from bench.learning import Learning
from bench.long_tailed import Lengths, Size, make_config, make_groups, num_tokens
from bench.measure import Rounds, Say, seconds
from bench.peer_trl import running
from bench.report import Bar, Fact, Line
from bench.stepping import Stepping
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.wire.group import Group

SIZE = Size(vocabulary=16_384, hidden=384, intermediate=1024, layers=9, heads=6, kv_heads=2)  # 20M
_STREAMED_SIZE = Size(vocabulary=STREAMED_VOCABULARY, hidden=384, intermediate=1024, layers=5, heads=6, kv_heads=2)
LENGTHS = Lengths(prompt=(24, 64), median=48, spread=1.0, longest=512)
MAX_LENGTH = 1024
MICRO_BATCH_TOKENS = 2048
_CPU = torch.device("cpu")
_ANSWERS = Shape(num_samples=8, num_tokens=64)


def bench(*, quick: bool, say: Say) -> list[Line]:
    torch.set_num_threads(1)
    groups = make_groups(2 if quick else 4, num_samples=8, lengths=LENGTHS, vocabulary=SIZE.vocabulary)
    lines = _step(groups, quick=quick, say=say)
    say("memory of log-probs")
    lines += _memory()
    say("a learner with plenty of groups")
    lines.append(_waiting(num_steps=3 if quick else 10))
    return lines


def _step(groups: Sequence[Group], *, quick: bool, say: Say) -> list[Line]:
    stepping = Stepping(
        SIZE, make_config(micro_batch_tokens=MICRO_BATCH_TOKENS, dtype="float32"), max_length=MAX_LENGTH, device=_CPU
    )
    packed = stepping.pack(groups)
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: seconds(lambda: stepping.bare(packed)),
        "learner": lambda: seconds(lambda: stepping.learn(groups)),
    }
    stepping.learn(groups)  # AdamW allocates its moments in the first step
    stepping.bare(packed)  # creates its model in the first pass
    with ExitStack() as stack:
        if not quick:
            folder = stack.enter_context(scratch_folder())
            trl = stack.enter_context(running(groups, SIZE, max_length=MAX_LENGTH, folder=folder, say=say))
            say(f"TRL {trl.version}")
            trl.step()
            ways["TRL"] = trl.step
        rounds = Rounds(ways, num_rounds=3 if quick else 5, say=say)
    tokens = num_tokens(groups)
    lines: list[Line] = [
        Bar(
            name="step / bare forward and backward",
            value=rounds.ratio("bare", "learner"),
            unit="x",
            goal=0.85,
            better="higher",
        ),
        Fact(name="useful tokens", value=tokens / rounds.median("learner"), unit="tokens/s"),
        Fact(
            name="TFLOP/s of the step", value=stepping.flops(groups) / rounds.median("learner") / 1e12, unit="TFLOP/s"
        ),
        Fact(name="share of cells in rows that are used", value=_used(groups, packed), unit="x"),
    ]
    if quick:
        say("TRL is skipped with --quick")
    else:
        lines.insert(
            1,
            Bar(
                name="step / TRL's RLOO step", value=rounds.ratio("TRL", "learner"), unit="x", goal=2.0, better="higher"
            ),
        )
    return lines


def _used(groups: Sequence[Group], packed: Sequence[MicroBatch]) -> float:
    cells = sum(batch.input_ids.numel() for batch in packed)
    once = sum(g.header.num_prompt_tokens + sum(n - 1 for n in g.header.sample_lengths) for g in groups)
    return once / cells


def _memory() -> list[Line]:
    naive, ours = (logprob_memory.measure(way) for way in ("naive", "ours"))
    return [
        Bar(
            name="memory of log-probs / naive, vocabulary 131,072",
            value=ours / naive,
            unit="x",
            goal=0.25,
            better="lower",
        ),
        Fact(name=f"memory of {logprob_memory.NUM_TOKENS} log-probs", value=ours / 2**20, unit="MiB"),
    ]


def _waiting(*, num_steps: int) -> Line:
    config = make_config(micro_batch_tokens=MICRO_BATCH_TOKENS, dtype="float32")
    stepping = Stepping(_STREAMED_SIZE, config, max_length=MAX_LENGTH, device=_CPU)
    learning_s = 0.0

    def learn(groups: Sequence[Group]) -> None:
        nonlocal learning_s
        learning_s += seconds(lambda: stepping.learn(groups))

    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder) as server,
        connect(server.url, schema.Redis()) as client,
        in_background(answer_tickets, Team(url=server.url, run="bench", shape=_ANSWERS)),
    ):
        learning = Learning(client, "bench", shape=_ANSWERS, groups_per_step=4, commit_every=10)
        learning.step(learn)  # fill the queues
        learning_s, began = 0.0, time.perf_counter()
        for _ in range(num_steps):
            learning.step(learn)
        share = 1 - learning_s / (time.perf_counter() - began)
    return Bar(name="share of a learner's time beside the step", value=100 * share, unit="%", goal=5.0, better="lower")
