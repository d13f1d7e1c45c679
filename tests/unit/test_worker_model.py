"""What a worker reads of a model, and what it says of one that it cannot use."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.config import schema
from streamrl.config.of_model import special_tokens
from streamrl.errors import ConfigError, DataError, ResourceError
from streamrl.learner.loading.tokenizer import read_tokenizer_info
from streamrl.workers.engines.base import EngineSettings
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.arguments import engine_args, refuse_unknown
from streamrl.workers.engines.vllm.start import check_installed
from streamrl.workers.reward_server.model import _load_tokenizer
from tests.tiny_families import make_family
from tests.tiny_models import make_model, make_tokenizer
from tests.worker_world import worker_config

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", hidden=32)


def test_the_facts_of_a_model_are_read_without_its_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    facts = read_model(str(model), trust_remote_code=False)
    assert facts.stop_ids == (1,)
    assert facts.vocab_size == len(make_tokenizer())
    assert facts.max_positions == 512
    assert len(facts.fingerprint) == 16


def test_end_tokens_of_the_generation_configuration_count_too(model: Path) -> None:
    plain = read_model(str(model), trust_remote_code=False)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 5]}))
    facts = read_model(str(model), trust_remote_code=False)
    assert facts.stop_ids == (1, 5)
    assert facts.fingerprint != plain.fingerprint


@pytest.mark.parametrize("named", [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_a_folder_with_a_tokenizer_of_mistral_s_too_is_read_as_in_a_learner_without_vllm(
    tmp_path: Path, named: dict[str, str]
) -> None:
    """vLLM installs mistral-common, with which transformers would read tekken.json."""
    folder = make_family(tmp_path / "model", "mistral")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    plain = read_model(str(folder), trust_remote_code=False).fingerprint
    (folder / "tekken.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    facts = read_model(str(folder), trust_remote_code=False)
    learner = read_tokenizer_info(str(folder))
    scorer = _load_tokenizer(str(folder), {})

    assert facts.fingerprint == learner.fingerprint == plain
    for tokenizer in (facts.tokenizer, learner.tokenizer, scorer):
        assert tokenizer.chat_template == "{{ messages[0].content }}"
        assert special_tokens(tokenizer)


def test_a_tokenizer_in_mistral_s_form_alone_is_refused_with_how_to_convert_it(tmp_path: Path) -> None:
    """transformers would make one of it without beginning and end."""
    folder = make_family(tmp_path / "model", "mistral")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    letters = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    special = [{"rank": i, "token_str": token} for i, token in enumerate(["<unk>", "<s>", "</s>"])]
    config = {"pattern": ".", "default_vocab_size": 259, "default_num_special_tokens": 3}
    whole = {"config": config, "vocab": letters, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(whole))
    path = str(folder)
    readers: list[Callable[[], object]] = [
        partial(read_model, path, trust_remote_code=False),
        partial(read_tokenizer_info, path),
        partial(_load_tokenizer, path, {}),
    ]
    for read in readers:
        with pytest.raises(DataError, match=r"only as tekken.json; .*read\('tekken.json'\)"):
            read()


def test_vllm_reads_the_files_that_the_learner_reads(model: Path) -> None:
    arguments = engine_args(settings(model, worker_config()), on_cpu=True)
    assert (arguments["config_format"], arguments["tokenizer_mode"]) == ("hf", "hf")


def test_a_folder_without_a_model_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be used"):
        read_model(str(tmp_path), trust_remote_code=False)


def test_a_folder_without_a_tokenizer_is_the_users_mistake(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer: its folder lacks tokenizer\.json"):
        read_model(str(model), trust_remote_code=False)
    with pytest.raises(DataError, match=r"model\.path .* has no tokenizer: its folder lacks tokenizer\.json"):
        read_tokenizer_info(str(model))


def settings(model: Path, config: schema.Config) -> EngineSettings:
    facts = read_model(str(model), trust_remote_code=False)
    return EngineSettings(model=facts, config=config, seed=0)


def test_sequences_longer_than_the_model_knows_are_refused_by_name(model: Path) -> None:
    config = worker_config().model_copy(update={"sampling": schema.Sampling(max_tokens=1000)})
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens and sampling\.max_tokens .*1032 .*512"):
        _ = settings(model, config).max_length


def test_validation_may_ask_for_the_longest_sequences(model: Path) -> None:
    config = worker_config()
    assert settings(model, config).max_length == 32 + 16
    data = config.data.model_copy(update={"validation": "held-out.jsonl"})
    validation = schema.Validation(sampling=schema.ValidationSampling(max_tokens=99))
    longer = config.model_copy(update={"data": data, "validation": validation})
    assert settings(model, longer).max_length == 32 + 99


def test_without_vllm_the_error_says_what_to_install_or_to_set() -> None:
    with pytest.raises(ResourceError, match=r"pip install .*\[worker-cpu\].*worker\.engine=transformers"):
        check_installed(find=lambda name: None)


def test_without_the_plugin_vllm_would_not_know_how_to_load_weights() -> None:
    other = SimpleNamespace(value="other.package:register")
    with pytest.raises(ResourceError, match="entry point"):
        check_installed(find=lambda name: object(), plugins=[other])


def test_arguments_that_vllm_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"worker\.engine_args\.max_num_sequences: .*did you mean 'max_num_seqs'"):
        refuse_unknown(["model", "max_num_sequences"], ["model", "max_num_seqs"])


def test_arguments_that_correctness_hangs_on_are_not_the_users(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.engine_args\.dtype: streamrl sets this itself"):
        engine_args(settings(model, worker_config(engine_args={"dtype": "float16"})), on_cpu=True)


def test_arguments_of_the_user_replace_defaults(model: Path) -> None:
    arguments = engine_args(settings(model, worker_config(engine_args={"max_num_seqs": 7})), on_cpu=True)
    assert arguments["max_num_seqs"] == 7 + 1  # a canary's seat
    tokens = {"max_num_seqs": 256, "max_num_batched_tokens": 256}
    arguments = engine_args(settings(model, worker_config(engine_args=tokens)), on_cpu=True)
    assert arguments["max_num_batched_tokens"] == 257  # a token of each in a step, as vLLM asks for
    assert arguments["max_model_len"] == 65  # samples are shorter, but the proof of a load is not
