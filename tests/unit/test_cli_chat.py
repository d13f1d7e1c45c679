"""`streamrl chat`: the weights that were meant, their words as they come, and an end without noise."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import signal
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.learner.groups.prompts import tokenise
from streamrl.learner.metrics.keepsakes import note_state
from streamrl.ops.cli.main import main
from streamrl.ops.cli.models.chat import Dialogue, converse
from streamrl.workers.talk import Answer, Speaker, load_speaker
from tests.helpers import wait_until
from tests.replay_world import make_entries, make_recording, make_replay_run, run_replay
from tests.terminal_world import in_terminal
from tests.tiny_families import make_family
from tests.tiny_models import make_model

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["chat", *arguments, "--json"]) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Put this on stdin."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


def greedy(folder: Path, prompt: str, *, max_tokens: int) -> list[int]:
    """What transformers itself says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    said = model.generate(ids, max_new_tokens=max_tokens, min_new_tokens=1, do_sample=False)
    return said[0, ids.shape[1] :].tolist()


def test_a_prompt_is_answered_as_transformers_answers_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "say a:", "--temperature", "0", "--max-tokens", "20"]
    [told] = answered(capsys, str(model), *options)
    expected = greedy(model, "say a:", max_tokens=20)
    assert told["num_tokens"] == len(expected)
    text = transformers.AutoTokenizer.from_pretrained(model).decode(expected, skip_special_tokens=True)
    assert (told["answer"], told["prompt"], told["model"]) == (text, "say a:", str(model))
    assert told["finish_reason"] in ("stop", "length")
    assert main(["chat", str(model), *options]) == 0
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("family", ["gpt2", "mamba2", "qwen3_next", "gemma2"])
def test_families_without_plain_attention_talk_too(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / family, family)
    speaker, answer = load_speaker(str(folder), seed=0), Answer()
    for _ in speaker.speak(speaker.read("say a:"), schema.Sampling(max_tokens=12, greedy=True), answer):
        pass
    assert answer.token_ids == greedy(folder, "say a:", max_tokens=12)


def test_a_seed_gives_the_same_answer_and_another_one_another(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(seed: int) -> str:
        return str(
            answered(capsys, str(model), "--prompt", "a", "--max-tokens", "30", "--seed", str(seed))[0]["answer"]
        )

    assert told(1) == told(1) != told(2)


def test_each_line_of_stdin_is_answered_by_itself(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"say a:\n\nsay b:\nsay a:\n")
    told = answered(capsys, str(model), "--temperature", "0", "--max-tokens", "5")
    assert [one["prompt"] for one in told] == ["say a:", "say b:", "say a:"]
    assert told[0]["answer"] == told[2]["answer"]


def test_a_file_that_an_editor_of_another_system_wrote_has_the_same_prompts(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, "\ufeffsay a:\r\n\r\n say é: \r\n".encode())
    told = answered(capsys, str(model), "--max-tokens", "5")
    assert [one["prompt"] for one in told] == ["say a:", " say é: "]


def test_a_line_in_another_encoding_is_a_mistake_in_a_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"say a:\nsay \xe9:\n")
    assert main(["chat", str(model), "--json", "--max-tokens", "5"]) == 2
    assert "error: stdin: line 2 is not UTF-8; save the file in that encoding" in capsys.readouterr().err


def test_json_says_exactly_what_was_said_in_any_locale(model: Path) -> None:
    prompt = "say a:\x85\x7f\x9bЖ"
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    with contextlib.redirect_stdout(out):
        assert main(["chat", str(model), "--prompt", prompt, "--json", "--max-tokens", "5"]) == 0
    out.flush()
    written = out.buffer.getvalue()  # type: ignore[attr-defined]
    assert json.loads(written)["prompt"] == prompt
    assert written.rstrip(b"\n").decode("ascii").isprintable()


