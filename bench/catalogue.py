"""The benches by name. Each is imported only when it runs, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple, Protocol

from bench.measure import Say
from bench.report import Line


class Bench(Protocol):
    def __call__(self, *, quick: bool, say: Say) -> list[Line]: ...


class Entry(NamedTuple):
    target: str  # module:function
    help: str  # its line in `python -m bench --help`

    def load(self) -> Bench:
        module, _, function = self.target.partition(":")
        bench: Bench = getattr(import_module(module), function)
        return bench


BENCHES: Mapping[str, Entry] = {
    "transport": Entry("bench.transport:bench", "Tickets and groups through Redis: speed, growth, reclaiming."),
    "weights": Entry("bench.weights:bench", "Weight deltas: size, speed, catching up, into vLLM, and corrupted ones."),
    "fanout": Entry("bench.fanout:bench", "A version to 64 workers on 8 hosts: what leaves Redis, and how late it is."),
    "adapters": Entry("bench.adapters:bench", "Adapters published alone and merged by workers, against all weights."),
    "proofs": Entry("bench.proofs:bench", "The proofs of a load: false alarms, faults found, and cost."),
    "memory": Entry("bench.memory:bench", "The learner's GPU memory: the planner's closed form against its own code."),
    "loading": Entry("bench.loading:bench", "Peak memory of a rank while it loads a mixture of experts."),
    "learner": Entry("bench.learner:bench", "The learner's step against bare passes and against TRL."),
    "learner-gpu": Entry("bench.learner_gpu:bench", "The same on a GPU, for models of 0.5 and 1.5B parameters."),
    "compile": Entry("bench.compiled:bench", "The learner's step with compiled layers against the same without."),
    "checkpoint": Entry("bench.checkpoint:bench", "What the loop waits for at a checkpoint, against a bare copy."),
    "worker": Entry("bench.worker:bench", "A worker's whole path against bare vLLM, with updates and without."),
    "environments": Entry("bench.environments:bench", "Turns through sessions: their cost, the cache, pauses."),
    "reward": Entry("bench.reward:bench", "The reward server against bare forward passes of its model."),
    "sandbox": Entry("bench.sandbox:bench", "Programs in sandboxes: speed, and the share of the cores left to others."),
    "scale": Entry("bench.scale:bench", "1 to 2,000 simulated workers on a real Redis, and 10,000 GPUs on paper."),
    "async": Entry("bench.async_gain:bench", "Asynchronous against synchronous, on simulated latencies."),
    "staleness": Entry("bench.staleness:bench", "Each loss on stale samples: reward at lag 0 to 32."),
    "stale-llm": Entry("bench.stale_pretrained:bench", "The same for SmolLM2-135M on vLLM: three hours, resumable."),
    "distillation": Entry("bench.distillation:bench", "A small student on the quickstart's task, and its teacher."),
    "curriculum": Entry("bench.curriculum:bench", "What a curriculum saves: tokens to 0.9, on mixed prompts."),
    "whole": Entry("bench.whole:bench", "A whole run against bare vLLM and bare passes for its tokens."),
    "start": Entry("bench.start:bench", "The quickstart up to its first sample, against another commit."),
    "routes": Entry("bench.routes:bench", "Routing replay on a tiny mixture in bf16: routes, and log-probs."),
    "peers": Entry("bench.peers:bench", "A whole run against TRL's RLOO trainer: accuracy by time, speed, memory."),
    "peers-trl": Entry("bench.peers_tune:bench", "TRL's speed on two cores under several settings."),
    "monitor": Entry("bench.monitor:bench", "Watching a run: top, the page, status, and what it costs Redis."),
    "house": Entry(
        "bench.house:bench", "The code itself: the way from a ticket to its gradient, sizes, cycles, types."
    ),
    "watchers": Entry("bench.watchers:bench", "A run's steps under a hundred monitors, and when all are killed."),
}
