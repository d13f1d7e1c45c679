"""`streamrl chat RUN|CHECKPOINT|MODEL`: talk to a model."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from streamrl.config.schema import Sampling
from streamrl.data.lines import why_not_text
from streamrl.errors import ConfigError, DataError
from streamrl.extras import need
from streamrl.held_folders import scratch_folder
from streamrl.ops.cli.arguments import MovingLine
from streamrl.ops.cli.models.subject import Subject, find_subject, takes_base
from streamrl.telemetry.logs import configure_logging
from streamrl.terminal import printable

if TYPE_CHECKING:
    from streamrl.workers.talk import Answer, Message, Speaker

_NEW_CHAT = "/new"


@click.command()
@click.argument("subject", metavar="RUN|CHECKPOINT|MODEL")
@takes_base
@click.option("--prompt", metavar="TEXT", help="Answer this prompt, and exit.")
@click.option("--system", metavar="TEXT", help="System message for the chat template.")
@click.option("--plain", is_flag=True, help="Continue the text as it stands, without the chat template.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, help="0: always the most likely token.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, help="Limit per answer.")
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed for reproducible answers; default: different answers each time."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per answer, one per line.")
def chat(
    subject: str,
    model: str | None,
    prompt: str | None,
    system: str | None,
    plain: bool,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    as_json: bool,
) -> None:
    """Chat with a model in this terminal, or let it answer prompts.

    \b
        streamrl chat runs/mine                          its export, or its newest checkpoint
        streamrl chat runs/mine@120      runs/mine@best  another checkpoint
        streamrl chat ./sft                              any model folder or hub name
        streamrl chat runs/mine --prompt 'What is 2 + 3?' --temperature 0
        streamrl chat runs/mine --json < questions.txt   one prompt per line, UTF-8

    With a chat template your input is a message in a conversation; /new starts a new one. Without a template, or with
    --plain, the model continues each line by itself. Ctrl-C stops an answer and, between answers, ends the chat, as
    does Ctrl-D.

    It only needs PyTorch and transformers: no running run, no Redis, no GPU. It samples like the engine `transformers`.

    --json prints {model, prompt, answer, num_tokens, finish_reason}: stop, or length if --max-tokens or the model's
    positions were used up.
    """
    is_interactive = prompt is None and sys.stdin.isatty()
    if as_json and is_interactive:
        raise ConfigError("--json needs --prompt TEXT, or prompts on stdin, one per line")
    if system is not None and plain:
        raise ConfigError("--system needs the chat template, which --plain turns off")
    found = find_subject(subject, exported=True, base=model)
    need("a chat", "torch", "transformers", "safetensors", extra="learner")
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    speaker = _load(found, seed)
    if system is not None and not speaker.has_template:
        raise ConfigError(f"--system needs a chat template, and the tokenizer of {found.name} has none")
    sampling = Sampling(max_tokens=max_tokens, greedy=temperature == 0, temperature=temperature or 1.0)
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    conversation = Dialogue(speaker, sampling, first=None if plain or not speaker.has_template else first)
    if is_interactive:
        click.echo(f"{found.name}; {_help_line(conversation)}", err=True)
        converse(conversation, read=_read_input, write=_write)
        return
    for text in [prompt] if prompt is not None else _lines():
        conversation.begin()
        _answer_once(conversation, text, name=found.name, as_json=as_json)


class Dialogue:
    """The messages so far, which the next answer continues."""

    def __init__(self, speaker: Speaker, sampling: Sampling, *, first: Sequence[Message] | None) -> None:
        self._speaker, self._sampling = speaker, sampling
        self._first = first  # None: no template; each text stands alone
        self.begin()

    @property
    def is_templated(self) -> bool:
        return self._first is not None

    def begin(self) -> None:
        self._messages: list[Message] = list(self._first or ())

    def answer(self, text: str, answer: Answer) -> Iterator[str]:
        """Yield the pieces of the answer; an interrupted answer is kept in the conversation. DataError leaves it
        unchanged.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        prompt_ids = self._speaker.read(messages if self.is_templated else text)
        try:
            yield from self._speaker.speak(prompt_ids, self._sampling, answer)
        finally:
            if self.is_templated and answer.token_ids:
                self._messages = [*messages, {"role": "assistant", "content": answer.text}]


def converse(conversation: Dialogue, *, read: Callable[[], str], write: Callable[[str], None]) -> None:
    """Loop until `read` raises EOFError or KeyboardInterrupt; the latter first ends an answer in progress."""
    from streamrl.workers.talk import Answer

    while True:
        try:
            text = read()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if text.strip() == _NEW_CHAT:
            conversation.begin()
        elif text.strip():
            try:
                for piece in conversation.answer(text, Answer()):
                    write(piece)
            except KeyboardInterrupt:
                write(" ...")
            except DataError as error:
                write(f"error: {error}; {_NEW_CHAT} starts a new conversation")
            write("\n")


def _answer_once(conversation: Dialogue, text: str, *, name: str, as_json: bool) -> None:
    from streamrl.workers.talk import Answer

    answer = Answer()
    for piece in conversation.answer(text, answer):
        if not as_json:
            _write(piece)
    result = {
        "model": name,
        "prompt": text,
        "answer": answer.text,
        "num_tokens": len(answer.token_ids),
        "finish_reason": answer.finish_reason,
    }
    if as_json:
        click.echo(json.dumps(result))  # in ASCII: it holds no control characters, and any locale can write it
    else:
        _write("\n")


def _load(subject: Subject, seed: int) -> Speaker:
    line = MovingLine()
    line.show(f"loading {subject.name}")
    configure_logging("chat", None, quiet=True)
    from streamrl.learner.checkpoints.export import write_weights
    from streamrl.ops.cli.models.model_folder import settings_on_base
    from streamrl.workers.talk import load_speaker

    try:
        if subject.checkpoint is None:
            return load_speaker(subject.name, seed=seed)
        config = settings_on_base(subject)
        with scratch_folder() as folder:
            weights = folder / "weights.safetensors"
            write_weights(config, weights, checkpoint=subject.checkpoint)
            return load_speaker(config.model.path, seed=seed, weights=weights, dtype=config.weights.dtype)
    finally:
        line.end()


def _help_line(conversation: Dialogue) -> str:
    mode = f"{_NEW_CHAT} starts a new chat" if conversation.is_templated else "no chat template: it continues each line"
    return f"{mode}, Ctrl-C ends an answer, Ctrl-D the chat"


def _lines() -> Iterator[str]:
    """Yield the prompts on stdin, which is UTF-8 as all files are, whatever the locale."""
    for number, data in enumerate(sys.stdin.buffer, start=1):
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"stdin: line {number} is {why_not_text(data)}") from None
        if text.strip():
            yield text.rstrip("\r\n")


def _read_input() -> str:
    import readline  # noqa: F401  # input() then takes arrow keys

    return input("> ")


def _write(text: str) -> None:
    """Print at once, with control characters escaped: a model may emit terminal commands."""
    click.echo("\n".join(map(printable, text.split("\n"))), nl=False)
    sys.stdout.flush()
