"""What the learner's integration tests share: a tiny run in a folder, the learner as a process, a made-up worker.

The worker is a thread: it leases tickets through the real worker's half of the stream and answers with samples of
random tokens, which follow from the ticket's number, and with the log-probs that the model before the run gives them.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from streamrl.config import schema
from streamrl.config.load import dump_config
from streamrl.protocol.transport.connection import connect_async
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.types import Leased
from streamrl.protocol.transport.worker import WorkerStream
from streamrl.protocol.wire.fingerprint import fingerprint, stop_ids
from streamrl.protocol.wire.group import Group, GroupHeader, encode_group
from streamrl.protocol.wire.sample import Sample, Span
from streamrl.protocol.wire.ticket import Ticket
from tests.tiny_models import make_model
from tests.warm import Forked, start

ROOT = Path(__file__).resolve().parents[2]
FAVOURITE = 7  # the token that is rewarded
_NUM_LETTERS = 12  # tokens 3.. that the worker samples from


def make_run(folder: Path, *, name: str, num_prompts: int = 400, **sections: Any) -> schema.Config:
    """A run folder with its configuration, a model and prompts."""
    model = folder / "model"
    if not model.exists():
        make_model(model, hidden=32)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"say {i % 97}:"}) + "\n" for i in range(num_prompts)))
    fields: dict[str, Any] = {
        "name": name,
        "dir": folder / "runs",
        "model": schema.Model(path=str(model), dtype="float32"),
        "data": schema.Data(train=str(prompts)),
        "sampling": schema.Sampling(num_samples=4, max_tokens=8),
        "rewards": {"favourite": schema.FunctionReward(type="function", target="unused")},
        "optimizer": schema.Optimizer(lr=1e-3, schedule="constant", warmup_steps=0),
        "training": schema.Training(groups_per_step=4, max_steps=6),
        "weights": schema.Weights(dtype="float32"),
        "checkpoint": schema.Checkpoint(every_steps=3),
        "validation": schema.Validation(every_steps=0, at_start=False, at_end=False),
        "learner": schema.Learner(threads=1, lease_s=5.0, idle_timeout_s=60.0),
    }
    config = schema.Config(**{**fields, **sections})
    config.folder.mkdir(parents=True, exist_ok=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    return config


def learner_command(
    config: schema.Config, url: str, *more: str, processes: int = 0, max_restarts: int = 3
) -> list[str]:
    """Under torchrun with so many ranks; 0: alone, without it."""
    agent = ["-m", "streamrl.learner.process.agent", "--standalone", f"--nproc-per-node={processes}"]
    program = [*agent, f"--max-restarts={max_restarts}", "--"] if processes else ["-m", "learner"]
    arguments = ["--config", str(config.folder / "config.yaml"), "--redis", url]
    arguments += ["--error-file", str(config.folder / "error.json")]
    return [sys.executable, *program, *arguments, *more]


@contextmanager
def running_learner(
    config: schema.Config, url: str, *more: str, processes: int = 0, max_restarts: int = 3
) -> Iterator[subprocess.Popen[str] | Forked]:
    """`more`: of the learner's words. Alone it is forked from a process that has its imports; under torchrun the
    agent's own server imports them."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    words = learner_command(config, url, *more, processes=processes, max_restarts=max_restarts)
    with (config.folder / "learner.out").open("a") as out:
        process = (
            subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=out, text=True)
            if processes
            else start(*words[2:], out=out)
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def output(config: schema.Config) -> str:
    return (config.folder / "learner.out").read_text()


def lines(path: Path) -> list[dict[str, Any]]:
    """Those that are whole: the last one may be half written."""
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


@contextmanager
def made_up_worker(
    config: schema.Config,
    url: str,
    *,
    scale: float = 1.0,
    absurd: Collection[int] = (),
    may_answer: Callable[[], float] = lambda: math.inf,
) -> Iterator[None]:
    """Answers tickets until the block ends, as many in all as it may by now, with rewards up to `scale`; those of
    `absurd` tickets make a loss overflow. An error in it fails the test there."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(_Worker(config, url, scale, absurd).run(stop, may_answer))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=work, name="made-up worker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)
    if errors:
        raise errors[0]


class _Worker:
    def __init__(self, config: schema.Config, url: str, scale: float, absurd: Collection[int]) -> None:
        self._config, self._url, self._scale, self._absurd = config, url, scale, absurd
        self._model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
        self._end = tokenizer.eos_token_id
        ends = stop_ids(tokenizer_eos=self._end, generation_eos=self._model.generation_config.eos_token_id)
        vocabulary = self._model.config.vocab_size
        self._fingerprint = fingerprint(vocab=tokenizer.get_vocab(), stop_ids=ends, vocab_size=vocabulary)

    async def run(self, stop: threading.Event, may_answer: Callable[[], float]) -> None:
        client = connect_async(self._url, self._config.redis)
        stream = WorkerStream(client, Keys(self._config.name), worker="made-up", lease_s=30.0)
        num_answered = 0
        try:
            while not stop.is_set():
                latest = await stream.announcements.latest() if await stream.run_info() else None
                more = int(min(8, may_answer() - num_answered))
                if latest is None or more <= 0:
                    await asyncio.to_thread(stop.wait, 0.05)
                    continue
                for leased in await stream.lease(max_tickets=more, block_ms=50):
                    group = await asyncio.to_thread(self._answer, leased, latest.version, latest.step)
                    await stream.deliver(leased, *encode_group(group))
                    num_answered += 1
        finally:
            await client.aclose()

    def _answer(self, leased: Leased, version: int, step: int) -> Group:
        ticket = leased.ticket
        rng = np.random.default_rng(ticket.number)
        samples = tuple(self._sample(rng, ticket, version, step) for _ in range(ticket.num_samples))
        header = GroupHeader(
            ticket=ticket.number,
            identity=ticket.identity,
            run_uid=ticket.run_uid,
            purpose=ticket.purpose,
            attempt=ticket.attempt,
            worker="made-up",
            fingerprint=self._fingerprint,
            num_prompt_tokens=0,
            sample_lengths=(),
            sample_rewards=(),
            sample_finished=(),
            min_version=0,
            max_version=0,
            generate_s=0.01,
        )
        return Group(header=header, prompt_ids=ticket.token_ids, samples=samples)

    def _sample(self, rng: np.random.Generator, ticket: Ticket, version: int, step: int) -> Sample:
        prompt = ticket.token_ids.tolist()
        letters = rng.integers(3, 3 + _NUM_LETTERS, rng.integers(1, self._config.sampling.max_tokens))
        tokens = [*letters.tolist(), self._end]
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits[: self._config.sampling.min_tokens, self._end] = -torch.inf
        logp = logits.log_softmax(-1)[range(len(tokens)), tokens]
        scale = 1e308 if ticket.number in self._absurd else self._scale
        reward = scale * float(np.mean(letters == FAVOURITE))
        return Sample(
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=logp.numpy(),
            mask_runs=(len(tokens),),
            spans=(Span(version=version, step=step, start=0, end=len(tokens)),),
            finish_reason="stop",
            rewards={"favourite": reward},
            reward=reward,
        )
