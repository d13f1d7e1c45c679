"""TRL's side of the peers: `python peers_trl.py TASK.json`, in TRL's own environment, alone or under torchrun.

Calls its RLOO trainer as any user would. Appends one line per step to the task's steps file, after a first line with
the time at which training began, and saves the weights every few steps. Imports nothing of streamrl; the reward is a
plain module.
"""

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl


class Steps(transformers.TrainerCallback):
    """Records the result of each step for the observing process, and saves weights for grading them later."""

    def __init__(self, path: str, *, num_samples: int, snapshots: str, snapshot_every: int) -> None:
        self._path, self._num_samples = path, num_samples
        self._snapshots, self._snapshot_every = Path(snapshots), snapshot_every

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._write({"began": time.time()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if state.is_world_process_zero and "reward" in logs:  # the mean over all processes
            tokens = round(logs["completions/mean_length"] * self._num_samples)
            line = {"step": state.global_step, "at": time.time(), "reward": logs["reward"]}
            self._write({**line, "num_samples": self._num_samples, "num_tokens": tokens})

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step % self._snapshot_every == 0:
            unfinished = self._snapshots / "unfinished"
            getattr(model, "module", model).save_pretrained(unfinished)
            unfinished.rename(self._snapshots / str(state.global_step))

    def _write(self, line: dict[str, float]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def scored_by(module: str) -> Callable[..., list[float]]:
    """Wrap the reward function for TRL, which passes prompt columns by name; these tasks only have `answer`."""
    reward = runpy.run_path(module)["reward"]

    def rewards(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str] | None = None,
        **_: Any,
    ) -> list[float]:
        rows = zip(prompts, completions, completion_ids, answer or [""] * len(prompts), strict=True)
        return [reward(prompt, completion, ids, {"answer": right}) for prompt, completion, ids, right in rows]

    return rewards


def make_trainer(task: dict[str, Any]) -> trl.RLOOTrainer:
    torch.set_num_threads(task["threads"])
    with open(task["prompts"]) as file:
        prompts = [json.loads(line) for line in file]
    settings = trl.RLOOConfig(
        output_dir=task["output"],
        per_device_train_batch_size=task["micro_batch"],
        gradient_accumulation_steps=task["micro_batches"],
        num_generations=task["num_samples"],
        max_completion_length=task["max_tokens"],
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        weight_decay=0.0,
        max_grad_norm=task["clip_norm"],
        max_steps=task["max_steps"],
        shuffle_dataset=False,
        seed=task["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=task["bf16"],
        use_transformers_continuous_batching=task["continuous_batching"],
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if task["processes"] > 1 else None,
        ddp_find_unused_parameters=False,
    )
    return trl.RLOOTrainer(
        model=task["model"],
        reward_funcs=scored_by(task["reward"]),
        args=settings,
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[
            Steps(
                task["steps"],
                num_samples=task["samples_per_step"],
                snapshots=task["snapshots"],
                snapshot_every=task["snapshot_every"],
            )
        ],
    )


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    make_trainer(task).train()


if __name__ == "__main__":
    main()
