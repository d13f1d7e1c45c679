"""Supervised training of a model on one machine, for `streamrl sft`.

    rows ─► an order of each pass, by the seed ─► batches ─► packed as in the learner ─► loss, AdamW ─► OUTPUT
                                                                    │
              OUTPUT.training/: state every `save_every` steps, from which a restart reaches the same weights

    loss = - sum over trained tokens of a batch of log pi / their number

Model, packing, head, optimizer and schedule are those of a run. OUTPUT appears complete, at the end. One process, on
the first GPU if there is one. Blocks on computing and the disk.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
import xxhash

from streamrl.config import schema
from streamrl.data.settings import DATE
from streamrl.errors import ConfigError, DataError, TrainingError
from streamrl.files import locked, put_back, replace_folder, write_durably
from streamrl.learner.checkpoints.export import export
from streamrl.learner.checkpoints.shard import Shard, load_state
from streamrl.learner.loading.build import read_config
from streamrl.learner.loading.load import load_policy
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.objective.optimizer import learning_rate, make_optimizer, update
from streamrl.learner.packing.micro_batches import Piece
from streamrl.learner.packing.pack import pack
from streamrl.learner.process.ranks import World
from streamrl.learner.sft.rows import Rows, read_rows
from streamrl.terminal import age

_REPORTS = 20  # progress lines over the whole training
_REPORT_S = 5.0  # or more of them, if steps are slow
_STATE, _RANKS = "state.json", "ranks"
_MAX_SKIPPED_IN_ROW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Only `save_every` may change when a training resumes."""

    model: str  # folder or hub name
    data: Path
    output: Path
    epochs: int = 1
    batch_size: int = 32  # rows per step
    lr: float = 1e-5
    warmup_steps: int = 20
    schedule: str = "cosine"  # cosine, down to a tenth of `lr` | constant
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    max_tokens: int = 2048  # per row
    micro_batch_tokens: int = 4096
    dtype: str = "float32"  # of forward and backward passes
    held_out: float = 0.0  # share of rows used only for measuring
    chat: bool = False
    date: str = DATE  # what the chat template takes for today
    save_every: int = 100  # steps
    seed: int = 1234

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    loss: float  # over the last twentieth of the steps
    held_out_loss: float | None
    num_steps: int
    went_on_from: int  # step that it resumed from
    num_rows: int  # used for training
    num_held_out: int
    num_overlong: int
    num_tokens: int  # with a loss, in one pass


def prepare_process(threads: int | None) -> None:
    """Set the number of threads and silence transformers' output."""
    if threads is not None:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def train(settings: Settings, report: Callable[[str], None]) -> Outcome:
    """Train, and leave model and tokenizer in `output`. Resumes a training that was killed."""
    if settings.output.exists() and (not settings.output.is_dir() or any(settings.output.iterdir())):
        raise ConfigError(f"--output: {str(settings.output)!r} is not empty; nothing is overwritten")
    info = read_tokenizer_info(settings.model)
    rows = read_rows(
        settings.data,
        info.tokenizer,
        info.end_ids,
        max_tokens=settings.max_tokens,
        date=settings.date,
        chat=settings.chat,
    )
    _refuse_unknown(rows, settings.model, num_outputs=info.vocabulary)
    if rows.num_overlong:
        report(f"{rows.num_overlong} rows or turns are longer than {settings.max_tokens} tokens and are skipped")
    learned, measured = _split(rows, settings)
    settings.partial.mkdir(parents=True, exist_ok=True)
    with locked(settings.partial, taken=f"another process is training into {settings.output}"):
        training = _Training(settings, learned, info.end_ids, report)
        loss = training.run()
        held_out_loss = _mean_loss(training.policy, measured, settings, training.world) if measured else None
        made = export(training.policy, info.tokenizer, training.config, training.world)
        replace_folder(made, settings.output)
        shutil.rmtree(settings.partial)
    return Outcome(
        loss=loss,
        held_out_loss=held_out_loss,
        num_steps=training.num_steps,
        went_on_from=training.went_on_from,
        num_rows=len(learned),
        num_held_out=len(measured),
        num_overlong=rows.num_overlong,
        num_tokens=sum(int(piece.mask.sum()) for piece in learned),
    )


