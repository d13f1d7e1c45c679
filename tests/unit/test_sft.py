"""Supervised training: what the loss is, what it leaves, and that one which was killed goes on to the same weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from streamrl.data.settings import DATE
from streamrl.demos.quickstart import examples, write_base_model
from streamrl.errors import ConfigError, DataError
from streamrl.learner.sft.rows import read_rows
from streamrl.learner.sft.training import Settings, train
from streamrl.ops.cli.training.sft import sft
from tests.helpers import files_up_to
from tests.sft_world import write_rows
from tests.tiny_families import make_family
from tests.tiny_models import make_model, make_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


@pytest.fixture
def settings(base: Path, tmp_path: Path) -> Settings:
    shown = islice(examples(random.Random(1)), 16 * 20)
    data = write_rows(tmp_path / "data.jsonl", *({"prompt": e.prompt, "completion": e.answer} for e in shown))
    return Settings(model=str(base), data=data, output=tmp_path / "sft", batch_size=16, lr=2e-3, seed=1)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("not json", r"data.jsonl:2: expected .*\"messages\".* got not json"),
        ("[]", "data.jsonl:2: expected"),
        ('{"prompt": "1<"}', "data.jsonl:2: expected"),
        ('{"prompt": 1, "completion": "1"}', "data.jsonl:2: expected"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "data.jsonl:2: expected .*an assistant's message"),
        ('{"prompt": "", "completion": "1"}', "data.jsonl:2: the prompt has no tokens"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "data.jsonl:2: messages need a chat template.*use prompt and completion",
        ),
    ],
)
def test_a_row_that_is_none_is_named_with_its_line(settings: Settings, row: str, told: str) -> None:
    settings.data.write_text('{"prompt": "1<", "completion": "1"}\n' + row + "\n")

    with pytest.raises(DataError, match=told):
        train(settings, lambda _: None)


def test_tokens_that_the_model_does_not_know_are_told_before_it_is_loaded(tmp_path: Path) -> None:
    model, tokenizer = make_model(tmp_path / "model"), make_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(model)
    rows = [{"prompt": prompt, "completion": "b"} for prompt in ("a", "a<tool>")]
    data = write_rows(tmp_path / "data.jsonl", *rows)

    with pytest.raises(DataError, match=r"--model: .*: a row has token id 49, but the model has 49 outputs: model and"):
        train(Settings(model=str(model), data=data, output=tmp_path / "sft"), lambda _: None)


def test_rows_that_are_too_long_are_left_out_and_counted(settings: Settings) -> None:
    outcome = train(replace(settings, max_tokens=12), lambda _: None)

    assert outcome.num_overlong > 0
    assert outcome.num_overlong + outcome.num_rows == 320
    with pytest.raises(DataError, match=r"all 320 are longer than --max-tokens 3"):
        train(replace(settings, max_tokens=3, output=settings.output.with_name("other")), lambda _: None)


def test_a_row_may_be_as_long_as_the_model_has_positions_and_no_longer(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", {"prompt": "ab" * 25, "completion": "abc" * 10})
    [piece] = read_rows(data, make_tokenizer(), [1], max_tokens=200, date=DATE).pieces
    length = len(piece.prompt_ids) + len(piece.token_ids)
    for positions in (length, length - 1):
        model = make_family(
            tmp_path / f"gpt2-{positions}", "gpt2", n_positions=positions, max_position_embeddings=positions
        )
        settings = Settings(model=str(model), data=data, output=tmp_path / f"sft-{positions}", batch_size=1)
        if positions == length:
            assert train(settings, lambda _: None).num_rows == 1
        else:
            with pytest.raises(DataError, match=f"a row may have {length}: reduce .* --max-tokens"):
                train(settings, lambda _: None)


def test_the_loss_is_the_mean_over_trained_tokens_of_what_the_bare_model_says(settings: Settings, base: Path) -> None:
    outcome = train(replace(settings, batch_size=320), lambda _: None)

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for line in settings.data.read_text().splitlines():
        row = json.loads(line)
        asked = tokenizer(row["prompt"])["input_ids"]
        answered = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1]
        total -= logits.log_softmax(-1)[range(len(answered)), answered].sum()
        count += len(answered)
    assert outcome.num_tokens == count
    assert outcome.loss == pytest.approx(float(total) / count, abs=1e-5)


def test_it_learns_and_leaves_a_folder_that_transformers_loads_and_nothing_beside_it(settings: Settings) -> None:
    said: list[str] = []

    outcome = train(replace(settings, epochs=2, held_out=0.1), said.append)

    assert said[0].startswith("step 1 of 36: loss 2.")
    assert outcome.held_out_loss is not None
    assert outcome.held_out_loss < 2.1
    assert outcome.loss < 2.1
    assert (outcome.num_rows, outcome.num_held_out, outcome.num_steps) == (288, 32, 36)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.output)
    assert model.dtype == torch.float32
    assert transformers.AutoTokenizer.from_pretrained(settings.output).eos_token_id == 1
    assert not settings.partial.exists()


def test_the_model_is_written_in_the_dtype_that_it_came_in(tmp_path: Path) -> None:
    make_model(tmp_path / "base", dtype=torch.bfloat16)
    data = write_rows(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"})
    settings = Settings(model=str(tmp_path / "base"), data=data, output=tmp_path / "sft", dtype="bfloat16")

    train(settings, lambda _: None)

    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sft").dtype == torch.bfloat16


class _Killed(Exception):
    pass


def killed_at(step: int) -> Callable[[str], None]:
    def say(line: str) -> None:
        if line.startswith(f"step {step} "):
            raise _Killed

    return say


@pytest.mark.parametrize("step", [3, 10, 15])
def test_what_was_killed_goes_on_to_the_same_weights(settings: Settings, step: int) -> None:
    settings = replace(settings, save_every=4)
    whole = train(replace(settings, output=settings.output.with_name("whole")), lambda _: None)

    with pytest.raises(_Killed):
        train(settings, killed_at(step))
    assert not settings.output.exists()
    said: list[str] = []
    outcome = train(settings, said.append)

    assert outcome.went_on_from == (step - 1) // 4 * 4
    assert (f"resuming at step {outcome.went_on_from} of 20" in said) == (outcome.went_on_from > 0)
    assert weights(settings.output) == weights(settings.output.with_name("whole"))
    assert outcome.loss == whole.loss


def test_another_training_does_not_go_on_from_this_ones_state(settings: Settings) -> None:
    settings = replace(settings, save_every=4)
    with pytest.raises(_Killed):
        train(settings, killed_at(6))

    with pytest.raises(ConfigError, match=r"other settings \(lr: 0.002 -> 0.001\): restore them, choose another"):
        train(replace(settings, lr=1e-3), lambda _: None)
    lines = settings.data.read_text().splitlines(keepends=True)
    settings.data.write_text("".join(lines[1:]))
    with pytest.raises(ConfigError, match="what the data hold: "):
        train(settings, lambda _: None)


def test_a_date_that_no_template_writes_is_no_other_training(settings: Settings) -> None:
    settings = replace(settings, save_every=4)
    with pytest.raises(_Killed):
        train(settings, killed_at(6))
    assert train(replace(settings, date="1999-12-31"), lambda _: None).went_on_from == 4


def test_nothing_is_overwritten(settings: Settings) -> None:
    settings.output.mkdir()
    (settings.output / "mine").touch()

    with pytest.raises(ConfigError, match=r"--output: .* is not empty; nothing is overwritten"):
        train(settings, lambda _: None)


def test_a_program_reads_the_outcome_as_one_object(settings: Settings) -> None:
    words = ["--model", settings.model, "--data", str(settings.data), "--output", str(settings.output), "--json"]

    result = CliRunner().invoke(sft, [*words, "--batch-size", "160", "--lr", "0.001"])

    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["output"] == str(settings.output)
    assert (told["num_steps"], told["num_rows"], told["held_out_loss"]) == (2, 320, None)
    assert "step 1 of 2: loss" in result.stderr


def test_the_loss_that_is_told_is_of_steps_that_were_made(settings: Settings) -> None:
    told: list[str] = []

    outcome = train(replace(settings, batch_size=128, lr=1e25), told.append)  # its first step breaks the model

    assert [line.partition(",")[0] for line in told][1:] == ["step 2 of 3: loss nan", "step 3 of 3: loss nan"]
    assert f"loss {outcome.loss:.3f}" in told[0]


def test_a_state_whose_name_a_crash_took_away_is_found(settings: Settings) -> None:
    """Between the old state and the new one, where the file system cannot exchange names."""
    settings = replace(settings, save_every=4)
    with pytest.raises(_Killed):
        train(settings, killed_at(10))
    (settings.partial / "ranks").rename(settings.partial / ".old-ranks")

    assert train(settings, lambda _: None).went_on_from == 8


def test_a_disk_without_room_for_a_state_is_told_with_the_file_that_it_was_for(settings: Settings) -> None:
    with (
        files_up_to(100_000),
        pytest.raises(OSError, match=r"File too large: .*\.ranks/train-00000-of-00001\.safetensors"),
    ):
        train(replace(settings, save_every=1), lambda _: None)
