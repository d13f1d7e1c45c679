"""On-policy distillation: does a small student match its teacher on the quickstart's task within three minutes?

    correct answers ─► streamrl sft ─► teacher, 0.7M ────────┐
    careless ones ───► streamrl sft ─► student, 0.3M ─► streamrl up ─► both graded greedily on held-out prompts

Rewards are monitored, not trained on. The time is the whole run's, including start and export. Blocks on processes.
"""

from __future__ import annotations

import json
import random
import time
from itertools import islice
from pathlib import Path

from bench.measure import Say
from bench.report import Bar, Fact, Line
from streamrl.demos.quickstart import Size, examples, write_base_model, write_data
from streamrl.demos.run import program, run_all, write_rows
from streamrl.held_folders import scratch_folder
from streamrl.ops.launch.processes import Command

_STUDENT = Size(hidden=96, heads=3, inner=192)  # 0.28M
_SEED = 1
_NUM_SHOWN, _NUM_SHOWN_QUICK = 64_000, 8_000
_STEPS, _STEPS_QUICK = 100, 20
_MAX_TOKENS = 12


def bench(*, quick: bool, say: Say) -> list[Line]:
    with scratch_folder() as folder:
        write_data(folder / "data", seed=_SEED)
        _write_right_answers(folder / "data", _NUM_SHOWN_QUICK if quick else _NUM_SHOWN)
        write_base_model(folder / "teacher-base", seed=_SEED)
        write_base_model(folder / "student-base", seed=_SEED, of=_STUDENT)
        run_all([_sft(folder, "teacher", "right"), _sft(folder, "student", "demonstrations")], say)
        before, teacher = (accuracy(folder / name, folder / "data") for name in ("student", "teacher"))
        say(f"the student is right in {before:.3f}, the teacher in {teacher:.3f}")
        began = time.monotonic()
        run_all([_distil(folder, steps=_STEPS_QUICK if quick else _STEPS)], say)
        took_s = time.monotonic() - began
        after = accuracy(folder / "runs" / "distillation" / "export", folder / "data")
        kl = [
            json.loads(line) for line in (folder / "runs" / "distillation" / "metrics.jsonl").read_text().splitlines()
        ]
    away = [one["loss/teacher_kl"] for one in kl if "loss/teacher_kl" in one]
    return [
        Bar(name="short of the teacher", value=teacher - after, unit="", goal=0.05, better="lower"),
        Bar(name="whole run", value=took_s, unit="s", goal=180.0, better="lower"),
        Fact(name="teacher: right on held-out prompts", value=teacher, unit=""),
        Fact(name="student before", value=before, unit=""),
        Fact(name="student after", value=after, unit=""),
        Fact(name="reverse KL, first step", value=away[0], unit="nats a token"),
        Fact(name="reverse KL, last ten steps", value=sum(away[-10:]) / len(away[-10:]), unit="nats a token"),
    ]


def _write_right_answers(folder: Path, count: int) -> None:
    """Write correct demonstrations of prompts that are not held out."""
    held_out = {json.loads(line)["prompt"] for line in (folder / "validation.jsonl").open()}
    shown = (one for one in examples(random.Random(_SEED + 1)) if one.prompt not in held_out)
    write_rows(
        folder / "right.jsonl", ({"prompt": one.prompt, "completion": one.answer} for one in islice(shown, count))
    )


def _sft(folder: Path, name: str, data: str) -> Command:
    options = {
        "--model": folder / f"{name}-base",
        "--data": folder / "data" / f"{data}.jsonl",
        "--output": folder / name,
        "--lr": 2e-3,
        "--batch-size": 64,
        "--threads": 1,
    }
    return program(name, ["-m", "streamrl.ops.cli.main", "sft"], options, logs=folder / "logs")


def _distil(folder: Path, *, steps: int) -> Command:
    settings = [
        "extends=recipes/distillation.yaml",
        f"dir={folder / 'runs'}",
        "name=distillation",
        f"model.path={folder / 'student'}",
        f"data.train={folder / 'data' / 'train.jsonl'}",
        f"data.validation={folder / 'data' / 'validation.jsonl'}",
        f"teacher.path={folder / 'teacher'}",
        "rewards.model=null",
        "reward_server=null",
        "sampling.num_samples=4",
        "training.groups_per_step=40",
        f"training.max_steps={steps}",
        "optimizer.lr=3e-4",
        "optimizer.min_lr=3e-5",
        "validation.every_steps=0",
        "checkpoint.every_steps=100",
    ]
    words = ["-m", "streamrl.ops.cli.main", "up", "quickstart.yaml", *settings]
    return program("distillation", words, {}, logs=folder / "logs")


def accuracy(model_folder: Path, data: Path) -> float:
    """Return the accuracy of greedy answers on held-out prompts, using plain transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (data / "validation.jsonl").read_text().splitlines()]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=_MAX_TOKENS, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(made, skip_special_tokens=True)
    return sum(text == row["answer"] for text, row in zip(answers, rows, strict=True)) / len(rows)
