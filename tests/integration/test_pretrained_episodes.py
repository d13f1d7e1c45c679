"""Rollouts of several turns with a pretrained model on vLLM: its own chat template, and one that drops what was said
before the last word. With the packages that only `.ci/setup demo` installs.

The learner's log-probs are computed in float64 here, since in float32 a model as deep as this one rounds as far as the
tolerance. Of 969 tokens the engine was off by 6.0e-5 at most (99 of 100 by 3.1e-5), the learner in float32 by 1.5e-4
(2.4e-5), and the two from each other by 1.6e-4; with tiny models, of 18,842 tokens, by 1.2e-5.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.config import schema
from streamrl.data.settings import DATE
from streamrl.demos.pretrained import converter, find_gguf, make_model
from streamrl.versions import make_version
from streamrl.workers.engines.base import EngineSettings, KvCache, Load, SampleRequest, make_engine
from streamrl.workers.engines.model import read_model
from streamrl.workers.environments.base import Answer, EnvironmentDouble
from streamrl.workers.environments.play import Player
from streamrl.workers.environments.tail import Tail
from tests.brute_force import check_by_brute_force
from tests.helpers import make_ticket
from tests.integration.engine_world import TOLERANCE, Served
from tests.integration.episode_world import (
    SAMPLING,
    Episode,
    Watched,
    compare,
    learners_logprobs,
    play_all,
    through_the_wire,
)
from tests.worker_world import worker_config

_ASKED = "What is {0} + {1}? Think aloud, then answer."
_SETTINGS = schema.Environment(target="m:f", max_turns=3, max_tokens=400)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_a_pretrained_model_plays_in_its_own_template_and_in_one_that_drops_what_was_thought(
    tmp_path: Path, record_property: Any
) -> None:
    folder = make_model(find_gguf(), tmp_path, converter(tmp_path / "logs", print))
    facts = read_model(str(folder), trust_remote_code=False)
    tokenizer: Any = facts.tokenizer
    own = tokenizer.chat_template
    config = worker_config(threads=1, engine="vllm").model_copy(
        update={
            "weights": schema.Weights(dtype="float32"),
            "data": schema.Data(train="", max_prompt_tokens=100),
            "environment": _SETTINGS,
        }
    )
    engine = make_engine(EngineSettings(model=facts, config=config, seed=1))
    version = make_version(1, 1)
    off: dict[str, list[float]] = {}
    environment = dict(os.environ)
    try:
        await engine.start()
        await engine.load(Load(weights=folder / "model.safetensors", version=version, step=1))
        for name, template in {"own": own, "drops": _DROPS}.items():
            tokenizer.chat_template = template
            episodes = await asyncio.gather(*(_episode(engine, tokenizer, at, version) for at in range(6)))
            samples = [through_the_wire(episode) for episode in episodes]
            for episode, sample in zip(episodes, samples, strict=True):
                said = [(turn.context, turn.generated) for turn in episode.turns]
                check_by_brute_force(episode.prompt, sample, said)
            assert (sum(len(sample.branches) for sample in samples) > 6) == (name == "drops")
            assert name == "drops" or not any(sample.branches for sample in samples)
            model: Any = SimpleNamespace(facts=facts, folders=[folder])
            asked = [(episode.prompt, sample) for episode, sample in zip(episodes, samples, strict=True)]
            learnt = learners_logprobs(model, 0, asked, torch.float64)
            off[name] = [
                abs(float(sample.logprobs[at]) - logp[at])
                for sample, logp in zip(samples, learnt, strict=True)
                for at in np.flatnonzero(sample.loss_mask())
            ]
    finally:
        await engine.stop()
        os.environ.clear()  # vLLM is told, and tells its processes, through the environment
        os.environ.update(environment)
    figures = ", ".join(f"{name} {len(each)} tokens off by {max(each):.1e}" for name, each in off.items())
    record_property("figure", figures)
    assert max(max(each) for each in off.values()) <= TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kv_cache", ["clear", "salt"])
async def test_of_its_random_episodes_each_sampled_token_is_trained_once_with_its_own_logprob(
    tmp_path: Path, kv_cache: KvCache, record_property: Any
) -> None:
    """As those of `test_engines`, with two more versions of its weights, which come in mid-episode."""
    folder = make_model(find_gguf(), tmp_path, converter(tmp_path / "logs", print))
    folders = [folder, *(_moved(folder, tmp_path / str(seed), seed) for seed in (1, 2))]
    served, environment = Served(folders, engine="vllm"), dict(os.environ)
    try:
        await served.engine.start()
        episodes, models = await play_all(served, 24, kv_cache=kv_cache, limit_s=20.0)
    finally:
        await served.engine.stop()
        os.environ.clear()  # as above
        os.environ.update(environment)
    compared = compare(served, episodes, models, kv_cache=kv_cache, dtype=torch.float64)
    record_property("figure", str(compared))
    assert compared.num_across > 0
    assert max(compared.off) <= TOLERANCE
    assert kv_cache == "salt" or len(compared.off) == compared.num_tokens


def _moved(folder: Path, moved: Path, seed: int) -> Path:
    """The model with all its weights a little off, as after many steps."""
    shutil.copytree(folder, moved)
    random, file = torch.Generator().manual_seed(seed), moved / "model.safetensors"
    weights = {
        name: (tensor.float() * (1 + 0.05 * torch.randn(tensor.shape, generator=random))).to(tensor.dtype)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})
    return moved


_DROPS = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ (message['content'] | trim).split(' ')[-1] if message['role'] == 'assistant' else message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


async def _episode(engine: Any, tokenizer: Any, at: int, version: int) -> Episode:
    messages = [{"role": "user", "content": _ASKED.format(at + 2, 3 * at + 1)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    episode = Episode(prompt=tokenizer(text, add_special_tokens=False)["input_ids"])
    environment = EnvironmentDouble(lambda row, said: Answer(observation="Are you sure? Say why.", done=len(said) == 3))
    request = SampleRequest(
        request_id=f"{version}-{at}-{len(messages)}-{text[-5:]!r}",
        prompt_ids=np.asarray(episode.prompt, np.int32),
        sampling=SAMPLING.model_copy(update={"max_tokens": 24}),
    )
    watched: Any = Watched(engine, episode, [version])
    ticket = make_ticket(at, fields={"messages": messages})
    player = Player(environment, tail=Tail(tokenizer, date=DATE), settings=_SETTINGS)
    played = await player.play(ticket, watched, request)
    episode.sample = played.sample
    for turn in episode.turns[1:]:
        said = [*messages]
        for earlier in episode.turns[: episode.turns.index(turn)]:
            said += [{"role": "assistant", "content": earlier.generated.text}]
            said += [{"role": "user", "content": "Are you sure? Say why."}]
        whole = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(turn.context) == whole, "what it is asked with is what the template would have written"
    return episode
