"""`streamrl sft`: supervised training on prompts with answers, before a run. torch is imported in the command."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from streamrl.data.settings import DATE
from streamrl.extras import LEARNER, need_all
from streamrl.ops.cli.arguments import takes_json

_POSITIVE, _ABOVE_0 = click.IntRange(min=1), click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", required=True, help="Model to start from: folder or hub name of a causal language model.")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    help='JSONL, .gz or not, of {"prompt": ..., "completion": ...} or {"messages": [...]}.',
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder for the trained model.")
@click.option("--chat", is_flag=True, help="Render prompt and completion with the chat template.")
@click.option(
    "--date",
    type=click.DateTime(["%Y-%m-%d"]),
    default=DATE,
    help="What a chat template that writes today's date takes for today, as `data.date` of a run.",
)
@click.option("--epochs", type=_POSITIVE, default=1, help="Epochs.")
@click.option("--batch-size", type=_POSITIVE, default=32, help="Rows per step.")
@click.option("--lr", type=_ABOVE_0, default=1e-5, help="Peak learning rate of AdamW.")
@click.option("--warmup-steps", type=click.IntRange(min=0), default=20, help="Linear warm-up steps.")
@click.option(
    "--schedule",
    type=click.Choice(["cosine", "constant"]),
    default="cosine",
    help="Schedule after the warm-up: down to a tenth, or constant.",
)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.0, help="Weight decay of AdamW.")
@click.option("--clip-norm", type=_ABOVE_0, default=1.0, help="Gradient clipping norm.")
@click.option("--max-tokens", type=_POSITIVE, default=2048, help="Longer rows are skipped.")
@click.option(
    "--micro-batch-tokens", type=_POSITIVE, default=4096, help="Tokens per pass; affects memory, not the result."
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Dtype of forward and backward passes; masters are float32.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    help="Share of the rows held out for measuring.",
)
@click.option("--save-every", type=_POSITIVE, default=100, help="Steps between saved states to resume from.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=1234, help="Seed of the order and of the held-out rows."
)
@click.option("--threads", type=_POSITIVE, help="CPU threads; default: torch's choice.")
@takes_json
def sft(threads: int | None, as_json: bool, date: datetime, **options: Any) -> None:
    """Fine-tune a model on prompts with answers, as the starting point of a run.

    \b
        streamrl sft --model HuggingFaceTB/SmolLM2-135M-Instruct --data answers.jsonl --output ./sft
        streamrl up conf/pretrained.yaml model.path=./sft data.train=prompts.jsonl data.validation=held-out.jsonl

    Only the answers and their end tokens have a loss; in a dialogue all answers do. Rows are packed as the learner
    packs them, without padding. If it is interrupted, the same command resumes and reaches the same weights. The
    model's folder appears at the end, complete: in bfloat16 if it started from a model in bfloat16, else in float32.
    """
    need_all([LEARNER])
    from streamrl.learner.sft.training import Settings, prepare_process, train

    prepare_process(threads)
    settings = Settings(**options, date=date.date().isoformat())
    outcome = train(settings, lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps({"output": str(options["output"]), **asdict(outcome)}))
        return
    click.echo(
        f"trained on {outcome.num_rows} rows ({outcome.num_tokens} tokens with a loss): loss {outcome.loss:.3f}"
        + ("" if outcome.held_out_loss is None else f", {outcome.held_out_loss:.3f} on {outcome.num_held_out} held out")
        + f"; in {options['output']}"
    )
