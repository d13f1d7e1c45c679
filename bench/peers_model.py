"""The peers' model: the quickstart's untrained model, warmed up on careless demonstrations.

Its folder records what it was made from; it is made again only if that changes. Takes four minutes: with a quarter of
the demonstrations it counts so badly that it has each number to learn by itself.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Sequence
from itertools import filterfalse, islice
from pathlib import Path

from bench import peers_task
from bench.measure import Say
from bench.peers_task import demonstrate, examples, is_held_out, lessons
from streamrl.demos.quickstart import write_base_model

_SEED = 7
_NUM_DEMONSTRATIONS = 40_000
_BATCH_TOKENS = 600  # small batches: learning the rule takes many steps
_LR = 3e-3
_POSITIONS = 256
_STAMP = "made.json"  # written last


def write_prompts(path: Path, *, seed: int, num_prompts: int) -> None:
    found = islice(filterfalse(is_held_out, examples(random.Random(seed))), num_prompts)
    _write(path, [{"prompt": one.prompt, "answer": one.answer} for one in found])


def make_model(folder: Path, say: Say) -> Path:
    """Return the folder of the warmed-up model and its tokenizer, creating them if needed."""
    made_of = {"demonstrations": _NUM_DEMONSTRATIONS, "batch_tokens": _BATCH_TOKENS, "lr": _LR, "seed": _SEED}
    made_of["task"] = inspect.getsource(peers_task)
    stamp, model = folder / _STAMP, folder / "model"
    if stamp.exists() and json.loads(stamp.read_text()) == made_of:
        return model
    say("making the model that both train")
    stamp.unlink(missing_ok=True)
    rng = random.Random(_SEED)
    shown = islice(lessons(rng), _NUM_DEMONSTRATIONS)
    folder.mkdir(parents=True, exist_ok=True)
    base, demonstrations = folder / "base", folder / "demonstrations.jsonl"
    _write(demonstrations, [{"prompt": one.prompt, "completion": demonstrate(one, rng)} for one in shown])
    write_base_model(base, seed=_SEED, num_positions=_POSITIONS)
    from bench.peers_warm_up import warm_up  # imports torch, which takes seconds

    say(f"made: loss {warm_up(base, demonstrations, model, batch_tokens=_BATCH_TOKENS, lr=_LR, seed=_SEED):.3f}")
    stamp.write_text(json.dumps(made_of))
    return model


def _write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
