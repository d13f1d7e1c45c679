"""The learner's benches on tiny shapes: they measure what they say, on any device."""

from __future__ import annotations

import numpy as np
import torch

from bench import logprob_memory
from bench.learner_gpu import Plan, measure
from bench.long_tailed import END, Lengths, Size, make_config, make_groups, num_tokens
from bench.measure import Say
from bench.report import Bar
from bench.stepping import Stepping

TINY = Size(vocabulary=97, hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1)
LENGTHS = Lengths(prompt=(3, 6), median=6, spread=1.0, longest=40)
CPU = torch.device("cpu")


def test_the_bench_for_gpus_runs_on_a_tiny_shape_without_one() -> None:
    plan = Plan(sizes={"tiny": TINY}, lengths=LENGTHS, num_groups=2, num_samples=4, micro_batch_tokens=64, num_rounds=1)
    lines = measure(plan, device=CPU, dtype="bfloat16", say=Say("learner-gpu"))
    assert [line.name for line in lines if isinstance(line, Bar)] == ["tiny: step / bare forward and backward"]
    assert all(np.isfinite(line.value) for line in lines)


def test_a_step_learns_and_a_bare_one_leaves_no_trace() -> None:
    stepping = Stepping(TINY, make_config(micro_batch_tokens=64, dtype="float32"), max_length=64, device=CPU)
    groups = make_groups(2, num_samples=4, lengths=LENGTHS, vocabulary=TINY.vocabulary)
    before = [p.detach().clone() for p in stepping.policy.parameters()]
    stepping.bare(stepping.pack(groups))
    assert all(torch.equal(p, old) for p, old in zip(stepping.policy.parameters(), before, strict=True))
    assert all(p.grad is None for p in stepping.policy.parameters())
    assert stepping.learn(groups).applied
    assert any(not torch.equal(p, old) for p, old in zip(stepping.policy.parameters(), before, strict=True))


def test_lengths_have_a_long_tail_and_every_response_ends() -> None:
    groups = make_groups(60, num_samples=8, lengths=LENGTHS, vocabulary=TINY.vocabulary)
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    assert max(lengths) == LENGTHS.longest > 4 * np.median(lengths)
    assert all(sample.token_ids[-1] == END for group in groups for sample in group.samples)
    prompts = sum(len(group.prompt_ids) * len(group.samples) for group in groups)
    assert num_tokens(groups) == prompts + sum(lengths)


def test_the_naive_way_is_seen_to_take_more_memory() -> None:
    naive, ours = (logprob_memory.run(way, num_tokens=256, device=CPU) for way in ("naive", "ours"))
    logits = 256 * logprob_memory.VOCABULARY * 4
    assert naive > 2 * logits
    assert ours < naive
