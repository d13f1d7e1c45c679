"""`streamrl reward`: try a function, serve a reward model over HTTP, or train one.

torch and the server are imported in the commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from streamrl.config import schema
from streamrl.data.texts import convert
from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.files import write_durably
from streamrl.ops.cli.arguments import OutputFile
from streamrl.ops.cli.rewards.reward_try import try_reward
from streamrl.process import address_of, bind

_POSITIVE, _ABOVE_0 = click.IntRange(min=1), click.FloatRange(min=0, min_open=True)
_FILE, _PORT = click.Path(path_type=Path), click.IntRange(0, 65535)


def _setting(name: str, kind: Any, meaning: str) -> Callable[..., Any]:
    """Add an option for `reward_server.NAME`, with the configuration's default."""
    default = schema.RewardServer.model_fields[name].default
    return click.option(f"--{name.replace('_', '-')}", type=kind, default=default, help=meaning)


def _numbers(_: click.Context, __: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(",") if word)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 0.5,0,1") from None


@click.group()
def reward() -> None:
    """Try a reward function, serve a reward model over HTTP, or train one."""


reward.add_command(try_reward)


@reward.command()
@click.option("--model", required=True, help="Folder or hub name of a sequence-classification model.")
@_setting("host", str, "Address to listen on.")
@_setting("port", _PORT, "0: any free one.")
@_setting("max_delay_ms", click.FloatRange(min=0), "How long a request may wait for others to share its batch.")
@_setting("max_batch_tokens", _POSITIVE, "Tokens of one forward pass, padding included.")
@_setting(
    "pool", click.Choice(["last", "average"]), "Whose reward counts: the last token's, or the mean of all tokens'."
)
@click.option(
    "--attribute-weights",
    default="",
    show_default=False,
    callback=_numbers,
    metavar="X,Y,...",
    help="For a model with several outputs: the reward is their sum with these weights.",
)
@_setting("reward_mean", float, "Of the model's own rewards, to standardise them.")
@_setting("reward_std", _ABOVE_0, "Their deviation: the server answers (reward - mean) / std.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Dtype of weights and computation.",
)
@click.option("--threads", type=_POSITIVE, help="CPU threads of the model; default: torch's choice.")
@click.option("--token-file", help="File with the bearer token that callers of /score must send.")
@click.option("--url-file", type=OutputFile(), help="File for the server's URL, written once it listens.")
@click.option(
    "--bound-file", type=OutputFile(), help="The same, but before the model is loaded, once the port is bound."
)
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def serve(**options: Any) -> None:
    """Serve a reward model: POST /score, GET /health, /metrics and /openapi.json.

    OpenRLHF's remote reward protocol is available at POST /get_reward. Prints one line with its URL when it is ready.
    On SIGTERM it answers open requests and exits. For replicas, start several and list them in the configuration's
    rewards.NAME.replicas.
    """
    need("the reward server", "torch", "transformers", "starlette", "uvicorn", extra="rewards")
    from streamrl.workers.reward_server.server import build_app, run
    from streamrl.workers.rewards.http_request import read_token

    token = None if options["token_file"] is None else read_token(options["token_file"], key="--token-file")
    bound = bind(options["host"], options["port"], what="reward server")  # before the model: a taken port fails at once
    with bound:
        url = f"http://{address_of(bound, host=options['host'])}"
        if options["bound_file"] is not None:
            write_durably(options["bound_file"], url.encode())

        def ready() -> None:
            if options["url_file"] is not None:
                write_durably(options["url_file"], url.encode())
            click.echo(f"reward server: {options['model']} at {url}")

        app = build_app(
            schema.RewardServer.model_validate({name: options[name] for name in schema.RewardServer.model_fields}),
            dtype=options["dtype"],
            threads=options["threads"],
            token=token,
            trust_remote_code=options["trust_remote_code"],
        )
        run(app, bound, ready)


