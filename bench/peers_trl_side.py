"""TRL as a process: its settings for two cores, and the resulting command.

    python -m bench peers-trl    measures the cost of each alternative

Chosen: two processes of one thread each (TRL's own data parallelism, over gloo), each with its half of a step as one
micro-batch, fp32. Two threads of one process synchronise at every operation of a small model, and wait long when the
machine has other load; two processes synchronise once per step, and each pads only to the longest answer in its half.

Fixed: no gradient checkpointing, no reference model (`beta` 0), no evaluation and no checkpoints, one pass over the
generated samples (`num_iterations` 1, `steps_per_generation` as many as make a step), transformers' KV cache. Its
trainer has no padding-free mode and disables compiling generate. With TRL 1.16 and vLLM 0.32, `use_vllm` starts on a
CPU but fails at the first weight update, because vLLM has packed its layers by then and cannot load into them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.peers_curve import TRL_STEPS
from bench.peers_grades import TRL_SNAPSHOTS
from bench.peers_terms import NUM_CORES, Terms
from bench.report import Fact
from streamrl.ops.launch.processes import Command

_SCRIPT = Path(__file__).with_name("peers_trl.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """TRL's settings that affect its speed but not its results."""

    processes: int = NUM_CORES
    threads: int = 1  # per process
    micro_batches: int = 1  # per process and step
    bf16: bool = False
    continuous_batching: bool = False  # transformers' own

    def facts(self, terms: Terms) -> list[Fact]:
        return [
            Fact(name="TRL's processes (see peers-trl)", value=self.processes, unit=""),
            Fact(name="TRL's threads of a process", value=self.threads, unit=""),
            Fact(name="TRL's micro-batch", value=self.micro_batch(terms), unit="sequences"),
        ]

    def micro_batch(self, terms: Terms) -> int:
        return terms.samples_per_step // self.processes // self.micro_batches


BEST = Settings()


def trl_command(python: Path, settings: Settings, terms: Terms, prompts: Path, folder: Path, seed: int) -> Command:
    task = {
        "model": str(terms.model),
        "prompts": str(prompts),
        "steps": str(folder / TRL_STEPS),
        "snapshots": str(folder / TRL_SNAPSHOTS),
        "snapshot_every": terms.snapshot_every,
        "output": str(folder / "output"),
        "samples_per_step": terms.samples_per_step,
        "num_samples": terms.num_samples,
        "max_tokens": terms.longest,
        "reward": str(terms.reward),
        "lr": terms.lr,
        "betas": terms.betas,
        "clip_norm": terms.clip_norm,
        "max_steps": terms.max_steps,
        "seed": seed,
        "processes": settings.processes,
        "threads": settings.threads,
        "micro_batch": settings.micro_batch(terms),
        "micro_batches": settings.micro_batches,
        "bf16": settings.bf16,
        "continuous_batching": settings.continuous_batching,
    }
    (folder / "task.json").write_text(json.dumps(task))
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": "", "WANDB_DISABLED": "true"}
    several = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.processes))
    launched = several if settings.processes > 1 else ()
    return Command(
        name="trl",
        arguments=(str(python), "-W", "ignore", *launched, str(_SCRIPT), str(folder / "task.json")),
        log=folder / "trl.log",
        environment={**quiet, "OMP_NUM_THREADS": str(settings.threads), "TOKENIZERS_PARALLELISM": "false"},
    )