def test_a_run_is_its_export_and_then_its_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_replay_run(
        tmp_path,
        training=schema.Training(groups_per_step=4, max_steps=4),
        checkpoint=schema.Checkpoint(every_steps=2, keep_last=5),
        optimizer=schema.Optimizer(lr=1e-2, warmup_steps=0),
        num_prompts=10,
    )
    run_replay(config, make_recording(tmp_path / "recording", config, make_entries(config, range(16))))

    def told(subject: object) -> tuple[set[str], list[str]]:
        """The models that answered, and the answers."""
        give(monkeypatch, "".join(f"{letter}:\n" for letter in "abcdefgh").encode())
        found = answered(capsys, str(subject), "--seed", "1", "--max-tokens", "40")
        return {one["model"] for one in found}, [one["answer"] for one in found]

    exported, by_export = told(config.folder)
    _, by_older = told(f"{config.folder}@2")
    note_state(config.folder, "running", term=2)  # continued: the export has the weights of its first end
    continued, by_continued = told(config.folder)
    shutil.rmtree(config.folder / "export")
    newest, by_newest = told(config.folder)

    assert (exported, newest) == ({f"{config.folder}/export"}, {f"{config.folder} (step 4)"})
    assert (continued, by_continued) == (newest, by_newest)
    assert by_newest == by_export != by_older


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["nowhere", "--prompt", "a"],
            "nowhere: there is no folder nowhere, and it is not the name of a model on a hub (OWNER/NAME); name a run",
        ),
        (["{model}", "--prompt", "a", "--system", "b", "--plain"], "--system needs the chat template"),
        (["{model}", "--prompt", "a", "--system", "b"], "has none"),
        (["{model}", "--prompt", "a" * 600], "600 tokens leave no room for an answer: the model has 512 positions"),
        (["{model}", "--prompt", ""], "the prompt has no tokens"),
    ],
)
def test_mistakes_are_told_in_a_line(
    model: Path, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["chat", *(argument.format(model=model) for argument in arguments)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert told in error[-1]


class Noting(Speaker):
    """Notes what the model was given to read."""

    def __init__(self, folder: Path) -> None:
        like = load_speaker(str(folder), seed=0)
        super().__init__(like._model, like._facts, seed=0)
        self.given: list[object] = []

    def read(self, said: Any) -> list[int]:
        self.given.append(said)
        return super().read(said)


def typed(*lines: str) -> Callable[[], str]:
    left = iter(lines)

    def ask() -> str:
        for line in left:
            return line
        raise EOFError

    return ask


SAMPLING = schema.Sampling(max_tokens=6)


def test_a_conversation_is_kept_until_it_begins_anew(chat_model: Path) -> None:
    speaker, said = Noting(chat_model), []
    conversation = Dialogue(speaker, SAMPLING, first=[{"role": "system", "content": "be kind"}])

    converse(conversation, read=typed("one", "", "two", "/new", "three"), write=said.append)

    lengths = [len(messages) for messages in speaker.given]  # type: ignore[arg-type]
    assert lengths == [2, 4, 2]  # system and user; then an answer between two of the user's
    assert speaker.given[1][2]["role"] == "assistant"  # type: ignore[index]
    assert "".join(said).startswith(speaker.given[1][2]["content"] + "\n")  # type: ignore[index]


def test_without_a_template_each_line_is_a_text_of_its_own(model: Path) -> None:
    speaker = Noting(model)
    converse(Dialogue(speaker, SAMPLING, first=None), read=typed("one", "two"), write=lambda text: None)
    assert speaker.given == ["one", "two"]


def test_an_answer_that_is_broken_off_was_said_all_the_same(chat_model: Path) -> None:
    speaker, said = Noting(chat_model), []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            raise KeyboardInterrupt

    converse(Dialogue(speaker, SAMPLING, first=[]), read=typed("one", "two"), write=say)

    assert said[3:5] == [" ...", "\n"]
    assert speaker.given[1][1]["content"] == "".join(said[:3])  # type: ignore[index]


def test_what_the_model_cannot_read_is_told_and_leaves_nothing_said(chat_model: Path) -> None:
    speaker, said = Noting(chat_model), []
    converse(Dialogue(speaker, SAMPLING, first=[]), read=typed("a" * 600, "two"), write=said.append)
    assert "leave no room for an answer" in said[0]
    assert len(speaker.given[1]) == 1  # type: ignore[arg-type]


def test_messages_become_the_tokens_that_training_makes_of_them(chat_model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "what is 2+3?"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "2+3="}) + "\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat_model)
    data = schema.Data(train=str(rows))
    trained = tokenise(data.train_sets()[0], tokenizer, data)

    speaker = load_speaker(str(chat_model), seed=0)

    assert [speaker.read(messages), speaker.read("2+3=")] == [row.token_ids.tolist() for row in trained]


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages[0].tool_calls | tojson }}", "Undefined"),
    ],
)
def test_a_template_that_refuses_is_a_line(model: Path, tmp_path: Path, template: str, told: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(DataError, match=f"rejects the messages: .*{told}"):
        load_speaker(str(folder), seed=0).read([{"role": "system", "content": "x"}])


def test_whoever_chats_does_so_today_though_training_had_another_date(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y %m %d') }}")
    speaker = load_speaker(str(folder), seed=0)
    days = [date.today()]
    read = speaker._facts.decode(speaker.read([{"role": "user", "content": "x"}]))
    days.append(date.today())  # it may be midnight
    assert read in [day.strftime("%Y %m %d") for day in days]


class HalfCharacters:
    """A token is a byte of é."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return ("é" * len(token_ids)).encode()[: len(token_ids)].decode(errors="replace")


def test_a_character_is_shown_when_it_is_whole(model: Path) -> None:
    like = load_speaker(str(model), seed=0)
    facts = dataclasses.replace(like._facts, tokenizer=HalfCharacters(like._facts.tokenizer))
    answer = Answer()
    pieces = list(Speaker(like._model, facts, seed=0).speak([5], schema.Sampling(max_tokens=4, min_tokens=5), answer))
    assert pieces == ["", "é", "", "é"]
    assert answer.text == "éé"


def is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_in_a_terminal_ctrl_c_between_answers_ends_it_without_noise(model: Path) -> None:
    with in_terminal(["chat", str(model), "--max-tokens", "8"], width=120) as program:
        program.shows("no chat template: it continues each line", "\n>")
        program.press("say a:\n")
        program.shows("> say a:")
        wait_until(lambda: program.lines().count(">") == 1, description="it asks again")
        # A signal between the prompt and the wait for a key is heard at the next key: readline's own gap.
        wait_until(lambda: is_asleep(program.process.pid), description="it waits for a key")
        program.process.send_signal(signal.SIGINT)
        assert program.process.wait(60) == 0
        assert "Traceback" not in program.text()
