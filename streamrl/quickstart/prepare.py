"""What the quickstart needs before its run: data, an untrained model, the warmed-up model, and a reward model.

    data ─► base model ─┬─► python -m learner.sft      ─► sft/           the start of the run, "before"
                        └─► streamrl reward train      ─► reward-model/  at the same time, on the other core

Everything is made in the run's folder, from the seed. Takes half a minute; blocks on the two processes, whose last line
is shown while they work.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from streamrl.errors import ConfigError, PartError
from streamrl.launch.processes import Command, Process, end_all
from streamrl.quickstart.base_model import write_base_model
from streamrl.quickstart.task import Example, demonstrate, examples, spoil

_NUM_TRAIN = 16_384
_NUM_HELD_OUT = 400
_NUM_DEMONSTRATIONS = 16_000  # 250 steps of 64 rows
_NUM_PAIRS = 4_000
_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.2
_MADE_HERE = ("data", "base", "sft", "reward-model")
_MARK = ".quickstart"  # in a folder that the quickstart has made, and so may clear


def clear(folder: Path, *, keep: Iterable[str]) -> bool:
    """Remove what an earlier quickstart has left; whether there was anything. ConfigError if it is somebody else's."""
    left = [path for path in folder.iterdir() if path.name not in keep] if folder.is_dir() else []
    if left and not (folder / _MARK).exists():
        raise ConfigError(f"{folder} holds something else than a quickstart; choose another name with name=...")
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    return bool(left)


def prepare(folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
    """`say` is told, again and again, what is going on."""
    say("writing the data and an untrained model")
    write_data(folder / "data", seed=seed)
    write_base_model(folder / "base", seed=seed)
    processes = [Process.start(_warm_up(folder, seed)), Process.start(_train_reward_model(folder, seed))]
    try:
        _wait(processes, say)
    finally:
        end_all(processes, within_s=0.0)


def overrides(folder: Path) -> list[str]:
    """The settings of the run that follow from where things were made, and from what the reward model turned out."""
    settings: dict[str, object] = {
        "model.path": str(folder / "sft"),
        "data.train": str(folder / "data" / "train.jsonl"),
        "data.validation": str(folder / "data" / "validation.jsonl"),
        "reward_server.model": str(folder / "reward-model"),
    }
    summary = folder / "reward-model" / "reward_summary.json"
    if summary.exists():
        found = json.loads(summary.read_text())
        settings |= {f"reward_server.{name}": float(found[name]) for name in ("reward_mean", "reward_std")}
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def write_data(folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    held_out = list({example.prompt: example for example in islice(examples(rng), _NUM_HELD_OUT)}.values())
    unseen = {example.prompt for example in held_out}
    rest = (example for example in examples(rng) if example.prompt not in unseen)
    _write(folder / "validation.jsonl", map(_to_prompt, held_out))
    _write(folder / "train.jsonl", map(_to_prompt, islice(rest, _NUM_TRAIN)))
    demonstrations = islice(rest, _NUM_DEMONSTRATIONS)
    _write(
        folder / "demonstrations.jsonl",
        ({"prompt": one.prompt, "completion": demonstrate(one, rng)} for one in demonstrations),
    )
    pairs = islice(rest, _NUM_PAIRS)
    _write(
        folder / "pairs.jsonl",
        ({"prompt": one.prompt, "chosen": one.answer, "rejected": spoil(one, rng)} for one in pairs),
    )


def _to_prompt(example: Example) -> dict[str, str]:
    return {"prompt": example.prompt, "answer": example.answer}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _warm_up(folder: Path, seed: int) -> Command:
    options = {
        "--model": folder / "base",
        "--data": folder / "data" / "demonstrations.jsonl",
        "--output": folder / "sft",
        "--seed": seed,
        "--threads": 1,
    }
    return _command("warm-up", ["-m", "learner.sft"], options, folder)


def _train_reward_model(folder: Path, seed: int) -> Command:
    options = {
        "--model": folder / "base",
        "--pairs": folder / "data" / "pairs.jsonl",
        "--output": folder / "reward-model",
        "--lr": 1e-3,
        "--seed": seed,
        "--threads": 1,
    }
    return _command("reward model", ["-m", "streamrl.cli.main", "reward", "train"], options, folder)


def _command(name: str, program: list[str], options: dict[str, object], folder: Path) -> Command:
    words = [f"{option}={value}" for option, value in options.items()]
    log = folder / "logs" / f"{name.replace(' ', '-')}.log"
    return Command(name=name, arguments=(sys.executable, *program, *words), log=log)


def _wait(processes: list[Process], say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        codes = [process.poll() for process in processes]
        for process, code in zip(processes, codes, strict=True):
            if code not in (None, 0):
                tail = "\n".join(f"  {line}" for line in process.last_words())
                raise PartError(f"{process.command.name} ended with exit code {code}:\n{tail}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise PartError(f"the preparation took more than {_TIMEOUT_S:g} s; see {processes[0].command.log.parent}")
        say("   ".join(f"{process.command.name}: {_last_line(process)}" for process in processes))
        time.sleep(_LOOK_EVERY_S)


def _last_line(process: Process) -> str:
    words = process.last_words(num_lines=1)
    return words[0].partition(": ")[0] if words and words[0].startswith("step") else "starting" if not words else "done"