@reward.command()
@click.option("--model", required=True, help="Model to start from: folder or hub name.")
@click.option(
    "--pairs",
    type=_FILE,
    help='Preferences (Bradley-Terry): JSONL of {"prompt": ..., "chosen": ..., "rejected": ...}.',
)
@click.option(
    "--ratings",
    type=_FILE,
    help='Instead of pairs (regression): JSONL of {"prompt": ..., "completion": ..., "score": number or list}.',
)
@click.option("--output", required=True, type=_FILE, help="Folder for the trained model.")
@click.option("--epochs", type=_POSITIVE, default=1, help="Epochs.")
@click.option("--batch-size", type=_POSITIVE, default=32, help="Pairs or ratings per step.")
@click.option("--lr", type=_ABOVE_0, default=1e-5, help="Learning rate of AdamW.")
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.0, help="Weight decay of AdamW.")
@click.option("--clip-norm", type=_ABOVE_0, default=1.0, help="Gradient clipping norm.")
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    help="Share of the data held out for measuring.",
)
@click.option("--max-tokens", type=_POSITIVE, default=2048, help="Longer texts are skipped.")
@click.option("--seed", type=int, default=1234, help="Seed of the order, the held-out share and the new head.")
@click.option("--threads", type=_POSITIVE, help="CPU threads; default: torch's choice.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def train(threads: int | None, pairs: Path | None, ratings: Path | None, **options: Any) -> None:
    """Train a reward model on preferences, or on ratings.

    --pairs takes preferences; --ratings takes one or several numbers per completion, one for each output of the model.
    `streamrl reward read-hh` converts Anthropic-HH's files to pairs.
    """
    if (pairs is None) == (ratings is None):
        raise ConfigError("exactly one of --pairs and --ratings is needed")
    need("training a reward model", "torch", "transformers", extra="rewards")
    from streamrl.workers.reward_server.model import prepare_process
    from streamrl.workers.reward_server.train import TrainSettings, read_pairs, read_ratings
    from streamrl.workers.reward_server.train import train as train_model

    _make_folder(options["output"])
    prepare_process(threads)
    if pairs is not None:
        examples = read_pairs(pairs)
    else:
        assert ratings is not None
        examples = read_ratings(ratings)
    summary = train_model(examples, TrainSettings(**options), click.echo)
    click.echo(
        f"{options['output']}: orders {summary.accuracy:.1%} of {summary.num_held_out} held-out examples correctly "
        f"(trained on {summary.num_trained}, {summary.num_overlong} too long); serve it with "
        f"{_weights_option(summary.num_outputs)}"
        f"--reward-mean {summary.reward_mean:.4g} --reward-std {summary.reward_std:.4g}"
    )


def _weights_option(num_outputs: int) -> str:
    """With several outputs, the summary's mean and deviation are those of the outputs' mean."""
    return f"--attribute-weights {','.join([f'{1 / num_outputs:.4g}'] * num_outputs)} " if num_outputs > 1 else ""


def _make_folder(output: Path) -> None:
    """Check the output folder before the work whose result it will hold."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        is_empty = not any(output.iterdir())
    except OSError as error:
        raise ConfigError(f"--output: cannot create the folder {str(output)!r}: {error.strerror}") from None
    if not is_empty:
        raise ConfigError(f"--output: {str(output)!r} is not empty; nothing is overwritten")
    if not os.access(output, os.W_OK):
        raise ConfigError(f"--output: {str(output)!r} is not writable")


@reward.command("read-hh")
@click.argument("source", type=_FILE)
@click.option("--pairs", required=True, type=OutputFile(), help="JSONL for `streamrl reward train`.")
@click.option("--prompts", required=True, type=OutputFile(), help="JSONL for data.train of a run.")
def read_hh(source: Path, pairs: Path, prompts: Path) -> None:
    """Make pairs and prompts from dialogues like HH's.

    SOURCE holds dialogues as in Anthropic's HH: JSONL of {"chosen": ..., "rejected": ...}, .gz or not.
    """
    counts = convert(source, pairs=pairs, prompts=prompts)
    click.echo(
        f"{source}: {counts.num_pairs} pairs to {pairs}, {counts.num_prompts} prompts to {prompts}; "
        f"{counts.num_skipped} rows left out: their two dialogues share no prompt"
    )
