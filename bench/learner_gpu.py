"""The learner's step on a GPU: random models of 0.5 and 1.5 billion parameters in bf16, and long-tailed lengths.

Needs torch with CUDA and transformers, but neither vLLM nor a network. MFU counts useful operations only (see
`learner.model.policy`), relative to the vendor's figure for dense bf16. The bare step is forward and backward of the
same model on the same packed tokens, with the same attention and its own cross-entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bench import logprob_memory
from bench.long_tailed import Lengths, Size, make_config, make_groups, num_tokens
from bench.measure import Rounds, Say, seconds
from bench.report import Bar, Fact, Line
from bench.stepping import Stepping
from streamrl.errors import ResourceError
from streamrl.learner.metrics.gpu import peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    sizes: Mapping[str, Size]
    lengths: Lengths
    num_groups: int
    num_samples: int
    micro_batch_tokens: int
    num_rounds: int


SIZES = {
    "0.5B": Size(vocabulary=151_936, hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
    "1.5B": Size(vocabulary=151_936, hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2),
}
_LENGTHS = Lengths(prompt=(128, 384), median=700, spread=0.9, longest=8192)


def bench(*, quick: bool, say: Say) -> list[Line]:
    if not torch.cuda.is_available():
        raise ResourceError("this bench needs a GPU that torch can use; `python -m bench learner` does not")
    plan = Plan(
        sizes={"0.5B": SIZES["0.5B"]} if quick else SIZES,
        lengths=_LENGTHS,
        num_groups=8 if quick else 16,
        num_samples=8,
        micro_batch_tokens=16_384,
        num_rounds=3 if quick else 5,
    )
    return measure(plan, device=torch.device("cuda", 0), dtype="bfloat16", say=say)


def measure(plan: Plan, *, device: torch.device, dtype: str, say: Say) -> list[Line]:
    lines: list[Line] = []
    for name, size in plan.sizes.items():
        lines += _of_size(name, size, plan, device=device, dtype=dtype, say=say)
    if device.type == "cuda":
        naive, ours = (
            logprob_memory.run(way, num_tokens=logprob_memory.NUM_TOKENS, device=device) for way in ("naive", "ours")
        )
        lines.append(
            Bar(
                name="memory of log-probs / naive, vocabulary 131,072",
                value=ours / naive,
                unit="x",
                goal=0.25,
                better="lower",
            )
        )
    return lines


def _of_size(name: str, size: Size, plan: Plan, *, device: torch.device, dtype: str, say: Say) -> list[Line]:
    config = make_config(micro_batch_tokens=plan.micro_batch_tokens, dtype=dtype, attention="varlen")
    checkpointing = config.model.model_copy(update={"gradient_checkpointing": True})  # two models have to fit
    config = config.model_copy(update={"model": checkpointing})
    longest = plan.lengths.longest + plan.lengths.prompt[1]
    groups = make_groups(
        plan.num_groups, num_samples=plan.num_samples, lengths=plan.lengths, vocabulary=size.vocabulary
    )
    stepping = Stepping(size, config, max_length=longest, device=device)
    say(f"{name}: {num_tokens(groups):,} tokens a step")
    packed = stepping.pack(groups)
    for _ in range(2):  # kernel selection, memory layout, and AdamW's moments
        stepping.learn(groups)
    peak_gib = _peak_gib(stepping, groups, device)
    stepping.bare(packed)
    rounds = Rounds(
        {
            "bare": lambda: seconds(lambda: stepping.bare(packed)),
            "learner": lambda: seconds(lambda: stepping.learn(groups)),
        },
        num_rounds=plan.num_rounds,
        say=say,
    )
    flops = stepping.flops(groups) / rounds.median("learner")
    lines: list[Line] = [
        Bar(
            name=f"{name}: step / bare forward and backward",
            value=rounds.ratio("bare", "learner"),
            unit="x",
            goal=0.85,
            better="higher",
        ),
        Fact(name=f"{name}: useful tokens", value=num_tokens(groups) / rounds.median("learner"), unit="tokens/s"),
        Fact(name=f"{name}: TFLOP/s", value=flops / 1e12, unit="TFLOP/s"),
        Fact(name=f"{name}: peak memory of a step", value=peak_gib, unit="GiB"),
    ]
    peak = peak_flops(device)
    if peak is not None:
        lines.insert(0, Bar(name=f"{name}: MFU", value=flops / peak, unit="x", goal=0.45, better="higher"))
    return lines


def _peak_gib(stepping: Stepping, groups: list, device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    stepping.learn(groups)
    return torch.cuda.max_memory_allocated(device) / 2**30
