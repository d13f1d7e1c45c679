"""TRL's RLOO trainer on given samples: `python trl_steps.py TASK.json`, in TRL's own environment.

Each line on stdin runs one learning step and prints its seconds as a line on stdout: all that the trainer does once it
has samples (logprobs of the sampling policy, rewards, advantages, loss, backward, clip) for all its micro-batches, and
AdamW. Only generation is replaced by the given samples. Imports nothing of streamrl.
"""

import json
import sys
import time
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

_MICRO_BATCH = 8  # sequences: TRL's own default


class GivenSamples(trl.RLOOTrainer):
    """The trainer, with samples generated elsewhere."""

    task: Any

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return self.task["prompts"], None, {}

    def _generate_single_turn(self, *_: Any) -> list[list[int]]:
        return self.task["responses"]


def make_tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    words = {f"t{i}": i for i in range(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t2"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1")


def make_trainer(task: dict[str, Any]) -> GivenSamples:
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**task["config"]))
    num_samples = len(task["responses"])
    settings = trl.RLOOConfig(
        output_dir=task["output"],
        per_device_train_batch_size=_MICRO_BATCH,
        gradient_accumulation_steps=num_samples // _MICRO_BATCH,
        num_generations=task["num_samples"],
        beta=0.0,
        learning_rate=1e-6,
        report_to=[],
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
    )
    trainer = GivenSamples(
        model=model,
        reward_funcs=lambda completions, **_: task["rewards"],
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": [f"t{i % 100}" for i in range(num_samples)]}),
        processing_class=make_tokenizer(task["vocabulary"]),
    )
    trainer.task = task
    trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps
    trainer.create_optimizer()
    return trainer


def step(trainer: GivenSamples) -> float:
    began = time.perf_counter()
    trainer.model.train()
    inputs = [{"prompt": f"t{i % 100}"} for i in range(len(trainer.task["responses"]))]
    for _ in range(trainer.args.gradient_accumulation_steps):
        trainer.training_step(trainer.model, inputs, None)
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.model.zero_grad()
    return time.perf_counter() - began


def main() -> None:
    torch.set_num_threads(1)
    with open(sys.argv[1]) as file:
        trainer = make_trainer(json.load(file))
    print(json.dumps({"trl": trl.__version__}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"seconds": step(trainer)}), flush=True)


if __name__ == "__main__":
    main()