def _refuse_unknown(rows: Rows, model: str, *, num_outputs: int) -> None:
    """Raise DataError if the rows hold tokens that the model does not know."""
    highest = max(int(ids.max()) for piece in rows.pieces for ids in (piece.prompt_ids, piece.token_ids))
    if highest >= num_outputs:
        problem = f"a row has token id {highest}, but the model has {num_outputs} outputs"
        raise DataError(f"--model: {model!r}: {problem}: model and tokenizer do not match")


def _split(rows: Rows, settings: Settings) -> tuple[list[Piece], list[Piece]]:
    """(pieces to train on, pieces to measure with); those of one row stay together"""
    num_rows = rows.row_of[-1] + 1
    count = int(settings.held_out * num_rows + 0.5)
    if count == num_rows:
        raise ConfigError(f"--held-out: {settings.held_out} of {num_rows} rows leaves none to train on")
    order = np.random.default_rng([settings.seed, 0]).permutation(num_rows)
    measured = set(order[:count].tolist())
    pieces = list(zip(rows.pieces, rows.row_of, strict=True))
    return (
        [piece for piece, row in pieces if row not in measured],
        [piece for piece, row in pieces if row in measured],
    )


class _Training:
    def __init__(
        self, settings: Settings, pieces: Sequence[Piece], end_ids: tuple[int, ...], report: Callable[[str], None]
    ) -> None:
        self._settings, self._pieces, self._report = settings, pieces, report
        self.config = _config(settings, longest=max(piece.num_tokens + 1 for piece in pieces))
        self.world = World.alone()
        torch.manual_seed(settings.seed)
        self.policy = load_policy(self.config, self.world, end_ids)
        self._optimizer = make_optimizer(self.policy, self.config.optimizer)
        self._per_pass = -(-len(pieces) // settings.batch_size)
        self.num_steps = self._per_pass * settings.epochs
        self._losses: list[float] = []
        self.went_on_from = self._restore()
        self._saving: Shard | None = None

    def run(self) -> float:
        """Train; return the mean loss of the last steps."""
        began, first, skipped = time.monotonic(), self.went_on_from, 0
        reported_at = began
        every = max(1, self.num_steps // _REPORTS)
        for step in range(first, self.num_steps):
            lr = learning_rate(step, self.config.optimizer, total_steps=self.num_steps)
            loss = self._accumulate(self._batch(step))
            clip = self._settings.clip_norm
            made = update(self._optimizer, loss=loss, lr=lr, clip_norm=clip, world=self.world)
            skipped = 0 if made.applied else skipped + 1
            if skipped >= _MAX_SKIPPED_IN_ROW:
                raise TrainingError(f"{skipped} steps in a row had a non-finite loss: try a smaller --lr")
            if made.applied:
                self._losses.append(loss)
            done = step + 1
            now = time.monotonic()
            if done % every == 0 or now - reported_at > _REPORT_S:
                reported_at, left_s = now, (now - began) / (done - first) * (self.num_steps - done)
                self._report(f"step {done} of {self.num_steps}: loss {loss:.3f}, {age(left_s)} left")
            if done % self._settings.save_every == 0 and done < self.num_steps:
                self._save(done)
        if not self._losses:
            raise TrainingError("no step had a finite loss: try a smaller --lr")
        last = self._losses[-max(1, self.num_steps // _REPORTS) :]
        return sum(last) / len(last)

    def _batch(self, step: int) -> list[Piece]:
        data_epoch, at = divmod(step, self._per_pass)
        order = np.random.default_rng([self._settings.seed, 1 + data_epoch]).permutation(len(self._pieces))
        size = self._settings.batch_size
        return [self._pieces[i] for i in order[at * size : (at + 1) * size]]

    def _accumulate(self, pieces: Sequence[Piece]) -> float:
        """Accumulate the gradients of the batch's loss, and return the loss."""
        num_tokens = sum(int(piece.mask.sum()) for piece in pieces)
        total = 0.0
        for micro_batch in pack(pieces, max_tokens=self._settings.micro_batch_tokens, shape=self.policy.shape):
            loss = -self.policy(micro_batch.to(self.world.device)).logp.sum() / num_tokens
            loss.backward()
            total += float(loss.detach())
        return total

    # State for resuming

    def _save(self, step: int) -> None:
        if self._saving is None:
            self._saving = Shard(self.policy, self._optimizer, self.world)
        made = self._settings.partial / f".{_RANKS}"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        self._saving.take()
        self._saving.write(made)
        state = {"step": step, "losses": self._losses, "identity": self._identity()}
        write_durably(made / _STATE, json.dumps(state).encode())
        replace_folder(made, self._settings.partial / _RANKS)

    def _restore(self) -> int:
        """Restore saved state; return its step, or 0."""
        folder = self._settings.partial / _RANKS
        put_back(folder)
        if not (folder / _STATE).is_file():
            return 0
        try:
            state = json.loads((folder / _STATE).read_bytes())
            before, step, losses = state["identity"], int(state["step"]), list(state["losses"])
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{folder} cannot be read; remove {self._settings.partial} to start over") from None
        now = self._identity()
        if changed := [f"{key}: {before.get(key)} -> {now[key]}" for key in now if before.get(key) != now[key]]:
            raise ConfigError(
                f"{self._settings.partial} holds a training with other settings ({'; '.join(changed)}): restore them, "
                "choose another --output, or remove it to start over"
            )
        load_state(folder, self.policy, self._optimizer, self.world)
        self._losses = losses
        self._report(f"resuming at step {step} of {self.num_steps}")
        return step

    def _identity(self) -> dict[str, str]:
        """What determines the weights. The date does so by the data alone."""
        unfelt = ("save_every", "date")
        settings = {key: str(value) for key, value in asdict(self._settings).items() if key not in unfelt}
        digest = xxhash.xxh3_64()
        for piece in self._pieces:
            digest.update(piece.prompt_ids.tobytes() + piece.token_ids.tobytes() + piece.mask.tobytes())
        return {**settings, "what the data hold": digest.hexdigest()}


def _config(settings: Settings, *, longest: int) -> schema.Config:
    """The configuration of a run that would train like this."""
    dtype = read_config(settings.model).dtype
    return schema.Config.model_validate(
        {
            "name": "sft",
            "dir": settings.partial,
            "seed": settings.seed,
            "model": {"path": settings.model, "dtype": settings.dtype},
            "data": {"train": str(settings.data), "max_prompt_tokens": 1},
            "sampling": {"max_tokens": max(1, longest - 1), "min_tokens": 0},
            "training": {"micro_batch_tokens": settings.micro_batch_tokens},
            "weights": {"dtype": "bfloat16" if dtype == torch.bfloat16 else "float32"},  # as in the original model
            "algorithm": {"kl": {"placement": "none"}},
            "optimizer": {
                "lr": settings.lr,
                "min_lr": settings.lr / 10,
                "weight_decay": settings.weight_decay,
                "warmup_steps": settings.warmup_steps,
                "constant_steps": 0,
                "schedule": settings.schedule,
                "clip_norm": settings.clip_norm,
            },
        }
    )


def _mean_loss(policy: Policy, pieces: Sequence[Piece], settings: Settings, world: World) -> float:
    total = 0.0
    with evaluating(policy):
        for batch in pack(pieces, max_tokens=settings.micro_batch_tokens, shape=policy.shape):
            total -= float(policy(batch.to(world.device)).logp.sum())
    return total / sum(int(piece.mask.sum()) for piece in pieces)
